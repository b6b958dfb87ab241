"""Release of OpenMP worker threads, so that one group of them exists at a time.

Every thread that calls a parallel kernel gets its own OpenMP workers, which stay for its next call. GNU's OpenMP
counts all of them. Once there are more than processors, workers no longer wait awake for the next kernel but sleep
after each. A model of many small kernels then takes nearly twice as long. A trainer and an engine in two threads of one
process do not compute at the same time. So each releases its workers when it is the other's turn.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

_SOFT = 1  # omp_pause_soft: settings stay, workers go


def _find_pause_function() -> Callable[[int], int] | None:
    try:
        pause: Callable[[int], int] = ctypes.CDLL("libgomp.so.1").omp_pause_resource_all
    except (OSError, AttributeError):
        return None  # another OpenMP, which does not count workers
    return pause


_PAUSE = _find_pause_function()


def release_omp_workers() -> None:
    """End the workers of the calling thread. Its next parallel kernel makes new ones, in microseconds."""
    if _PAUSE is not None:
        _PAUSE(_SOFT)
