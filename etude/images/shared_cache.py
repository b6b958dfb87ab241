"""Values by the hash of an image, those that were used last. Each is made once for all that ask for it together."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedCache(Generic[T]):
    """Values by digest, the longest unused first. Any thread may call it."""

    def __init__(self, size: Callable[[T], int], max_bytes: int) -> None:
        """size: returns the bytes of a value. max_bytes: the most bytes of all values."""
        self.max_bytes = max_bytes
        self._size = size
        self._bytes = 0
        self._lock = threading.Lock()
        self._values: OrderedDict[str, Future[T]] = OrderedDict()

    def get(self, digest: str, make: Callable[[], T]) -> T:
        """Return a value, which this thread makes if it is not kept. An error of `make` is raised for all that wait."""
        with self._lock:
            known = self._values.get(digest)
            future = self._values.setdefault(digest, Future())
            self._values.move_to_end(digest)
        if known is None:
            self._make(digest, make, future)
        return future.result()

    def _make(self, digest: str, make: Callable[[], T], future: Future[T]) -> None:
        try:
            value = make()
        except BaseException as error:
            with self._lock:
                del self._values[digest]
            future.set_exception(error)
            return
        future.set_result(value)
        with self._lock:
            self._bytes += self._size(value)
            while self._bytes > self.max_bytes:
                others = (other for other, each in self._values.items() if each.done() and other != digest)
                if (oldest := next(others, None)) is None:
                    break
                self._bytes -= self._size(self._values.pop(oldest).result())
