"""Runs whose reward is more than a function: parts, programs and judges, through `etude train`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from etude.cli import main
from tests.recipes.runs import REWARDS, Captured, options, refused_run, step_metrics, train
from tests.rewards.served import Reply, serving

KEY = "hunter2-and-a-half"


def leaked_into(directory: Path, word: str) -> list[str]:
    """Return the files of a run that hold a word."""
    return [path.name for path in directory.rglob("*") if path.is_file() and word.encode() in path.read_bytes()]


def test_a_judge_among_parts_is_called_counted_and_billed(world: Path, tmp_path: Path, capsys: Captured) -> None:
    usage = {"prompt_tokens": 100, "completion_tokens": 10}
    parts: dict[str, Any] = {
        "reward": "combined",
        "reward.path": None,
        "reward.parts.digits": "function",
        "reward.parts.digits.path": f"{REWARDS}:digits",
        "reward.parts.style": "judge",
        "reward.parts.style.model": "small",
        "reward.parts.style.api_key": KEY,
        "reward.parts.style.prices": "[10,100]",
        "reward.weights.style": 0.5,
        "data.val": f"[{world / 'held_out.jsonl'}]",
        "evaluate.sampling.max_tokens": 6,
    }
    with serving(lambda n, body: Reply(f"Score: {n % 11}", usage=usage)) as served:
        parts["reward.parts.style.base_url"] = served.url
        run = train(world, tmp_path / "run", steps=1, **parts)
        before, steps = json.loads((run / "metrics.jsonl").read_text().splitlines()[0]), step_metrics(run)
        for step in steps:
            assert step["judge/requests"] == 12 and step["judge/prompt_tokens"] == 1200
            assert step["judge/cost"] == pytest.approx(12 * (100 * 10 + 10 * 100) / 1e6)
            assert step["reward"] == pytest.approx(step["reward/digits"] + step["reward/style"])
            assert 0 < step["reward/style"] <= 0.5 and step["failed_share"] == 0
        assert before["eval/judge/requests"] == steps[-1]["eval/judge/requests"] == 5
        assert len(served.requests) == 12 + 2 * 5, "all that was asked was counted, once"
        assert {headers["authorization"] for headers in served.headers} == {f"Bearer {KEY}"}
        assert not leaked_into(run, KEY) and KEY not in capsys.readouterr().err
        assert main(["train", "--resume", str(run), "steps=2", f"reward.parts.style.api_key={KEY}"]) == 0
        assert len(step_metrics(run)) == 2 and not leaked_into(run, KEY)


def test_a_failing_part_is_counted_by_its_name(world: Path, tmp_path: Path, capsys: Captured) -> None:
    parts: dict[str, Any] = {
        "reward": "combined",
        "reward.path": None,
        "reward.parts.digits": "function",
        "reward.parts.digits.path": f"{REWARDS}:digits",
        "reward.parts.style": "judge",
        "reward.parts.style.model": "small",
        "reward.parts.style.retries": 0,
    }
    with serving(lambda n, body: Reply(status=500 if n % 4 == 0 else 200)) as served:
        parts["reward.parts.style.base_url"] = served.url
        (step,) = step_metrics(train(world, tmp_path / "run", steps=1, **parts))
    requests_before = len(served.requests)
    assert step["failed_parts/style"] == step["failed_attempts/failed"] == requests_before // 4
    assert step["failed_share"] == pytest.approx((requests_before // 4) / requests_before)
    assert "it answered 500: " in capsys.readouterr().err


def test_answers_that_a_reward_raises_on_are_counted_beside_its_mean(
    world: Path, tmp_path: Path, capsys: Captured
) -> None:
    given = {"reward.path": f"{REWARDS}:strict", "observe.console": "plain"}
    (step,) = step_metrics(train(world, tmp_path / "run", steps=1, **given))
    message = capsys.readouterr()
    assert step["reward"] == 1.0 and step["failed_attempts"] > 0
    assert f"reward   1.000 ({step['failed_attempts']:.0f} failed)" in message.out
    assert message.err.count("KeyError") == 1 and "answers that fail like it are only counted" in message.err
    assert "KeyError: 'missing' (rewards.py, line " in message.err and "The task has the fields prompt" in message.err


def test_programs_are_run_by_a_run(world: Path, tmp_path: Path, capsys: Captured) -> None:
    """Answers of a model with random weights are no programs: all are run, and judging never fails."""
    lines = [{"prompt": f"{n}+1=", "answer": {"inputs": [""], "outputs": [str(n + 1)]}} for n in range(4)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = {"data.train": f"[{tmp_path / 'tasks.jsonl'}]", "reward": "code", "reward.path": None}
    (step,) = step_metrics(train(world, tmp_path / "run", steps=1, **given))
    assert step["failed_attempts"] == 0 and step["rollouts"] == 12 and step["judging_seconds"] > 0
    assert "The programs of answers" in capsys.readouterr().err


def test_tasks_without_tests_are_refused(world: Path, tmp_path: Path, capsys: Captured) -> None:
    message = refused_run(capsys, world, tmp_path / "run", **{"reward": "code", "reward.path": None})
    assert (
        "None of the 40 tasks in data.train can be judged" in message
        and "The tests of task 0 of sums cannot be used" in message
    )


def test_a_run_records_the_file_of_a_part(world: Path, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "mine.py").write_text("def score(task, answer):\n    return len(answer)\n")
    given = {"reward": "combined", "reward.path": None, "reward.parts.long": "function"}
    given["reward.parts.long.path"] = f"{tmp_path / 'mine.py'}:score"
    run = train(world, tmp_path / "run", steps=1, **given)
    (tmp_path / "mine.py").write_text("def score(task, answer):\n    return -len(answer)\n")
    assert main(["train", *options(world, directory=run, steps=1, **given)]) == 0
    assert "The file of the reward changed since the run was started" in capsys.readouterr().err


def test_the_concurrency_of_a_judge_may_change_in_a_resumed_run(world: Path, tmp_path: Path, capsys: Captured) -> None:
    with serving(lambda n, body: Reply(f"Score: {n % 11}")) as served:
        given = {"reward": "judge", "reward.path": None, "reward.base_url": served.url, "reward.model": "small"}
        run = train(world, tmp_path / "run", steps=1, **given)
        assert main(["train", "--resume", str(run), "steps=2", "reward.max_concurrency=2", "reward.prices=[1,2]"]) == 0
        capsys.readouterr()
        assert main(["train", "--resume", str(run), "steps=3", "reward.model=large"]) == 2
    assert "reward.model was small, is large" in capsys.readouterr().err
