"""What is known of a batch without its tokens: enough to share it out by what it costs, and to hand it on unseen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.batch.batch import Batch
from etude.batch.cut import cuts

__all__ = ["Outline"]


@dataclass(frozen=True, eq=False)
class Outline:
    """How many tokens each rollout has, and which rollouts are a group."""

    tokens_of: Tensor
    """[U] int64."""
    prompt_of: Tensor
    """[U] int64: of those, the ones before its first action."""
    group: Tensor
    """[U] int64, numbered from 0."""

    @classmethod
    def of(cls, batch: Batch) -> Outline:
        """That of a batch."""
        ends = batch.unit_tokens.cpu()
        acts = torch.cat([batch.action.nonzero()[:, 0].cpu(), ends[-1:]])
        first = torch.minimum(acts[torch.searchsorted(acts, ends[:-1])], ends[1:])
        return cls(ends.diff(), first - ends[:-1], batch.group.cpu())

    @classmethod
    def told(cls, tokens_of: NDArray[np.int64], prompt_of: NDArray[np.int64], group: Tensor) -> Outline:
        """That of rollouts of so many tokens each."""
        return cls(torch.from_numpy(tokens_of), torch.from_numpy(prompt_of), group.cpu())

    @property
    def rollouts(self) -> int:
        """U."""
        return len(self.group)

    @property
    def tokens(self) -> int:
        """T: all of them, context included."""
        return int(self.tokens_of.sum())

    @property
    def unit_tokens(self) -> Tensor:
        """[U + 1]: rollout u has the tokens from unit_tokens[u] to unit_tokens[u + 1] of the batch."""
        return torch.cat([self.tokens_of.new_zeros(1), self.tokens_of.cumsum(0)])

    def select(self, rollouts: Tensor | Sequence[int]) -> Outline:
        """That of these rollouts, in this order; groups are numbered anew from 0."""
        units = torch.as_tensor(rollouts, dtype=torch.int64)
        group = torch.unique(self.group[units], return_inverse=True)[1]
        return Outline(self.tokens_of[units], self.prompt_of[units], group)

    def cut(self, parts: int, by: str = "rollout") -> list[Tensor]:
        """The rollouts of each part, where the batch is split into so many."""
        return cuts(self.unit_tokens, self.group, parts, by)
