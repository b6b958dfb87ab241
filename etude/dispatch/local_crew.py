"""The crew of one worker in this process: enough for a laptop, and the reference for every other crew."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from etude.protocols import Gather, get_dispatch_mode

if TYPE_CHECKING:
    from etude.batch import Batch, BatchMeta
    from etude.dispatch.messages import BatchFactory

__all__ = ["LocalCrew"]

R = TypeVar("R")


class LocalCrew:
    """One worker, called directly. Nothing is split or joined, but a method without a dispatch mode is refused all the
    same.

    A program that runs with this crew runs with any other: a method that lacks a dispatch mode fails here first, on a
    laptop. Calls are made one at a time, from any thread.
    """

    def __init__(self, worker: object) -> None:
        self._worker: object | None = worker
        self._call_lock = threading.RLock()

    def call(self, method: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """Call `Worker.method` (the function on the class) on the one worker."""
        assert self._worker is not None, "this crew was closed"
        gather = get_dispatch_mode(method).gather
        with self._call_lock:
            result = method(self._worker, *args, **kwargs)
        return [result] if gather is Gather.ALL else result  # type: ignore[return-value]

    def call_for_ref(self, method: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """Do the same as `call`, since the result is in this process."""
        return self.call(method, *args, **kwargs)

    def put(self, value: object) -> Any:
        """Return the value, since it is in this process."""
        return value

    def build_batch(
        self,
        meta: BatchMeta,  # noqa: ARG002
        refs: Sequence[Any],
        factory: BatchFactory,
        metadata: Sequence[Any],
    ) -> Batch:
        """Build a batch from stored values and their metadata."""
        return factory(refs, metadata)

    def fetch(self, batch: Batch) -> Batch:
        """Return the batch, since it is in this process."""
        return batch

    def close(self) -> None:
        """Drop the worker."""
        self._worker = None
