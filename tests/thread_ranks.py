"""Ranks as threads with a barrier: real collective calls in one process, which a lost rank cannot block."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from etude.algorithms.view import Ranks

T = TypeVar("T")


class ThreadRank(Ranks):
    """One of several ranks. A collective call waits for all of them."""

    def __init__(self, rank: int, values_of_ranks: list[Tensor], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.count = len(values_of_ranks)
        self._values_of_ranks = values_of_ranks
        self._barrier = barrier

    def all_reduce(self, values: Tensor) -> Tensor:
        return torch.stack(self._exchange(values)).sum(0)

    def all_gather(self, values: Tensor) -> Tensor:
        return torch.cat(self._exchange(values))

    def all_max(self, number: int) -> int:
        return int(self.all_gather(torch.tensor([number])).max())

    def _exchange(self, values: Tensor) -> list[Tensor]:
        self._values_of_ranks[self.rank] = values
        self._barrier.wait()
        gathered = list(self._values_of_ranks)
        self._barrier.wait()
        return gathered


def on_ranks(count: int, work: Callable[[int, Ranks], T]) -> list[T]:
    """Run `work(rank, ranks)` on all ranks at once, and return the results or raise the first error."""
    barrier = threading.Barrier(count, timeout=30)
    values_of_ranks = [torch.empty(0)] * count
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run_rank(rank: int) -> None:
        try:
            results[rank] = work(rank, ThreadRank(rank, values_of_ranks, barrier))
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run_rank, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    first = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)] or errors
    if first:
        raise first[0]
    return [results[rank] for rank in range(count)]
