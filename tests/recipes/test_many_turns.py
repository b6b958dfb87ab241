"""Whole runs whose rollouts have many turns, and runs that compare with greedy answers: trained, resumed, scored."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from itertools import combinations
from pathlib import Path

import pytest
import torch

from etude.cli import main
from etude.integrity import read_text, write_text
from etude.models import load
from etude.recipes.run.builders.assemble import build
from etude.store import open_store
from tests.recipes import partners
from tests.recipes.runs import Captured, options, refused, rows_of, run_of, same, step_metrics, train, weights

ECHO = {
    "env.path": f"{partners.__name__}:Echo",
    "env.kwargs.turns": 2,
    "reward": "environment",
    "reward.path": None,
}
REMAX = {"advantage": "remax"}
CREDIT = ("gigpo", "step_rewards", "mt_grpo")
"""Advantages for turns, beside the first of them. `recipes/collect/test_agent_rollouts.py` has all of them too."""


@pytest.fixture(scope="module")
def echoed(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with an environment, without an interruption. Read it only; copy it to go on."""
    given = {"data.val": world / "held_out.jsonl", "evaluate.samples": 2, "checkpoint.every": 1}
    return train(world, tmp_path_factory.mktemp("echoed") / "run", steps=2, **ECHO, **given)


# -- environments -----------------------------------------------------------------------------------------------------


def test_a_step_logs_statistics_of_its_rollouts(echoed: Path) -> None:
    first = step_metrics(echoed)[0]
    assert first["turns"] == 2 and first["rollouts"] == 12 and first["tool_calls"] == 0
    assert first["environment_seconds"] > 0 and first["observation_length"] > 0
    assert first["answer_length"] <= 12 and first["prompt_length"] <= 5
    assert first["reward"] == pytest.approx(first["reward_mean"]) and first["reward"] > 0, "what turns are paid counts"
    assert first["tokens"] == pytest.approx(
        12 * (first["prompt_length"] + first["answer_length"] + first["observation_length"])
    )


def test_a_resumed_run_equals_one_that_was_never_stopped(world: Path, echoed: Path, tmp_path: Path) -> None:
    half = train(world, tmp_path / "half", steps=1, **ECHO)
    train(world, half, steps=2, **ECHO)
    assert same(weights(half), weights(echoed))


def test_rollouts_after_a_checkpoint_are_not_played_again(
    world: Path, echoed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(world, directory=tmp_path / "run", steps=4, **ECHO)
    with build(run) as parts:
        parts.begin()
        before = parts.source.next(1)
    with build(run) as parts:
        monkeypatch.setattr(partners.Echo, "step", None)
        after = parts.source.next(1)
    assert after.replayed and before.rollouts == after.rollouts
    for a, b in zip(rows_of(before), rows_of(after), strict=True):
        assert (a.ids == b.ids).all() and (a.reward == b.reward).all()


@pytest.mark.parametrize(
    "change",
    [
        {"env.kwargs.turns": 3},
        {"env.max_turns": 1},
        {"env.max_tokens": 10},
        pytest.param({"advantage": "turn_baseline"}, marks=pytest.mark.kept),
        *(pytest.param({"advantage": name}, marks=pytest.mark.integration) for name in CREDIT),
        {"echo": 0.5},
        {"reward": "function", "reward.path": "tests.recipes.rewards:digits"},
    ],
    ids=lambda change: " ".join(f"{name}={value}" for name, value in change.items()),
)
def test_every_option_changes_the_training(
    change: dict[str, object], world: Path, echoed: Path, tmp_path: Path
) -> None:
    """In one step, like the first step of that run."""
    assert not same(weights(train(world, tmp_path / "changed", steps=1, **ECHO | change)), weights(echoed, 1))


def test_an_environment_in_a_file_is_found_from_anywhere(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    Path("game.py").write_text("from tests.recipes.partners import Echo\n")
    run = train(world, tmp_path / "run", steps=1, **ECHO | {"env.path": "game.py:Echo"})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine" / "game.py").write_text("from tests.recipes.partners import Echo  # mended\n")
    assert main(["train", "--resume", str(run), "steps=2", "env.timeout=9"]) == 0
    assert len(step_metrics(run)) == 2


def test_a_run_with_another_environment_is_another_run(echoed: Path, capsys: Captured) -> None:
    message = refused(capsys, "train", "--resume", str(echoed), "steps=3", "env.max_turns=5")
    assert "env.max_turns was 8, is 5" in message


def test_the_answers_of_a_step_are_shown_with_their_observations(echoed: Path, capsys: Captured) -> None:
    assert main(["answers", str(echoed), "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 12
    for line in lines:
        by = [turn["by"] for turn in line["conversation"]]
        assert by == ["model", "observation", "model"] and line["conversation"][-1]["text"] == line["answer"]
        text, shown = line["conversation"][0]["text"], line["conversation"][1]["text"]
        assert shown == f"{text[:3]}:" or text.startswith(" ")
    with closing(open_store(echoed / "journal.sqlite", read_only=True)) as store:
        turns = store.turns(store.admitted()[2][0])
        assert lines[0]["reward"] == sum(turn.reward or 0 for turn in turns)
    assert main(["answers", str(echoed), "-n", "1"]) == 0
    assert "│" in capsys.readouterr().out


def test_answers_are_shown_without_observations_if_the_model_was_moved(
    world: Path, echoed: Path, tmp_path: Path, capsys: Captured
) -> None:
    run = Path(shutil.copytree(echoed, tmp_path / "run"))
    file = run / "run.yaml"
    write_text(file, read_text(file).replace(str(world / "model"), str(tmp_path / "moved")))
    capsys.readouterr()
    assert main(["answers", str(run), "--json"]) == 0
    message = capsys.readouterr()
    assert [turn["by"] for turn in json.loads(message.out.splitlines()[0])["conversation"]] == ["model", "model"]
    assert "the observations between answers cannot be decoded" in message.err


def test_a_policy_is_scored_in_its_environment(world: Path, echoed: Path, tmp_path: Path, capsys: Captured) -> None:
    first = json.loads((echoed / "metrics.jsonl").read_text().splitlines()[0])
    assert first["step"] == 0 and first["eval/mean@2"] > 0 and first["eval/failed"] == 0
    answers = [json.loads(line) for line in (echoed / "evaluations/step-00000002.jsonl").read_text().splitlines()]
    assert len(answers) == 10 and all(len(answer["conversation"]) == 3 for answer in answers)
    last = step_metrics(echoed)[-1]["eval/mean@2"]
    assert last == pytest.approx(sum(answer["reward"] for answer in answers) / 10)
    capsys.readouterr()
    assert main(["eval", str(echoed), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["eval/mean@2"] == pytest.approx(last)
    words = options(world, **ECHO, **{"data.train": None, "data.val": world / "held_out.jsonl"})
    read = [word for word in words if not word.startswith(("collect.", "train.", "steps", "sampling.", "observe"))]
    assert main(["eval", *read, "sampling.max_tokens=6", "evaluate.samples=2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["eval/mean@2"] == pytest.approx(first["eval/mean@2"])


# -- greedy answers ---------------------------------------------------------------------------------------------------


def test_remax_trains_and_differs_from_other_advantages(world: Path, whole: Path, tmp_path: Path) -> None:
    """In one step its weights differ from those of other advantages on the same rollouts: the leave-one-out advantage,
    which it resembles, and the default."""
    trained = {name: train(world, tmp_path / name, steps=1, advantage=name) for name in ("remax", "rloo")}
    trained["grpo"] = whole
    for one, other in combinations(trained, 2):
        assert not same(weights(trained[one], 1), weights(trained[other], 1)), f"{one} learns what {other} does"
    (numbers,) = step_metrics(trained["remax"])
    rewards = {name: step_metrics(run)[0]["reward"] for name, run in trained.items()}
    assert len(set(rewards.values())) == 1, "the answers that are trained on are the same"
    assert numbers["advantage_mean"] == pytest.approx(_expected(trained["remax"]), abs=1e-6)
    assert numbers["sampled_tokens"] > step_metrics(trained["rloo"])[0]["sampled_tokens"]
    assert "greedy_reward" not in step_metrics(trained["rloo"])[0]


def _expected(run: Path) -> float:
    """Return the mean over action tokens of R − R(greedy), read from the journal."""
    with closing(open_store(run / "journal.sqlite", read_only=True)) as store:
        tokens = total = 0.0
        for id in store.admitted()[1]:
            state, greedy = store.rollout(id), store.rollout(store.rollout(id).task * 5 + 4)
            length = sum(len(turn.completion.ids) for turn in store.turns(id))
            assert state.last is not None and greedy.last is not None
            assert state.last.total is not None and greedy.last.total is not None
            tokens, total = tokens + length, total + length * (state.last.total - greedy.last.total)
    return total / tokens


def test_greedy_answers_survive_a_stop(world: Path, tmp_path: Path) -> None:
    whole = train(world, tmp_path / "whole", steps=2, **REMAX, **ECHO)
    half = train(world, tmp_path / "half", steps=1, **REMAX, **ECHO)
    train(world, half, steps=2, **REMAX, **ECHO)
    assert same(weights(half), weights(whole))
    assert all(0 <= line["greedy_reward"] <= 2 for line in step_metrics(whole))


def test_one_rollout_and_its_greedy_answer_are_enough(world: Path, tmp_path: Path) -> None:
    """As in its paper: one rollout for each task."""
    run = train(world, tmp_path / "run", steps=1, **REMAX, **{"collect.group_size": 1, "collect.tasks": 8})
    first = dict(load(world / "model", dtype=torch.float32).named_weights())
    assert not same(weights(run), {name: weight.detach() for name, weight in first.items()})
    assert all(abs(line["grad_norm"]) > 0 for line in step_metrics(run))
