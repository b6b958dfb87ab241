"""Samples become a batch, with what can be told of them at once."""

from __future__ import annotations

import torch

from etude.data.collate import collate
from etude.records import Rollout, Sample


def sample(rollout: int, action: str) -> Sample:
    """A row with an action token wherever `action` has an A."""
    acts = [letter == "A" for letter in action]
    turn = [0] * len(acts)
    return Sample(list(range(len(acts))), acts, [-0.5] * len(acts), turn, turn, rollout)


def test_what_was_told_after_the_first_action_is_observed() -> None:
    rows = [sample(7, "..A.A.."), sample(9, "A."), sample(9, "..."), sample(9, ".A")]
    batch = collate(rows, [Rollout(7, 0, 0, 1.0), Rollout(8, 0, 0, 0.25), Rollout(9, 0, 0, -1.0)])
    assert batch.observation is not None and batch.metric is not None
    assert batch.observation.int().tolist() == [0, 0, 0, 1, 0, 1, 1, 0, 1, 0, 0, 0, 0, 0]
    assert batch.unit.tolist() == [0, 2, 2, 2]
    assert batch.metric.tolist() == [1.0, 0.25, -1.0]


def test_the_metric_stays_when_the_reward_changes() -> None:
    batch = collate([sample(0, ".A")], [Rollout(0, 0, 0, 1.0)])
    assert batch.reward is not None
    penalised = batch.replace(reward=batch.reward - 5)
    assert penalised.metric is not None and penalised.metric.tolist() == [1.0]


def test_rollouts_without_a_row_are_there() -> None:
    batch = collate([], [Rollout(0, 0, 3, 1.0), Rollout(1, 0, 3, 0.0)])
    assert (batch.rollouts, batch.rows, batch.tokens, batch.groups) == (2, 0, 0, 1)
    assert batch.observation is not None and batch.observation.dtype == torch.bool
