"""What shapes a run besides estimator and loss, restated: entropy bonus and mask, DAPO's penalty and filter."""

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
from tests.conformance.fixtures import awkward
from tests.conformance.test_losses import VALUE, off_policy
from tests.conformance.twin import flat, tries


def test_entropy_bonus_is_reduced_as_the_loss_is() -> None:
    """−coefficient × entropy, here with the mean over rollouts of the mean over tokens."""
    batch, now = off_policy()
    loss = LOSSES["ppo"](reduction="seq-mean-token-mean")
    plain, bonus = (
        AlgorithmConfig(advantage=ADVANTAGES["rloo"](), loss=loss, entropy=EntropyConfig(coefficient=c))
        for c in (0.0, 0.3)
    )
    ready = plain.estimate(batch, AlgorithmState()).batch
    outputs = Outputs(logp=now.detach(), entropy=batch.entropy)
    whole = Denominators.from_view(View(ready))
    less, more = (float(a.compute_loss(ready, outputs, whole, AlgorithmState()).loss) for a in (plain, bonus))
    means = [t["entropy"].mean() if len(t) else 0.0 for t in tries(batch)]
    np.testing.assert_allclose(more - less, -0.3 * np.mean(means), rtol=1e-9)


def test_top_entropy_keeps_the_most_uncertain_tokens() -> None:
    """A share is rounded to the nearest whole number of tokens."""
    batch, _ = off_policy()
    entropy = flat([t["entropy"] for t in tries(batch)])
    for wanted, share in ((6, 5.6 / len(entropy)), (5, 5.4 / len(entropy))):
        algorithm = AlgorithmConfig(advantage=ADVANTAGES["rloo"](), entropy=EntropyConfig(top_share=share))
        keep = algorithm.estimate(batch, AlgorithmState()).batch.require("keep")[View(batch).action_index].numpy()
        assert {*keep.nonzero()[0]} == {*np.argsort(-entropy)[:wanted]}


def test_truncated_rollouts_are_left_out() -> None:
    """All their tokens, and those of no other; without the option, none."""
    batch, _ = off_policy()
    batch = batch.replace(truncated=torch.arange(batch.num_rollouts) % 3 == 0)
    kept = flat([np.full(len(t), not t.facts["truncated"]) for t in tries(batch)])
    assert 0 < kept.sum() < len(kept)
    for masked, wanted in ((True, kept), (False, np.ones(len(kept)))):
        algorithm = AlgorithmConfig(advantage=ADVANTAGES["rloo"](), mask_truncated=masked)
        keep = algorithm.estimate(batch, AlgorithmState()).batch.require("keep")[View(batch).action_index].numpy()
        assert keep.tolist() == (wanted > 0).tolist()


def test_overlong_penalty() -> None:
    """min(−(len − (max − buffer)) / buffer · factor, 0), on the reward and not on the metric; a buffer of a fifth."""
    batch = awkward(3, longest=14)
    plain = AlgorithmConfig(advantage=ADVANTAGES["rloo"]())
    lengths = np.array([len(t) for t in tries(batch)])
    assert lengths.max() > 12, "some are over the limit"
    for given, buffer in ((8, 8), (None, 2)):
        held = AlgorithmConfig(
            advantage=ADVANTAGES["rloo"](), overlong=OverlongPenalty(max_length=12, buffer=given, factor=0.5)
        )
        before, after = (a.estimate(batch, AlgorithmState()).batch for a in (plain, held))
        wanted = np.minimum(-(lengths - (12 - buffer)) / buffer * 0.5, 0)
        assert wanted.min() < -0.5 and (wanted == 0).any()
        found = (after.require("reward") - before.require("reward")).numpy()
        np.testing.assert_allclose(found, wanted, rtol=VALUE, atol=VALUE)
        assert torch.equal(after.require("metric"), before.require("metric"))


def admitted(tasks: int, metric: Callable[[int, int], float], *, group_size: int = 3) -> list[int]:
    """The groups that a run's scheduler trains on, with enough of a refill."""
    plan = CollectionScheduler(tasks=tasks, group_size=group_size, refill=50, retries=0)
    waiting = plan.handle(StepOpened(1))
    while True:
        match waiting.pop(0):
            case IssueRollout(task, sample):
                waiting += plan.handle(RolloutFinished(task, sample, metric(task, sample)))
            case AdmitStep(_, chosen):
                return list(chosen)


def test_the_filter_keeps_groups_whose_rewards_differ() -> None:
    """Rewards are sums of tenths, added up in any order: the exact sums decide, and no rounding of theirs."""
    draw = np.random.default_rng(0)
    told: dict[int, dict[int, tuple[int, float]]] = {}

    def metric(task: int, sample: int) -> float:
        group = told.setdefault(task, {})
        parts = np.array([1, 2, 3, 6]) if task % 2 else draw.integers(1, 4, 4)
        total = 0.0
        for part in draw.permutation(parts):
            total += part / 10
        group[sample] = (int(parts.sum()), total)
        return total

    found = admitted(5, metric)
    differ = [task for task, group in sorted(told.items()) if len({exact for exact, _ in group.values()}) > 1]
    assert found == differ[:5]
    rounded = [len({total for _, total in group.values()}) > 1 for task, group in told.items() if task not in differ]
    assert any(rounded), "no group was level but for rounding: nothing is shown"


def test_the_filter_keeps_groups_of_one() -> None:
    asked: list[int] = []

    def metric(task: int, sample: int) -> float:
        asked.append(task)
        return 0.0

    assert admitted(4, metric, group_size=1) == asked == [0, 1, 2, 3]


def test_the_filter_compares_the_part_that_is_named() -> None:
    """Of a reward of two parts; shaping that differs makes no group worth keeping."""
    collection = CollectionConfig(refill=1, metric="correct")
    parts = {"correct": 1.0, "brevity": 0.3}
    assert collection.group_metric(0, parts, 1.3, "") == 1.0
    assert CollectionConfig(refill=1).group_metric(0, parts, 1.3, "") == 1.3
    assert collection.group_metric(0, {}, -1.0, "it could not be judged") == -1.0
    for lacking, named in (({}, "is one number"), ({"right": 1.0}, "has the parts right")):
        with pytest.raises(CollectionError, match=f"`collect.metric=correct` compares .* task 7 {named}"):
            collection.group_metric(7, lacking, 1.0, "")
