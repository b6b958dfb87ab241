"""A batch of samples and rollouts: its metric, its mask of observations, and rollouts without rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from etude.batch import Batch, BatchSchema
from etude.errors import BatchError
from etude.records import Rollout, Sample


def sample(rollout: int, action: str) -> Sample:
    """Return a row with an action token at each A of `action`."""
    acts = np.array([letter == "A" for letter in action])
    turn = np.zeros(len(acts), np.int32)
    logp = np.full(len(acts), -0.5, np.float32)
    return Sample(np.arange(len(acts), dtype=np.int32), acts, logp, turn, turn, rollout)


def test_observed_tokens_of_a_row_are_marked_in_the_batch() -> None:
    """Also before the row's first action; a row without a record of observations has none."""
    seen = replace(sample(9, ".o.A"), observation=np.array([False, True, False, False]))
    batch = Batch.from_records(
        [sample(7, "..A.A.."), sample(9, "A."), seen],
        [Rollout(7, 0, 0, 1.0), Rollout(8, 0, 0, 0.25), Rollout(9, 0, 0, -1.0)],
    )
    assert batch.observation is not None and batch.metric is not None
    assert batch.observation.nonzero()[:, 0].tolist() == [10]
    assert batch.unit.tolist() == [0, 2, 2]
    assert batch.metric.tolist() == [1.0, 0.25, -1.0]


def test_the_metric_stays_when_the_reward_changes() -> None:
    batch = Batch.from_records([sample(0, ".A")], [Rollout(0, 0, 0, 1.0)])
    assert batch.reward is not None
    penalised = batch.replace(reward=batch.reward - 5)
    assert penalised.metric is not None and penalised.metric.tolist() == [1.0]


def test_rewards_of_turns_count_for_the_metric() -> None:
    paid = replace(sample(3, ".AA"), turn=np.array([0, 0, 1], np.int32), reward=np.array([0.0, 0.25, 0.5]))
    batch = Batch.from_records([sample(2, ".A"), paid, sample(4, "A")], [Rollout(i, 0, 0, 1.0) for i in (2, 3, 4)])
    assert batch.metric is not None and batch.metric.tolist() == [1.0, 1.75, 1.0]
    assert batch.reward is not None and batch.reward.tolist() == [1.0, 1.0, 1.0]


def test_rewards_of_greedy_answers_are_a_column_if_all_have_one() -> None:
    rollouts = [Rollout(i, 0, 0, 1.0, greedy_reward=0.5 * i) for i in range(2)]
    batch = Batch.from_records([sample(0, ".A")], rollouts)
    assert batch.greedy_reward is not None and batch.greedy_reward.tolist() == [0.0, 0.5]
    assert Batch.from_records([], [Rollout(0, 0, 0, 1.0)]).greedy_reward is None
    with pytest.raises(BatchError, match="Of 2 rollouts 1 have `greedy_reward`"):
        Batch.from_records([], [rollouts[0], Rollout(1, 0, 0, 1.0)])


def test_rollouts_without_a_row_are_in_the_batch() -> None:
    batch = Batch.from_records([], [Rollout(0, 0, 3, 1.0), Rollout(1, 0, 3, 0.0)])
    assert (batch.num_rollouts, batch.num_rows, batch.num_tokens, batch.num_groups) == (2, 0, 0, 1)
    assert batch.observation is not None and batch.observation.dtype == torch.bool


def test_a_row_without_routes_has_none_beside_others() -> None:
    routed = replace(sample(1, ".A"), routes=np.array([[0, 3], [1, 2]], np.uint8))
    rows, rollouts = [sample(0, "A"), routed], [Rollout(i, 0, 0, 1.0) for i in range(3)]
    batch = Batch.from_records(rows, rollouts)
    assert batch.require("routes").tolist() == [[255, 255], [0, 3], [1, 2]] and batch.routes is not None
    form = BatchSchema.from_records(["policy"] * 2, [False] * 2, rollouts, [0, 0], [row.route_format for row in rows])
    assert Batch.from_records([], [], form).require("routes").shape == (0, 2), "a rank may have no row"
    assert Batch.from_records(rows[:1], rollouts[:1]).routes is None
    wider = replace(sample(2, "A"), routes=np.array([[0, 3, 1]], np.int16))
    with pytest.raises(BatchError, match=r"routes of 2 experts a token \(uint8\), others of 3 \(int16\)"):
        Batch.from_records([routed, wider], rollouts)


def with_alternatives(row: Sample, width: int) -> Sample:
    ids = np.arange(len(row.ids) * width, dtype=np.int32).reshape(-1, width)
    return replace(row, alternative_ids=ids, alternative_logp=np.full(ids.shape, -1.5, np.float32))


def test_a_row_without_a_sampled_token_has_as_many_alternatives_as_the_others() -> None:
    """It comes without any, or with another number of them, which are of no token."""
    rows = [sample(0, ".."), with_alternatives(sample(1, ".A"), 3), with_alternatives(sample(2, "."), 2)]
    rollouts = [Rollout(i, 0, 0, 1.0) for i in range(3)]
    batch = Batch.from_records(rows, rollouts)
    ids, logp = batch.require("alternative_ids"), batch.require("alternative_logp")
    assert ids.tolist() == [[0, 0, 0], [0, 0, 0], [0, 1, 2], [3, 4, 5], [0, 0, 0]]
    assert torch.isinf(logp[[0, 1, 4]]).all() and bool((logp[2:4] == -1.5).all())
    form = BatchSchema.from_records(["policy"] * 3, [False] * 3, rollouts, [row.num_alternatives for row in rows])
    part = Batch.from_records(rows[:1], rollouts[:1], form)
    assert part.require("alternative_ids").shape == (2, 3), "a rank may have such rows alone"
    with pytest.raises(BatchError, match="Some rows have 2 alternatives to each token, others 3"):
        Batch.from_records([rows[1], with_alternatives(sample(2, "A"), 2)], rollouts)
    with pytest.raises(BatchError, match="but the batch has"):
        Batch.from_records([sample(2, "A")], rollouts[2:], form)
