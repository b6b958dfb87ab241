"""The crew of one worker in this process: enough for a laptop, and the reference for every other crew."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from etude.protocols import Crew, Gather, get_dispatch_mode

R = TypeVar("R")


class LocalCrew(Crew):
    """One worker, called directly. Nothing is split or joined, but a method without a dispatch mode is refused all the
    same.

    A program that runs with this crew runs with any other: a method that lacks a dispatch mode fails here first, on a
    laptop. Calls are made one at a time, from any thread.
    """

    def __init__(self, worker: object) -> None:
        self._worker: object | None = worker
        self._call_lock = threading.RLock()

    def call(self, method: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        assert self._worker is not None, "this crew was closed"
        gather = get_dispatch_mode(method).gather
        with self._call_lock:
            result = method(self._worker, *args, **kwargs)
        return [result] if gather is Gather.ALL else result  # type: ignore[return-value]

    def close(self) -> None:
        self._worker = None
