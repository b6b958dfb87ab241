"""Limits of the writes of each attempt with its own key, so that no attempt fills the disk.

The counts are in memory and start again with the server. An attempt that is over may use the rest of its quota, since
spans and events arrive after its end.
"""

from __future__ import annotations

from etude.errors import DataError
from etude.store import request_limits as bounds
from etude.store.queue_records import AttemptId


class WriteQuota:
    """Counts one kind of write of each attempt, in number and bytes. It is used on one event loop."""

    def __init__(self, kind: str, max_count: int, max_bytes: int) -> None:
        self._kind, self._max_count, self._max_bytes = kind, max_count, max_bytes
        self._written: dict[AttemptId, tuple[int, int]] = {}
        """Number and bytes of the writes of each attempt; the attempt that wrote last is the last."""

    def take(self, key: AttemptId, size: int) -> None:
        """Count one more write of an attempt; raise `DataError` if it exceeds the quota."""
        count, written = self._written.pop(key, (0, 0))
        fits = count < self._max_count and written + size <= self._max_bytes
        self._written[key] = (count + 1, written + size) if fits else (count, written)
        if len(self._written) > bounds.WRITERS:
            del self._written[next(iter(self._written))]
        if not fits:
            raise DataError(
                f"Attempt {key.attempt} of rollout {key.rollout} has written {count} {self._kind} of {written} bytes "
                f"with its own key, and one of {size} bytes would exceed the quota. The quota is {self._max_count} of "
                f"{self._max_bytes} bytes. Write fewer, or write them to a file."
            )
