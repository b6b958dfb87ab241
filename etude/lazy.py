"""Modules that load when they are first used, so that what only has options is read without waiting for them.

A loss is its own configuration and the function that computes it: one class, in one file. A command line is checked
against the first, and torch is needed for the second, so such a file takes torch from here:

    from etude.lazy import torch

    if TYPE_CHECKING:
        from torch import Tensor

Nothing that runs when the file is loaded may touch it: annotations are text, and tensors are made in functions.
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

__all__ = ["LazyModule", "lazy_getattr", "pause_gc", "torch"]


@contextmanager
def pause_gc() -> Iterator[None]:
    """Rest the garbage collector while modules load: what they make stays, and walking it again and again is an eighth
    of the time that torch and transformers take to load."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class LazyModule(ModuleType):
    """A module that is imported when one of its names is first read."""

    def __getattr__(self, name: str) -> Any:
        """Read a name of the module that it stands for, and keep it."""
        with pause_gc():
            module = import_module(self.__name__)
        value = getattr(module, name)
        setattr(self, name, value)
        return value


if not TYPE_CHECKING:
    torch = LazyModule("torch")


def lazy_getattr(package: str, exports: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package whose public names load from their files when they are first read.

    places: the names that each of its files has.
    """
    files = {name: file for file, names in exports.items() for name in names}

    def read(name: str) -> Any:
        if name not in files:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        with pause_gc():
            module = import_module(f"{package}.{files[name]}")
        return getattr(module, name)

    return read
