"""Modules that are imported when they are first used, so that options are checked without waiting for torch.

A loss is one class in one file: its fields are its options, and its `__call__` computes it. The command line needs the
options only; the computation needs torch. Such a file takes torch from here:

    from etude.lazy import torch

    if TYPE_CHECKING:
        from torch import Tensor

Module-level code must not touch it: annotations are strings, and functions create the tensors.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch


@contextmanager
def pause_gc() -> Iterator[None]:
    """Pause the garbage collector while modules load. Their objects stay alive, and scanning them repeatedly takes an
    eighth of the load time of torch and transformers."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class LazyModule(ModuleType):
    """A stand-in for a module. It imports the module when a name is first read."""

    def __getattr__(self, name: str) -> Any:
        """Read a name of the real module, and cache it here."""
        with pause_gc():
            module = import_module(self.__name__)
        value = getattr(module, name)
        setattr(self, name, value)
        return value


if not TYPE_CHECKING:
    torch = LazyModule("torch")


def lazy_getattr(package: str, exports: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return a `__getattr__` for a package that imports a file when one of its public names is first read.

    exports: the public names of each file.
    """
    files = {name: file for file, names in exports.items() for name in names}

    def read(name: str) -> Any:
        if name not in files:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        with pause_gc():
            module = import_module(f"{package}.{files[name]}")
        return getattr(module, name)

    return read
