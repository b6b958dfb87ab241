"""Run a function in a fresh process, to measure the memory of a whole process while threads watch servers."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def alone(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return the result of a module's function in a fresh process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args, **kwargs).result(timeout=120)
