"""The memory of a GPU that is left for the embedded engine's keys and values."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30
RESERVE = 2 * GIB
"""Bytes that stay free on a GPU of 32 GiB or more, for the context, kernels and what the allocator cannot use."""


@dataclass(frozen=True)
class KvBudget:
    """The terms of that sum, in bytes."""

    total: int
    """The memory of the GPU."""
    planned: int
    """The peak of the run on it while the cache is there, without keys and values."""
    phase: str
    """The phase with that peak."""
    useful: int
    """The most that requests can fill."""

    @property
    def reserve(self) -> int:
        """The bytes that stay free."""
        return min(RESERVE, self.total // 16)

    @property
    def size(self) -> int:
        """The bytes for keys and values; 0 if nothing is left."""
        return max(min(self.useful, self.total - self.planned - self.reserve), 0)

    def describe(self) -> str:
        """Return the sum."""
        left = self.total - self.planned - self.reserve
        return (
            f"{_gib(self.total)} of the GPU − {_gib(self.planned)} for the run without keys and values "
            f"({self.phase}) − {_gib(self.reserve)} kept free = {_gib(left)}, and requests can fill "
            f"{_gib(self.useful)}"
        )


def _gib(size: int) -> str:
    return f"{size / GIB:.3g} GiB"
