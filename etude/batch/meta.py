"""Metadata of a batch, without its tokens: enough to partition it by cost and to pass it on without reading it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.batch.batch import Batch
from etude.batch.split import split_rollouts


@dataclass(frozen=True, eq=False)
class BatchMeta:
    """The number of tokens of each rollout, and the group of each rollout."""

    rollout_lengths: Tensor
    """[U] int64."""
    prompt_lengths: Tensor
    """[U] int64: tokens before the rollout's first action; all of them where it has none."""
    group: Tensor
    """[U] int64, numbered from 0."""

    @classmethod
    def from_batch(cls, batch: Batch) -> BatchMeta:
        """Return the metadata of a batch."""
        ends = batch.rollout_token_offsets.cpu()
        acts = torch.cat([batch.action.nonzero()[:, 0].cpu(), ends[-1:]])
        first = torch.minimum(acts[torch.searchsorted(acts, ends[:-1])], ends[1:])
        return cls(ends.diff(), first - ends[:-1], batch.group.cpu())

    @classmethod
    def from_lengths(cls, tokens_of: NDArray[np.int64], prompt_of: NDArray[np.int64], group: Tensor) -> BatchMeta:
        """Return the metadata of rollouts with these numbers of tokens."""
        return cls(torch.from_numpy(tokens_of), torch.from_numpy(prompt_of), group.cpu())

    @property
    def num_rollouts(self) -> int:
        """U."""
        return len(self.group)

    @property
    def num_tokens(self) -> int:
        """T: the number of tokens, context included."""
        return int(self.rollout_lengths.sum())

    @property
    def rollout_token_offsets(self) -> Tensor:
        """[U + 1]: rollout u is tokens rollout_token_offsets[u] to rollout_token_offsets[u + 1] of the batch."""
        return torch.cat([self.rollout_lengths.new_zeros(1), self.rollout_lengths.cumsum(0)])

    def select(self, rollouts: Tensor | Sequence[int]) -> BatchMeta:
        """Return the metadata of these rollouts, in this order; groups are renumbered from 0."""
        units = torch.as_tensor(rollouts, dtype=torch.int64)
        group = torch.unique(self.group[units], return_inverse=True)[1]
        return BatchMeta(self.rollout_lengths[units], self.prompt_lengths[units], group)

    def partition(self, parts: int, by: str = "rollout") -> list[Tensor]:
        """Return the rollouts of each part when the batch is split into `parts`."""
        return split_rollouts(self.rollout_token_offsets, self.group, parts, by)
