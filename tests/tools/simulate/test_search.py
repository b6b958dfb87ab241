"""The search: the split it finds is nearly the best of all, and the choice is the mildest that is nearly as fast."""

from __future__ import annotations

from typing import Any

import pytest

from etude.errors import ConfigError
from etude.tools.simulate.options import SimulateOptions
from etude.tools.simulate.search import Trial, choose, run_trial, search
from etude.tools.simulate.simulation import SimulationResult, StepResult

SMALL: dict[str, Any] = {"gpus": 16, "slots": 16, "tasks": [16], "group_size": 4, "tokens": 800, "max_tokens": 4000}


def options(**given: Any) -> SimulateOptions:
    """A small cluster, a few steps."""
    return SimulateOptions(**(SMALL | {"steps": 6, "max_staleness": [0, 2]} | given))


@pytest.mark.slow
def test_the_split_is_nearly_the_best_of_all() -> None:
    asked = options()
    _, _, found = search(asked)
    every = [run_trial(asked, 2, split, 16).tokens_per_s for split in asked.splits]
    assert found.max_staleness == 2 and found.tokens_per_s > 0.9 * max(every)


@pytest.mark.slow
def test_each_bound_is_compared_with_a_run_in_turns_and_more_staleness_is_faster() -> None:
    in_turns, synchronous, asynchronous = search(options())
    assert in_turns.in_turns and not synchronous.in_turns and in_turns.max_staleness == 0
    assert max(synchronous.result.staleness) == 0 and max(asynchronous.result.staleness) <= 2
    assert asynchronous.tokens_per_s > 1.3 * synchronous.tokens_per_s
    assert asynchronous.waiting < synchronous.waiting and asynchronous.drawing > synchronous.drawing
    assert len(asynchronous.step_s) == 6 and 0 < asynchronous.training < 1


def test_a_given_split_is_the_one() -> None:
    assert [trial.trainer_gpus for trial in search(options(trainer_gpus=[5], max_staleness=[1]))] == [0, 5]


def test_both_orders_are_tried_at_each_bound_that_lets_a_window_wait() -> None:
    trials = search(options(trainer_gpus=[5], max_staleness=[1, 2], order="windowed"))
    assert [(trial.max_staleness, trial.window) for trial in trials] == [(0, None), (1, None), (2, None), (2, 32)]
    ordinal, windowed = trials[2:]
    assert windowed.mean_staleness < ordinal.mean_staleness and max(windowed.result.staleness) <= 2


def trial(bound: int, tasks: int, seconds: float, *, in_turns: bool = False) -> Trial:
    """One step that takes so long for a thousand tokens."""
    step = StepResult(1, 0.0, seconds, 0.0, 0.0, (0,), 1000, 0)
    return Trial(bound, 4, tasks, in_turns, SimulationResult(steps=[step]), 1.0)


def test_the_choice_is_the_mildest_that_is_nearly_as_fast_as_the_fastest() -> None:
    trials = [trial(0, 8, 5.0, in_turns=True), trial(1, 8, 2.0), trial(2, 8, 1.02), trial(8, 8, 1.0), trial(2, 16, 1.0)]
    assert choose(trials) is trials[2], "2 % slower, with a smaller batch than the last and less staleness than 8"
    assert choose(trials[:2]) is trials[1] and choose(trials[:1]) is trials[0]


def test_a_part_of_a_cluster_is_as_fast_as_the_whole() -> None:
    asked = options(gpus=64, tasks=[64])
    whole, part = (run_trial(asked, 2, 32, 64, scale=scale) for scale in (1, 4))
    assert part.tokens_per_s == pytest.approx(whole.tokens_per_s, rel=0.15)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"trainer_gpus": [16]}, "leaves no engine"),
        ({"engine_gpus": 16}, "leaves no GPU to train"),
        ({"tasks": [0]}, "tasks.0 must be at least 1; 0 was given"),
        ({"order": "windowed", "window": 33}, "lets `window` groups wait"),
        ({"order": "windowed", "window": 16}, "no choice"),
        ({"window": 32}, "^`window` is for"),
        ({"max_staleness": [1, -1]}, "max_staleness.1 must be at least 0; -1 was given"),
    ],
)
def test_values_that_fit_no_cluster_are_refused(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        search(options(**given))


def test_rates_follow_from_the_model_and_the_gpu() -> None:
    asked = options(parameters=7.0, gpu_tflops=400.0, gpu_gbs=2000.0, request_ms=0.1, train_s=0.0)
    assert asked.token_s(10) == pytest.approx(0.007 + 0.001), "14 GB are read at 2,000 GB/s"
    assert asked.update_s(1e6, 2) == pytest.approx(8 * 7e9 * 1e6 / 800e12)
    assert options(decode_ms=20.0, request_ms=0.0).token_s(5) == pytest.approx(0.02)
    assert options(max_staleness=3).max_staleness == [3]
