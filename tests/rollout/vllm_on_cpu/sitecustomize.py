"""The start of every process of vLLM's server whose Triton interprets its kernels.

Two modules are changed as they are imported. The list of Triton's backends gets one for a CPU, which vLLM looks for.
The filters of tokens are those of torch, since the interpreter does not run the kernel of top-k and top-p.
"""

import sys
from collections.abc import Callable
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType, SimpleNamespace
from typing import Any


def add_backend(module: ModuleType) -> None:
    """Add a backend for a CPU that reports itself active."""
    module.backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))


def filter_by_torch(module: ModuleType) -> None:
    """Have the module choose the functions that need no Triton."""
    module.HAS_TRITON = False  # type: ignore[attr-defined]


CHANGES: dict[str, Callable[[ModuleType], None]] = {
    "triton.backends": add_backend,
    "vllm.v1.sample.ops.topk_topp_sampler": filter_by_torch,
}


class ChangedLoader(Loader):
    """The loader of a module that is changed afterwards."""

    def __init__(self, loader: Loader, change: Callable[[ModuleType], None]) -> None:
        self.loader = loader
        self.change = change

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create it as its own loader does."""
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run it, and change it."""
        self.loader.exec_module(module)
        self.change(module)


class Finder:
    """The import finder of the modules that are changed."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find the module, as a finder on `sys.meta_path` does."""
        spec = PathFinder.find_spec(name, path, target) if name in CHANGES else None
        if spec is not None and spec.loader is not None:
            spec.loader = ChangedLoader(spec.loader, CHANGES[name])
        return spec


sys.meta_path.insert(0, Finder())
