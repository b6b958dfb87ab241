"""The ranks of a run: processes that train one model together, each on some of the rollouts.

Each holds the whole model or shards of it. Some ranks may hold the same rollouts and compute them together: see `mesh`.

Every rank computes sums over ranks in the order of ranks. All ranks then hold the same number in every
bit, and so does the next run.
"""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from etude.algorithms import Denominators
from etude.algorithms.view import Ranks, SingleRank


class DistributedRanks(Ranks):
    """The `Ranks` of torch's default process group, or of `group`. All ranks make the same calls in the same order."""

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.count = dist.get_world_size(group)

    def all_reduce(self, values: Tensor) -> Tensor:
        return torch.stack(self._gather_each(values)).sum(0, dtype=values.dtype)

    def all_gather(self, values: Tensor) -> Tensor:
        counts = [int(count) for count in self._gather_each(torch.tensor(len(values), device=values.device))]
        padded = values.new_zeros((max(counts), *values.shape[1:]))
        padded[: len(values)] = values
        return torch.cat([part[:count] for part, count in zip(self._gather_each(padded), counts, strict=True)])

    def all_max(self, number: int) -> int:
        return int(torch.stack(self._gather_each(torch.tensor(number))).max())

    def _gather_each(self, values: Tensor) -> list[Tensor]:
        """Return the tensor of each rank. All have the same shape."""
        gathered = [torch.empty_like(values, memory_format=torch.contiguous_format) for _ in range(self.count)]
        dist.all_gather(gathered, values.detach().contiguous(), group=self._group)
        return gathered


def current_ranks() -> Ranks:
    """Return the ranks of this process's process group, or `SingleRank` without one."""
    distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return DistributedRanks() if distributed else SingleRank()


def sum_denominators(own: Denominators, ranks: Ranks) -> Denominators:
    """Return the counts of the whole update batch, from those of each rank's share."""
    return Denominators(*ranks.all_reduce(torch.tensor(astuple(own))).tolist())
