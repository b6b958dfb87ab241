"""Other parts of an algorithm, restated: entropy bonus and mask, DAPO's length penalty and filter."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from etude.algorithms import AlgorithmConfig, AlgorithmState, Denominators, Outputs, View
from etude.algorithms.advantages import ADVANTAGES
from etude.algorithms.entropy import EntropyConfig
from etude.algorithms.losses import LOSSES
from etude.algorithms.overlong import OverlongPenalty
from etude.errors import CollectionError
from etude.recipes.collect.config import CollectionConfig
from etude.recipes.collect.scheduler import AdmitStep, CollectionScheduler, IssueRollout, RolloutFinished, StepOpened
from tests.conformance.fixtures import irregular_batch
from tests.conformance.test_losses import VALUE_TOLERANCE, off_policy_batch
from tests.conformance.twin import flat, numpy_rollouts


def test_the_entropy_bonus_is_reduced_like_the_loss() -> None:
    """The bonus is −coefficient × entropy, here with the mean over rollouts of the mean over tokens."""
    batch, logp = off_policy_batch()
    loss = LOSSES["ppo"](reduction="seq-mean-token-mean")
    without_bonus, with_bonus = (
        AlgorithmConfig(advantage=ADVANTAGES["rloo"](), loss=loss, entropy=EntropyConfig(coefficient=c))
        for c in (0.0, 0.3)
    )
    ready = without_bonus.estimate(batch, AlgorithmState()).batch
    outputs = Outputs(logp=logp.detach(), entropy=batch.entropy)
    denominators = Denominators.from_view(View(ready))
    without_bonus_loss, with_bonus_loss = (
        float(a.compute_loss(ready, outputs, denominators, AlgorithmState()).loss) for a in (without_bonus, with_bonus)
    )
    means = [t["entropy"].mean() if len(t) else 0.0 for t in numpy_rollouts(batch)]
    np.testing.assert_allclose(with_bonus_loss - without_bonus_loss, -0.3 * np.mean(means), rtol=1e-9)


def test_top_entropy_keeps_the_most_uncertain_tokens() -> None:
    """A share is rounded to the nearest whole number of tokens."""
    batch, _ = off_policy_batch()
    entropy = flat([t["entropy"] for t in numpy_rollouts(batch)])
    for expected, share in ((6, 5.6 / len(entropy)), (5, 5.4 / len(entropy))):
        algorithm = AlgorithmConfig(advantage=ADVANTAGES["rloo"](), entropy=EntropyConfig(top_share=share))
        keep = algorithm.estimate(batch, AlgorithmState()).batch.require("keep")[View(batch).action_index].numpy()
        assert {*keep.nonzero()[0]} == {*np.argsort(-entropy)[:expected]}


def test_truncated_rollouts_are_left_out() -> None:
    """All their tokens are left out, and no others. Without the option, none are."""
    batch, _ = off_policy_batch()
    batch = batch.replace(truncated=torch.arange(batch.num_rollouts) % 3 == 0)
    expected_keep = flat([np.full(len(t), not t.rollout_columns["truncated"]) for t in numpy_rollouts(batch)])
    assert 0 < expected_keep.sum() < len(expected_keep)
    for mask_truncated, expected in ((True, expected_keep), (False, np.ones(len(expected_keep)))):
        algorithm = AlgorithmConfig(advantage=ADVANTAGES["rloo"](), mask_truncated=mask_truncated)
        keep = algorithm.estimate(batch, AlgorithmState()).batch.require("keep")[View(batch).action_index].numpy()
        assert keep.tolist() == (expected > 0).tolist()


def test_overlong_penalty() -> None:
    """min(−(len − (max − buffer)) / buffer · factor, 0) is added to the reward, not to the metric.

    The default buffer is a fifth of the limit.
    """
    batch = irregular_batch(3, longest=14)
    without_bonus = AlgorithmConfig(advantage=ADVANTAGES["rloo"]())
    lengths = np.array([len(t) for t in numpy_rollouts(batch)])
    assert lengths.max() > 12, "some are over the limit"
    for option_value, buffer in ((8, 8), (None, 2)):
        with_penalty = AlgorithmConfig(
            advantage=ADVANTAGES["rloo"](), overlong=OverlongPenalty(max_length=12, buffer=option_value, factor=0.5)
        )
        before, after = (a.estimate(batch, AlgorithmState()).batch for a in (without_bonus, with_penalty))
        expected = np.minimum(-(lengths - (12 - buffer)) / buffer * 0.5, 0)
        assert expected.min() < -0.5 and (expected == 0).any()
        result = (after.require("reward") - before.require("reward")).numpy()
        np.testing.assert_allclose(result, expected, rtol=VALUE_TOLERANCE, atol=VALUE_TOLERANCE)
        assert torch.equal(after.require("metric"), before.require("metric"))


def admitted_groups(tasks: int, metric: Callable[[int, int], float], *, group_size: int = 3) -> list[int]:
    """Return the groups that a run's scheduler trains on, with a large refill."""
    plan = CollectionScheduler(tasks=tasks, group_size=group_size, refill=50)
    waiting = plan.handle(StepOpened(1))
    while True:
        match waiting.pop(0):
            case IssueRollout(task, sample):
                waiting += plan.handle(RolloutFinished(task, sample, metric(task, sample)))
            case AdmitStep(_, chosen):
                return list(chosen)


def test_the_filter_keeps_groups_whose_rewards_differ() -> None:
    """Rewards are sums of tenths in random order. The exact sums decide, not their rounding errors."""
    rng = np.random.default_rng(0)
    groups_seen: dict[int, dict[int, tuple[int, float]]] = {}

    def metric(task: int, sample: int) -> float:
        group = groups_seen.setdefault(task, {})
        parts = np.array([1, 2, 3, 6]) if task % 2 else rng.integers(1, 4, 4)
        total = 0.0
        for part in rng.permutation(parts):
            total += part / 10
        group[sample] = (int(parts.sum()), total)
        return total

    result = admitted_groups(5, metric)
    differ = [task for task, group in sorted(groups_seen.items()) if len({exact for exact, _ in group.values()}) > 1]
    assert result == differ[:5]
    rounded = [
        len({total for _, total in group.values()}) > 1 for task, group in groups_seen.items() if task not in differ
    ]
    assert any(rounded), "no group has rewards that differ only by rounding"


def test_the_filter_keeps_groups_of_one() -> None:
    tasks_asked: list[int] = []

    def metric(task: int, sample: int) -> float:
        tasks_asked.append(task)
        return 0.0

    assert admitted_groups(4, metric, group_size=1) == tasks_asked == [0, 1, 2, 3]


def test_the_filter_compares_the_named_part() -> None:
    """The reward has two parts. Differences of the other part do not keep a group."""
    collection = CollectionConfig(refill=1, metric="correct")
    parts = {"correct": 1.0, "brevity": 0.3}
    assert collection.group_metric(0, parts, 1.3, "") == 1.0
    assert CollectionConfig(refill=1).group_metric(0, parts, 1.3, "") == 1.3
    assert collection.group_metric(0, {}, -1.0, "it could not be judged") == -1.0
    for reward_parts, message in (({}, "is one number"), ({"right": 1.0}, "has the parts right")):
        with pytest.raises(CollectionError, match=f"`collect.metric=correct` compares .* task 7 {message}"):
            collection.group_metric(7, reward_parts, 1.0, "")
