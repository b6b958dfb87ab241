"""A process with nothing else in it, for what is measured of a whole process: here, servers are watched meanwhile."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def alone(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What a function of a module answers there."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args, **kwargs).result(timeout=120)
