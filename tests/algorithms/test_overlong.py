"""DAPO's penalty for overlong rollouts."""

from __future__ import annotations

import pytest
import torch

from etude.algorithms.overlong import OverlongPenalty
from etude.errors import ConfigError, MissingColumnError
from etude.observe import Metrics
from tests.algorithms.flat import flat_view, float64


def test_the_penalty_is_zero_up_to_the_buffer_and_the_factor_at_the_limit() -> None:
    overlong = OverlongPenalty(max_length=20, buffer=8, factor=0.5)
    penalty = overlong.penalty(torch.tensor([0, 11, 12, 13, 16, 20, 24]))
    assert penalty.tolist() == [0, 0, 0, -0.0625, -0.25, -0.5, -0.75]


def test_the_penalty_counts_action_tokens_and_leaves_the_metric() -> None:
    view = flat_view([3, 0, 5], reward=float64([1, 1, 0]), metric=float64([1, 1, 0]))
    metrics = Metrics()
    batch = OverlongPenalty(max_length=6, buffer=4).apply_penalty(view, metrics)
    assert batch.reward is not None and batch.reward.tolist() == [0.75, 1, -0.75]
    assert batch.metric is not None and batch.metric.tolist() == [1, 1, 0]
    assert metrics.reduce() == {"overlong_penalty": pytest.approx(-1 / 3), "overlong_share": pytest.approx(2 / 3)}


def test_the_penalty_needs_a_reward() -> None:
    with pytest.raises(MissingColumnError, match=r"The over-long penalty needs the column `reward`"):
        OverlongPenalty(max_length=6, buffer=4).apply_penalty(flat_view([1]), Metrics())


def test_a_buffer_longer_than_the_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"`buffer` is 4096, more than the whole of `max_length` = 1024"):
        OverlongPenalty(max_length=1024, buffer=4096)


def test_the_default_buffer_is_a_fifth_of_the_limit() -> None:
    lengths = torch.tensor([16, 18, 20])
    assert torch.equal(
        OverlongPenalty(max_length=20).penalty(lengths), OverlongPenalty(max_length=20, buffer=4).penalty(lengths)
    )
    assert OverlongPenalty(max_length=3).penalty(torch.tensor([3])).item() == -1.0
