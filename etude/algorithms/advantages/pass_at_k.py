"""Advantages for the best of several attempts: the part of a set's maximum that a rollout adds.

Let R_(0) ≤ R_(1) ≤ … ≤ R_(n−1) be a group's rewards in order. Consider the sets of k that hold the rollout at place i.
In C(m, k − 1) of them, all other members are below place m. The rollout raises the maximum of the others in the sets
where it is the highest. Summed by gaps between neighbors,

    A_i = Σ_{m ≤ i} (R_(m) − R_(m−1)) · C(m, k − 1) / C(n, k).

This is a running sum over the group. It is exactly 0 below place k − 1, and a gap of 0 adds exactly 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pydantic import Field

from etude.algorithms.advantages.base import RolloutAdvantage
from etude.algorithms.advantages.statistics import EPSILON, GroupStatistics
from etude.algorithms.segments import Segments
from etude.algorithms.view import View
from etude.errors import BatchError
from etude.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


class _SortedRollouts(NamedTuple):
    """Rollouts sorted by group, then by reward."""

    order: Tensor  # [U] the index in the batch of each place's rollout
    groups: Segments  # the sorted rollouts of each group
    gap: Tensor  # [U] each reward minus the one before it in its group; 0 for the first

    def unsort(self, values: Tensor) -> Tensor:
        """[U] in sorted order → [U] in the batch's order."""
        return torch.empty_like(values).index_copy_(0, self.order, values)


def _sort_rollouts(reward: Tensor, group: Tensor) -> _SortedRollouts:
    order = torch.argsort(reward, stable=True)
    order = order[torch.argsort(group[order], stable=True)]
    groups = Segments(torch.bincount(group))
    sorted_ = reward[order]
    gap = torch.where(groups.position > 0, sorted_ - sorted_.roll(1), 0.0)
    return _SortedRollouts(order, groups, gap)


def _log_choose(n: Tensor, k: int) -> Tensor:
    """Return log C(n, k), for n ≥ k."""
    return torch.lgamma(n + 1) - torch.lgamma(n - k + 1) - torch.lgamma(torch.full_like(n, k + 1))


def pass_at_k(reward: Tensor, group: Tensor) -> Tensor:
    """Return the lead over the second best for a group's best rollout, 0 for the others. Groups of two or more."""
    ranked = _sort_rollouts(reward, group)
    best = ranked.groups.position == ranked.groups.broadcast(ranked.groups.lengths) - 1
    return ranked.unsort(torch.where(best, ranked.gap, 0.0))


def pkpo(reward: Tensor, group: Tensor, *, k: int) -> Tensor:
    """Return each rollout's part of the maximum, summed over the sets of k with it, divided by the number of all sets.

    Groups of at least k, k ≥ 2.
    """
    ranked = _sort_rollouts(reward, group)
    place = ranked.groups.position.double()
    size = ranked.groups.broadcast(ranked.groups.lengths).double()
    reaches = place >= k - 1  # fewer than k − 1 below: a gap there lifts no maximum
    share = (_log_choose(place.clamp(min=k - 1), k - 1) - _log_choose(size, k)).exp()
    return ranked.unsort(ranked.groups.cumsum(torch.where(reaches, ranked.gap * share, 0.0)))


def _refuse_small(group: Tensor, least: int, who: str, remedy: str) -> None:
    sizes = torch.bincount(group)
    small = ((sizes > 0) & (sizes < least)).nonzero()
    if len(small):
        g = int(small[0])
        raise BatchError(
            f"The advantage `{who}` compares at least {least} rollouts of a group; group {g} has {int(sizes[g])}. "
            f"{remedy}"
        )


class PassAtK(RolloutAdvantage):
    """Pass@k with k the size of the group: the best rollout gets R_max − R_second, the others 0.

    Source: 2503.19595. Assumes independent attempts at one task. Summed over the group it is the gradient of the
    expected maximum; a mean over rollouts divides that by n. Two equal best rollouts have no advantage: either could be
    missing.
    Ours: divided by the group's standard deviation + 1e-6 only with `normalize`, which gives up exactness. A group of
    one is refused.
    """

    normalize: bool = Field(False, description="divide by the group's standard deviation")

    def scales_with_group(self) -> bool:
        return self.normalize

    def advantage(self, reward: Tensor, view: View) -> Tensor:
        group = view.batch.group
        _refuse_small(group, 2, "pass_at_k", "Collect larger groups, or choose another advantage.")
        found = pass_at_k(reward, group)
        return found / (GroupStatistics(group).std(reward) + EPSILON) if self.normalize else found


class PKPO(RolloutAdvantage):
    """Pass@k for k up to the size of the group: a rollout's part of the maximum of a random set of k.

    A_i = Σ_{I ∋ i, |I| = k} (max_I R − max_{I∖i} R) / C(n, k).
    Source: 2505.15201, its estimator with the maximum of the set without the rollout as baseline. Assumes independent
    attempts at one task. Summed over the group it is an unbiased gradient of the expected maximum of k attempts, for
    rewards of any kind; a mean over rollouts divides that by n. With k = n it is `pass_at_k`.
    Ours: computed by gaps between neighbors (see the module's docstring), so that ties and groups of equal rewards
    give exactly 0; the default k = 2 is ours. k = 1 would be RLOO divided by n: choose `rloo` for it. A group smaller
    than k is refused.
    """

    k: int = Field(2, ge=2, description="number of tries of which the best counts")

    def advantage(self, reward: Tensor, view: View) -> Tensor:
        remedy = "Collect larger groups, or lower `k`."
        _refuse_small(view.batch.group, self.k, "pkpo", remedy)
        return pkpo(reward, view.batch.group, k=self.k)
