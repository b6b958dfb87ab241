"""Simulated rollouts follow from their task and sample alone, and have the distributions that were asked for."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from etude.tools.simulate.options import SimulateOptions
from etude.tools.simulate.workload import SimulatedRollout, SyntheticWorkload, TraceWorkload, Turn


def workload(**given: Any) -> SyntheticWorkload:
    """Groups of four."""
    shape = {"group_size": 4, "tokens": 500.0, "spread": 1.0, "max_tokens": 4000, "zero_variance": 0.0}
    return SyntheticWorkload(SimulateOptions(**(shape | given)))


def rollouts(tasks: int, **given: Any) -> list[SimulatedRollout]:
    """The rollouts of so many tasks."""
    drawn = workload(**given)
    return [drawn.draw(task, sample) for task in range(tasks) for sample in range(4)]


def test_rollouts_do_not_depend_on_the_order_in_which_they_are_drawn() -> None:
    keys = [(task, sample) for task in range(160) for sample in range(4)]
    shuffled = random.Random(0).sample(keys, len(keys))
    options: dict[str, Any] = {"turns": 3.0, "wait_s": 2.0, "failing": 0.2}
    one, other = workload(**options), workload(**options)
    drawn = {key: one.draw(*key) for key in keys}
    assert all(other.draw(*key) == drawn[key] for key in shuffled)
    assert workload(**options, seed=1).draw(0, 0) != drawn[0, 0]


def test_the_distributions_are_those_of_the_options() -> None:
    drawn = rollouts(2000, zero_variance=0.25)
    tokens = np.array([rollout.tokens for rollout in drawn])
    assert np.median(tokens) == pytest.approx(500, rel=0.05) and tokens.max() == 4000
    assert np.quantile(tokens, 0.84) == pytest.approx(500 * np.e, rel=0.08), "one deviation of the logarithm"
    groups = [drawn[first : first + 4] for first in range(0, len(drawn), 4)]
    level = np.mean([len({rollout.metric for rollout in group}) == 1 for group in groups])
    assert level == pytest.approx(0.25, abs=0.03)
    assert all(len(rollout.turns) == 1 and rollout.turns[0].wait == 0 and not rollout.failures for rollout in drawn)


def test_turns_are_cut_off_at_the_token_limit_and_nothing_is_waited_for_behind_the_last() -> None:
    drawn = rollouts(400, turns=6.0, wait_s=3.0)
    assert all(sum(turn.work for turn in rollout.turns) == rollout.tokens <= 4000 for rollout in drawn)
    cut = [rollout for rollout in drawn if rollout.tokens == 4000]
    assert cut and np.mean([len(rollout.turns) for rollout in drawn]) == pytest.approx(4.2, abs=0.5)
    assert all(rollout.turns[-1].wait == 0 for rollout in drawn if rollout not in cut)
    waits = [turn.wait for rollout in drawn for turn in rollout.turns[:-1]]
    assert np.median(waits) == pytest.approx(3.0, rel=0.1)


def test_attempts_fail_as_often_as_was_asked_for() -> None:
    drawn = rollouts(1000, failing=0.3)
    assert np.mean([rollout.failures > 0 for rollout in drawn]) == pytest.approx(0.3, abs=0.03)
    assert np.mean([rollout.failures > 1 for rollout in drawn]) == pytest.approx(0.09, abs=0.02)


def test_a_task_beyond_a_recorded_run_gets_recorded_rollouts() -> None:
    recorded = [SimulatedRollout((Turn(seconds, 0.0),), 10, 0.0) for seconds in range(4)]
    trace = TraceWorkload({0: {0: recorded[0], 1: recorded[1]}, 1: {}, 2: {0: recorded[2], 1: recorded[3]}})
    assert trace.draw(2, 1) is recorded[3] and trace.exhausted == 0
    assert trace.draw(7, 0) is recorded[2] and trace.draw(6, 3) is recorded[1] and trace.exhausted == 2
