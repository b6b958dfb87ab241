"""The tokens that carry rewards: a rollout's own is at its last action token, token rewards at their tokens.

    final reward   R            →  r at the rollout's last action token
    token reward   at an action →  r there
                   elsewhere    →  r at the rollout's action token before it; refused where there is none

Few tokens have a reward, so token rewards are stored as a short list. `per_token` builds the column.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from etude.algorithms.view import View, flatnonzero
from etude.errors import RewardError
from etude.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Rewards:
    """The rewards of a view's rollouts: token rewards at action tokens, and each rollout's own at the end."""

    view: View

    @cached_property
    def sparse_token_rewards(self) -> tuple[Tensor, Tensor]:
        """Token rewards in order: [E] their indices among the action tokens (may repeat), [E] their float64 amounts."""
        batch, rewards = self.view.batch, self.view.batch.token_reward
        if rewards is None:
            nothing = torch.zeros(0, dtype=torch.float64, device=batch.device)
            return nothing.long(), nothing
        at = flatnonzero((rewards != 0) & (batch.action | ~rewards.isnan()))
        amount = rewards.index_select(0, at).double()
        rollout = torch.searchsorted(batch.rollout_token_offsets, at, right=True) - 1
        place = torch.searchsorted(self.view.action_index, at, right=True) - 1  # the last action at or before it
        bad = (place < self.view.rollouts.offsets[rollout]) | ~torch.isfinite(amount)
        if bool(bad.any()):
            first = int(bad.nonzero()[0])
            raise RewardError(
                f"Rollout {batch.get_rollout_id(int(rollout[first]))} has a token reward of {float(amount[first])} "
                f"that belongs to no action token: it must be finite, and be at an action token or after one."
            )
        return place, amount

    @cached_property
    def rollout_rewards(self) -> Tensor:
        """[U] float64: each rollout's own reward."""
        return self.view.batch.require("reward").double()

    @cached_property
    def total(self) -> Tensor:
        """[U] float64: R, the sum of a rollout's rewards."""
        place, amount = self.sparse_token_rewards
        return self.rollout_rewards.index_add(0, self.view.rollouts.locate(place), amount)

    def per_token(self, dtype: torch.dtype, baseline: Tensor | None = None) -> Tensor:
        """[A]: r_t, with each rollout's own reward, less `baseline` [U], at its last action token."""
        place, amount = self.sparse_token_rewards
        rollouts, own = (
            self.view.rollouts,
            self.rollout_rewards if baseline is None else self.rollout_rewards - baseline,
        )
        acted = rollouts.lengths > 0
        at = torch.cat([(rollouts.offsets[1:] - 1)[acted], place])
        rewards = torch.zeros(rollouts.size, dtype=dtype, device=own.device)
        return rewards.index_add_(0, at, torch.cat([own[acted], amount]).to(dtype))
