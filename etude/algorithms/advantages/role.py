"""The advantage of self-play: a rollout's reward against the average reward of its role in the game."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import Field

from etude.algorithms.advantages.base import estimate_per_rollout
from etude.algorithms.advantages.rewards import Rewards
from etude.algorithms.base import Advantage, AdvantageEstimate, AlgorithmState
from etude.algorithms.view import Ranks, View
from etude.lazy import torch
from etude.observe import Last, Metrics

if TYPE_CHECKING:
    from torch import Tensor


def update_role_means(
    means: Mapping[int, float], reward: Tensor, role: Tensor, ranks: Ranks, *, decay: float
) -> dict[int, float]:
    """Return each role's average after this step: decay^n · before + (1 − decay^n) · the mean of its n rewards."""
    roles = torch.unique(ranks.all_gather(torch.unique(role)))  # of all ranks, so that all sum the same roles
    place = torch.searchsorted(roles, role)
    counts = torch.bincount(place, minlength=len(roles)).double()
    sums = torch.zeros_like(counts).index_add_(0, place, reward)
    counts, sums = ranks.all_reduce(torch.stack([counts, sums])).unbind()
    after = dict(means)
    for name, n, total in zip(roles.tolist(), counts.tolist(), sums.tolist(), strict=True):
        kept = decay**n
        after[name] = kept * means.get(name, 0.0) + (1 - kept) * total / n
    return after


class RAE(Advantage):
    """Role-conditioned advantage: A = R − b_role, b a moving average of the role's rewards over the run.

    b ← decay^n · b + (1 − decay^n) · (mean of the role's n rewards of this step), from b = 0.
    Source: 2506.24119, decay 0.95 as in its published settings. Assumes that roles differ in what they can win, and
    that this drifts slowly.
    Ours: the source updates b rollout by rollout and subtracts the updated b. Here the step's n rewards enter together,
    as n updates with their mean, so that their order does not matter. A uses b from before the step: it is independent
    of these rollouts, so the gradient is unbiased. The first step has no baseline.
    """

    decay: float = Field(
        0.95,
        ge=0,
        lt=1,
        description="the share of a role's average that each new reward keeps; larger moves more slowly",
    )

    def required_columns(self) -> frozenset[str]:
        return frozenset({"reward", "role"})

    def __call__(self, view: View, state: AlgorithmState) -> AdvantageEstimate:
        reward, role = Rewards(view).total, view.batch.require("role", needed_by="The advantage `rae`")
        after = update_role_means(state.role_means, reward, role, view.ranks, decay=self.decay)
        present = sorted(after)
        means = reward.new_tensor([state.role_means.get(name, 0.0) for name in present])
        baseline = means[torch.searchsorted(role.new_tensor(present), role)]
        metrics = Metrics({f"role_{name}_mean": Last.of(mean) for name, mean in after.items()})
        return estimate_per_rollout(reward - baseline, view, metrics, replace(state, role_means=after))
