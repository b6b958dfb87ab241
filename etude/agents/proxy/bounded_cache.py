"""A mapping that is bounded: the newest entries, by their number and by what they weigh."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

__all__ = ["BoundedCache"]

K = TypeVar("K")
V = TypeVar("V")


class BoundedCache(Generic[K, V]):
    """The entries that were put last. The newest is kept, whatever it weighs."""

    def __init__(self, max_entries: int, max_weight: int | None = None) -> None:
        """most: the number of entries. heaviest: the weight of all of them."""
        self._max_entries, self._max_weight = max_entries, max_weight
        self._entries: dict[K, tuple[V, int]] = {}  # the oldest first
        self._weight = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[K]:
        return iter(self._entries)

    def get(self, key: K) -> V | None:
        """Return the value of a key, if it is kept."""
        entry = self._entries.get(key)
        return None if entry is None else entry[0]

    def values(self) -> list[V]:
        """The values, the oldest first."""
        return [value for value, _ in self._entries.values()]

    def put(self, key: K, value: V, weight: int = 0) -> None:
        """Make this the newest entry. The oldest are dropped where there are too many."""
        self._weight += weight - self._entries.pop(key, (value, 0))[1]
        self._entries[key] = value, weight
        while len(self._entries) > self._max_entries or self._too_heavy():
            self._weight -= self._entries.pop(next(iter(self._entries)))[1]

    def _too_heavy(self) -> bool:
        return self._max_weight is not None and self._weight > self._max_weight and len(self._entries) > 1
