"""The crew of one worker in this process: what a laptop runs, and what every other crew must agree with."""

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
    """One worker, called where it stands. Nothing is divided or joined, but what is undeclared is refused all the same.

    A program that runs with this crew runs with any other: a method that forgot to say how it is spread fails here
    first, on a laptop. Calls are made one at a time, whichever threads make them.
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
        """As `call`: what stays here is here."""
        return self.call(method, *args, **kwargs)

    def put(self, value: object) -> Any:
        """The value: it is here."""
        return value

    def build_batch(
        self,
        meta: BatchMeta,  # noqa: ARG002
        refs: Sequence[Any],
        factory: BatchFactory,
        metadata: Sequence[Any],
    ) -> Batch:
        """The batch that is made of values which were kept, and of what else is told of them."""
        return factory(refs, metadata)

    def fetch(self, batch: Batch) -> Batch:
        """The batch: it is here."""
        return batch

    def close(self) -> None:
        """Let the worker go."""
        self._worker = None
