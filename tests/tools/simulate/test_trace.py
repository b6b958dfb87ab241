"""A finished run as a trace: its own bound gives its own step times, and other bounds the same rollouts."""

from __future__ import annotations

import json
import random
import re
import shutil
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.cli import main
from etude.tools.simulate.options import SimulateOptions
from etude.tools.simulate.report import show_replay
from etude.tools.simulate.search import replay
from etude.tools.simulate.trace import (
    AttemptTimes,
    RunTrace,
    find_limit,
    read_trace,
    remove_queueing,
    to_workloads,
)
from tests.recipes.runs import run_of, step_metrics, train
from tests.worlds import make_model, make_tasks

Captured = pytest.CaptureFixture[str]


@given(seed=st.integers(0, 10**6), slots=st.integers(1, 6))
@settings(max_examples=40)
def test_the_time_in_the_line_follows_from_the_times_of_others(seed: int, slots: int) -> None:
    chance = random.Random(seed)
    seconds = [chance.uniform(1, 10) for _ in range(30)]
    asked = sorted(chance.uniform(0, 30) for _ in seconds)
    ends: list[float] = []
    attempts = []
    for task, (at, took) in enumerate(zip(asked, seconds, strict=True)):
        began = max(at, heappop(ends)) if len(ends) == slots else at
        heappush(ends, began + took)
        attempts.append(AttemptTimes(task, 0, at, began + took, [7]))
    remove_queueing(chance.sample(attempts, len(attempts)), slots)
    assert [attempt.ended - attempt.began for attempt in attempts] == pytest.approx(seconds)


def test_turns_whose_begin_is_known_wait_from_end_to_begin() -> None:
    """The attempt waits two seconds for a slot, which is left out, three for a tool and one for the judge."""
    known = AttemptTimes(0, 0, 0.0, 12.0, tokens=[10, 20], turns=[(2.0, 5.0), (8.0, 11.0)])
    remove_queueing([known], 1)
    seconds, tokens = to_workloads([known])
    assert seconds.draw(0, 0).turns == ((3.0, 3.0), (3.0, 1.0))
    assert tokens.draw(0, 0).turns == ((10, 3.0), (20, 1.0))


def test_of_one_turn_the_engine_is_busy_from_its_slot_to_its_end() -> None:
    """Each has the one slot for four seconds, half of one before the engine begins; its reward takes one more."""
    ends = (4.0, 8.0)
    attempts = [AttemptTimes(n, 0, 0.0, at + 1.0, [10], [(at - 3.5, at)]) for n, at in enumerate(ends)]
    remove_queueing(attempts, 1)
    seconds, _ = to_workloads(attempts)
    assert [seconds.draw(task, 0).turns for task in (0, 1)] == [((4.0, 1.0),)] * 2


def test_the_time_before_the_first_turn_of_an_agent_is_its_own() -> None:
    known = AttemptTimes(0, 0, 0.0, 12.0, tokens=[10], turns=[(2.0, 5.0)])
    seconds, tokens = to_workloads([known], prepares=True)
    assert (seconds.draw(0, 0).before, tokens.draw(0, 0).before) == (2.0, 2.0)
    assert seconds.draw(0, 0).turns == ((3.0, 7.0),)


def at_once(number: int) -> list[AttemptTimes]:
    """Twelve attempts, this many at a time."""
    return [AttemptTimes(place, 0, place // number, place // number + 1.0, [1]) for place in range(12)]


@pytest.mark.parametrize(
    ("agent", "number", "limit"),
    [
        ({"runners": 2, "max_concurrency": 3}, 6, 6),
        ({"runners": 2, "max_concurrency": 3}, 4, 4),
        ({"runners": 2, "max_concurrency": 8}, 12, 16),
        ({"runners": 0}, 4, 4),
        ({"runners": 0}, 12, None),
    ],
    ids=[
        "runners",
        "an agent that allows fewer",
        "more than a step has",
        "runners from elsewhere",
        "of an unknown number",
    ],
)
def test_the_runners_of_an_agent_limit_its_attempts(agent: dict[str, Any], number: int, limit: int | None) -> None:
    changes = {f"agent__{name}": value for name, value in agent.items()}
    run = run_of(Path("world"), reward="environment", reward__path=None, agent__path="agents.py:solve", **changes)
    assert find_limit(run.agent, run.env, run.collect, at_once(number)) == limit


def test_without_an_agent_the_environments_are_the_limit() -> None:
    run = run_of(Path("world"))
    assert find_limit(run.agent, run.env, run.collect, at_once(4)) is None
    run = run_of(Path("world"), env__path="envs.py:Env", env__max_concurrency=5)
    assert find_limit(run.agent, run.env, run.collect, at_once(4)) == 5


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of five steps."""
    world = tmp_path_factory.mktemp("simulated")
    make_model(world / "model")
    make_tasks(world / "tasks.jsonl", 40)
    return train(world, world / "run", steps=5, collect__refill=1)


@pytest.fixture(scope="module")
def trace(trained: Path) -> RunTrace:
    """Its trace."""
    return read_trace(trained)


@pytest.mark.slow
def test_replayed_at_its_own_bound_a_run_takes_as_long_as_it_took(trained: Path, trace: RunTrace) -> None:
    (own,) = replay(trace, [0])
    measured = [step["time/step"] for step in step_metrics(trained)]
    assert own.mean_step_s == pytest.approx(sum(measured) / len(measured), rel=0.15)
    assert [frozenset(step.tasks) for step in own.result.steps] == list(trace.admitted)
    assert len(own.result.trained) == 5 * 12 and trace.seconds.exhausted == 0


@pytest.mark.slow
def test_at_another_bound_the_same_rollouts_are_trained_in_less_time(trace: RunTrace) -> None:
    trials = replay(trace, [0, 1, 4])
    assert len({tuple(step.tasks for step in trial.result.steps) for trial in trials}) == 1
    seconds = [trial.result.seconds for trial in trials]
    assert seconds[0] > seconds[1] >= seconds[2]
    assert [max(trial.result.staleness) <= trial.max_staleness for trial in trials] == [True] * 3


@pytest.mark.slow
def test_the_command_replays_a_run_or_takes_its_rollouts_to_a_cluster(trained: Path, capsys: Captured) -> None:
    assert main(["simulate", str(trained), "max_staleness=[2]"]) == 0
    shown = capsys.readouterr().out
    assert "5 steps of 3 tasks with 4 rollouts" in shown and "The journal does not say" not in shown
    assert main(["simulate", str(trained), "max_staleness=[2]", "order=windowed", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    trials = [(trial["max_staleness"], trial["window"]) for trial in result["trials"]]
    assert result["same_tasks"] and trials == [(0, None), (2, None), (2, 6)]
    assert main(["simulate", str(trained), "max_staleness=[0]", "attempts=1", "--json"]) == 0
    trials = json.loads(capsys.readouterr().out)["trials"]
    assert [trial["attempts"] for trial in trials] == [None, 1]
    assert trials[1]["step_s"]["mean"] > trials[0]["step_s"]["mean"]
    assert main(["simulate", str(trained), "gpus=4"]) == 2 and "`gpus` would change nothing" in capsys.readouterr().err
    cluster = ["gpus=4", "tasks=4", "steps=3", "max_staleness=1", "publish_s=0.1"]
    assert main(["simulate", str(trained), "--cluster", "--json", *cluster]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["trials"][-1]["trained_tokens"]["most"] <= 6
    assert result["trials"][result["chosen"]]["tokens_per_s"] > 0


@pytest.mark.slow
def test_a_replay_that_is_far_off_says_so(trained: Path, tmp_path: Path) -> None:
    changed = shutil.copytree(trained, tmp_path / "run")
    lines = [step | {"time/collect": 0.0} for step in step_metrics(trained)]
    (changed / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    notes = show_replay(SimulateOptions(), changed, silent=True)["notes"]
    assert any("off the measured step time" in note for note in notes)


def test_a_simulation_without_a_run_prints_the_choice(capsys: Captured) -> None:
    words = ["gpus=8", "tasks=[4,8]", "group_size=2", "slots=8", "steps=2", "max_staleness=[0,2]", "order=windowed"]
    assert main(["simulate", *words]) == 0
    shown = capsys.readouterr().out
    assert "8 GPUs, a model of 7" in shown and "in turns" in shown and "max_staleness=" in shown
    assert "engines  mean" in re.sub(" +", "  ", shown), "a table that is wider than the console is printed whole"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["runs/one", "runs/two"], "One run can be simulated"),
        (["--cluster"], "none was named"),
        (["nowhere"], "nowhere"),
        (["max_stalness=3"], "max_staleness"),
        (["gpus=1"], "gpus"),
    ],
)
def test_wrong_words_are_refused_with_a_sentence(words: list[str], complaint: str, capsys: Captured) -> None:
    assert main(["simulate", *words]) == 2
    assert complaint in capsys.readouterr().err
