"""Statistics for advantages: within groups, and over the rollout batch of all ranks.

Everything here is in float64 or sums in it. A group is never split over ranks. Statistics of the whole rollout batch go
through `Ranks` in two phases: first counts and sums, then squared deviations from the resulting mean.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from etude.algorithms.view import Ranks, View
from etude.lazy import torch
from etude.observe import Max, Mean, Metrics, Min
from etude.records import has_zero_variance

if TYPE_CHECKING:
    from torch import Tensor

EPSILON = 1e-6
"""Added to a standard deviation before dividing by it."""

MAX_SHARES = 16
"""The largest staleness with a separate share; older rollouts have one share for all."""


class GroupStatistics:
    """Statistics of values [N] within groups, returned for every member of a group: [N] → [N]."""

    def __init__(self, group: Tensor) -> None:
        self.group = group
        self.count = int(group.max()) + 1 if len(group) else 0
        self.sizes = torch.bincount(group, minlength=self.count)  # [G]

    @cached_property
    def size(self) -> Tensor:
        """[N]: the size of each entry's group, itself included."""
        return self.sizes[self.group].double()

    @cached_property
    def is_singleton(self) -> Tensor:
        """[N] bool: groups of one."""
        return self.size == 1

    def sum(self, values: Tensor) -> Tensor:
        """Return the group's total."""
        return values.new_zeros(self.count).index_add_(0, self.group, values)[self.group]

    def mean(self, values: Tensor) -> Tensor:
        """Return the group's mean."""
        return self.sum(values) / self.size

    def max(self, values: Tensor) -> Tensor:
        """Return the group's maximum."""
        start = values.new_full((self.count,), -torch.inf)
        return start.scatter_reduce_(0, self.group, values, "amax")[self.group]

    def min(self, values: Tensor) -> Tensor:
        """Return the group's minimum."""
        return -self.max(-values)

    def above_min(self, values: Tensor) -> Tensor:
        """Return each value minus its group's minimum: exactly 0 throughout a group of equal values.

        A baseline of these differences, instead of the values, leaves no rounding error in such a group. A division by
        a tiny deviation would magnify it.
        """
        return torch.where(self.has_zero_variance(values), 0.0, values - self.min(values))

    def centered(self, values: Tensor) -> Tensor:
        """Return each value minus its group's mean; exactly 0 in a group of equal values, or of one."""
        above = self.above_min(values)
        return above - self.mean(above)

    def std(self, values: Tensor) -> Tensor:
        """Return the unbiased standard deviation; 0 for a group of one."""
        return (self.sum(self.centered(values) ** 2) / (self.size - 1).clamp(min=1)).sqrt()

    def has_zero_variance(self, values: Tensor) -> Tensor:
        """[N] bool: groups of two or more with equal values, by `etude.records.has_zero_variance`."""
        alike: torch.Tensor = has_zero_variance(self.min(values), self.max(values), torch.finfo(values.dtype).eps)
        return alike & ~self.is_singleton


def moments(values: Tensor, ranks: Ranks, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the mean and the unbiased variance over the values of all ranks, as float64 scalars.

    `weight` [N] counts each value that many times: a rollout's number, once for each of its action tokens.
    """

    def total(x: Tensor) -> Tensor:
        return (x if weight is None else x * weight).sum(dtype=torch.float64)

    held = torch.tensor(float(len(values)), dtype=torch.float64) if weight is None else weight.sum(dtype=torch.float64)
    count, summed = ranks.all_reduce(torch.stack([held.to(values.device), total(values)])).unbind()
    mean = summed / count.clamp(min=1)
    squares = ranks.all_reduce(total((values - mean.to(values.dtype)).square_()).reshape(1))[0]
    return mean, squares / (count - 1).clamp(min=1)


def whiten(values: Tensor, ranks: Ranks, weight: Tensor | None = None) -> Tensor:
    """Return (x − mean) / (std + ε), with the unbiased moments of all ranks."""
    mean, variance = moments(values, ranks, weight)
    return (values - mean.to(values.dtype)) / (variance.sqrt() + EPSILON).to(values.dtype)


def measure_advantage(advantage: Tensor, ranks: Ranks, weight: Tensor | None = None) -> Metrics:
    """Measure the advantage over the rollout batch's action tokens; `weight` as in `moments`, 0 without tokens."""
    mean, variance = moments(advantage, ranks, weight)
    metrics = Metrics({"advantage_mean": Mean.of(mean), "advantage_std": Mean.of(variance.sqrt())})
    shown = advantage if weight is None else advantage[weight > 0]
    if len(shown):
        low, high = shown.aminmax()
        metrics.merge({"advantage_min": Min.of(low), "advantage_max": Max.of(high)})
    return metrics


def measure_rewards(reward: Tensor, group: Tensor, greedy: Tensor | None = None) -> Metrics:
    """Measure the mean reward, the spread within groups, and the share of groups with zero variance.

    greedy: [N] rewards of the greedy answers. A group that differs from its greedy answer has advantages.
    """
    groups = GroupStatistics(group)
    alike = groups.has_zero_variance(reward)
    if greedy is not None:
        alike &= has_zero_variance(
            torch.minimum(reward, greedy), torch.maximum(reward, greedy), torch.finfo(reward.dtype).eps
        )
    share = torch.where(groups.is_singleton, 0.0, 1 / groups.size)  # adds up to 1 over each group of two or more
    several = share.sum()
    return Metrics(
        {
            "reward_mean": Mean.over(reward.sum(), len(reward)),
            "group_std": Mean.over((groups.std(reward) * share).sum(), several),
            "zero_variance_share": Mean.over((alike * share).sum(), several),
        }
    )


def measure_staleness(view: View) -> Metrics:
    """Measure the staleness of the rollouts that acted; return no metrics if the batch does not have the versions.

    Staleness is the trainer's version at the start of the step, minus the version of the rollout's oldest action token.
    `staleness/0`, `staleness/1` and so on are shares of rollouts, up to the largest staleness over all ranks.
    """
    batch = view.batch
    if batch.version is None or batch.trainer_version is None:
        return Metrics()
    acted = view.rollouts.lengths > 0
    oldest = view.rollouts.min(view.column("version").double())
    staleness = (batch.trainer_version - oldest)[acted]
    count, everywhere = len(staleness), view.ranks.all_gather(staleness)
    largest = int(everywhere.max()) if len(everywhere) else -1
    metrics = Metrics({"staleness/mean": Mean.over(staleness.sum(), count)})
    if count:
        metrics.add("staleness/max", Max.of(staleness.max()))
    for versions in range(min(largest, MAX_SHARES) + 1):
        metrics.add(f"staleness/{versions}", Mean.over((staleness == versions).count_nonzero(), count))
    if largest > MAX_SHARES:
        older = (staleness > MAX_SHARES).count_nonzero()
        metrics.add(f"staleness/over_{MAX_SHARES}", Mean.over(older, count))
    return metrics
