"""A bounded mapping: keeps the newest entries, by their number and their weight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedCache(Generic[K, V]):
    """The newest entries. The last one is kept even if it is too heavy."""

    def __init__(self, max_entries: int, max_weight: int | None = None) -> None:
        """max_entries: the number of entries. max_weight: the weight of all entries."""
        self._max_entries, self._max_weight = max_entries, max_weight
        self._entries: dict[K, tuple[V, int]] = {}  # the oldest first
        self._weight = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[K]:
        return iter(self._entries)

    def get(self, key: K) -> V | None:
        """Return the value of a key; None if it is not kept."""
        entry = self._entries.get(key)
        return None if entry is None else entry[0]

    def values(self) -> list[V]:
        """Return the values, the oldest first."""
        return [value for value, _ in self._entries.values()]

    def put(self, key: K, value: V, weight: int = 0) -> None:
        """Make this the newest entry. The oldest ones are dropped if there are too many."""
        self._weight += weight - self._entries.pop(key, (value, 0))[1]
        self._entries[key] = value, weight
        while len(self._entries) > self._max_entries or self._too_heavy():
            self._weight -= self._entries.pop(next(iter(self._entries)))[1]

    def _too_heavy(self) -> bool:
        return self._max_weight is not None and self._weight > self._max_weight and len(self._entries) > 1
