"""The start of every process of SGLang's server without a GPU.

Two packages are replaced as they are imported: torchvision, whose compiled part does not load beside a torch without
CUDA, gets the schemas of the operators that its Python names; `sgl_kernel`, which needs CUDA, becomes a module whose
functions exist and raise. Pinned memory, of which there is none without a GPU, is plain memory. The processors of
Qwen's vision models load a model that names more operators; they get schemas too.
"""

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

NAMED_KERNELS = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)


def without_pinning(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes the same tensor in plain memory."""

    @wraps(make)
    def made(*args: Any, **options: Any) -> Any:
        options.pop("pin_memory", None)
        return make(*args, **options)

    return made


class Kernels(ModuleType):
    """Functions that a model on a CPU never calls."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.endswith("_cpu"):
            raise AttributeError(name)

        def absent(*_: object, **__: object) -> None:
            raise RuntimeError(f"sgl_kernel.{name} was called, and there is no GPU")

        return absent


class StandIn:
    """The import finder that replaces the one package, and prepares the import of the other."""

    def __init__(self) -> None:
        self.prepared = False

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        """Find the module, as a finder on `sys.meta_path` does."""
        del path, target
        if name == "torchvision" and not self.prepared:
            self.prepared = True
            self._operators()
        return ModuleSpec(name, self) if name == "sgl_kernel" else None  # type: ignore[arg-type]

    def _operators(self) -> None:
        import torch

        self.library = torch.library.Library("torchvision", "DEF")
        self.library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        self.library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        self.kernels = torch.library.Library("sgl_kernel", "FRAGMENT")
        for name in NAMED_KERNELS:
            self.kernels.define(f"{name}(Tensor(a!) x) -> ()")
        torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]
        pinning = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
        torch.cuda.cudart = lambda: pinning  # type: ignore[assignment]
        for name in ("arange", "empty", "tensor", "zeros"):
            setattr(torch, name, without_pinning(getattr(torch, name)))

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Create the module, as a loader does."""
        return Kernels(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module is complete."""


sys.meta_path.insert(0, StandIn())
