"""The ranks of a run as a block: along one side they hold other rollouts, along the others the same.

    data × sequence × tensor          rank 0 │ 1      rank 4 │ 5        across:  tensor, a part of each layer
                                           2 │ 3           6 │ 7        down:    sequence, a part of each sequence
                                        rollouts a    rollouts b        block:   data, some of the rollouts

Ranks that are next to each other in a layer are next to each other in number, because they have most to exchange. The
ranks of one block are given the same rollouts, cut into the same micro-batches, and say the same of them; what is told
of a batch is told once for each block. Weights, their gradient and the optimizer are everybody's: every rank of all
blocks owns some rows of each.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from etude.algorithms.view import Ranks, SingleRank
from etude.errors import ConfigError
from etude.models import Divided, Model, Side
from etude.train.config import MeshConfig
from etude.train.ranks import DistributedRanks, current_ranks

__all__ = ["Mesh"]


class Mesh:
    """Where this rank stands among the others, and with whom it exchanges what."""

    def __init__(self, config: MeshConfig | None = None, *, timeout: float = 1800.0) -> None:
        """All ranks make it together, before anything is exchanged. By default each of them has rollouts of its own.

        `timeout`: seconds that an exchange may wait for the others."""
        shape = config or MeshConfig()
        if shape.replicas > 1:
            raise ConfigError(
                f"`mesh.replicas={shape.replicas}` are copies of weights that are sharded by PyTorch's FSDP2, and this "
                f"engine has no shards of them. Leave it out."
            )
        self.size = shape.size
        """How many ranks compute the same rollouts."""
        self._tensor, self._sequence, self._both = Side(), Side(), Side()
        self.data: Ranks = current_ranks()
        """Those that hold the other rollouts, one of each block."""
        if self.size == 1:
            return
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        shape.check_ranks(ranks)
        block, bound = torch.arange(ranks).view(-1, shape.sequence, shape.tensor), timedelta(seconds=timeout)
        self._both = _side(block.flatten(1), bound)
        self._tensor = _side(block.flatten(0, 1), bound)
        self._sequence = _side(block.transpose(1, 2).flatten(0, 1), bound)
        across = _side(block.flatten(1).T, bound)
        self.data = DistributedRanks(across.group) if across.count > 1 else SingleRank()

    def over(self, model: Model) -> Divided | None:
        """The model as this rank computes it together with others; None where it computes alone."""
        return Divided(model, self._tensor, self._sequence, self._both) if self.size > 1 else None

    def waited(self) -> float:
        """Seconds that exchanges within a micro-batch took since this was last asked."""
        return sum(side.waited() for side in {self._tensor, self._sequence, self._both})


def _side(groups: Tensor, timeout: timedelta) -> Side:
    """This rank's group among these, one to a row."""
    if groups.shape[1] == 1:
        return Side()
    mine, _ = dist.new_subgroups_by_enumeration(groups.tolist(), timeout=timeout)  # type: ignore[no-untyped-call]
    return Side(mine, dist.get_rank(mine), groups.shape[1])
