"""Whole runs: the files they leave, the metrics of their steps, and their resumption."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import Tensor

from etude.algorithms import View
from etude.algorithms.advantages.group import GRPO
from etude.cli import main
from etude.observe import SampledRollout
from etude.recipes.run.builders.assemble import build
from etude.recipes.run.directory import read_metrics
from etude.recipes.run.loop import run_loop
from etude.store import PolicyEvaluated, RolloutsAdmitted, open_store
from etude.tools.step_index import StepIndex
from tests.components import require
from tests.recipes.runs import Captured, options, run_of, same, step_metrics, train, weights

EVERY_STEP = {
    *("reward", "reward/digits", "reward/short", "loss", "grad_norm", "learning_rate"),
    *("sampled_tokens", "sampled_tokens_per_second", "trained_tokens", "trained_tokens_per_second"),
    *("prompt_length", "answer_length", "answer_length_max", "truncated", "tokens", "rollouts"),
    *("mismatch/k3", "mismatch/largest_gap", "policy_kl", "clip_share"),
    *("mismatch/effective_sample_size", "mismatch/rollout_effective_sample_size"),
    *("staleness/mean", "staleness/max", "staleness/0"),
    *(
        "dropped_share",
        "dropped_tasks",
        "failed_attempts",
        "overlong_prompts",
        "zero_variance_share",
        "judging_seconds",
    ),
    *("peak_memory_gb", "device_utilization", "mfu", "engine/busy_seconds", "publish_bytes", "publish_ms"),
    *("time/step", *(f"{kind}/{phase}" for kind in ("time", "share") for phase in ("collect", "update", "publish"))),
}


def test_a_run_leaves_its_options_metrics_journal_and_checkpoint(trained: Path) -> None:
    names = {path.name for path in trained.iterdir()}
    assert {"run.yaml", "metrics.jsonl", "journal.sqlite", "checkpoints", "evaluations"} <= names
    assert [path.name for path in sorted((trained / "evaluations").glob("step-*"))] == [
        f"step-{step:08d}.jsonl" for step in (0, 2, 4)
    ]
    first = json.loads((trained / "evaluations" / "step-00000004.jsonl").read_text().splitlines()[0])
    assert {"prompt", "text", "reward", "parts", "finish"} <= first.keys()
    assert "steps: 4" in (trained / "run.yaml").read_text()
    store = open_store(trained / "journal.sqlite", read_only=True)
    assert store.admitted().keys() == {1, 2, 3, 4}
    scored = [event for _, event in store.read(kinds=(PolicyEvaluated,)) if isinstance(event, PolicyEvaluated)]
    assert [event.step for event in scored] == [0, 2, 4] and all("eval/mean@2" in event.scores for event in scored)
    store.close()


def test_every_step_logs_the_documented_metrics(trained: Path) -> None:
    steps = step_metrics(trained)
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    for step in steps:
        assert step.keys() >= EVERY_STEP, EVERY_STEP - step.keys()
        assert all(math.isfinite(step[name]) for name in EVERY_STEP)
        assert step["rollouts"] == 12 and step["prompt_length"] == 4
        assert step["tokens"] == pytest.approx(12 * (step["prompt_length"] + step["answer_length"]))
        assert step["reward"] == pytest.approx(step["reward/digits"] + step["reward/short"])
        assert 0 < step["answer_length"] <= step["answer_length_max"] <= 6
        shares = sum(value for name, value in step.items() if name.startswith("share/") and name.count("/") == 1)
        assert 0.6 < shares <= 1, "little happens between the phases"
        assert step["staleness/0"] == 1 and step["staleness/max"] == 0 and "staleness/1" not in step
        assert step["mismatch/rollout_effective_sample_size"] > 0.99
        assert step["mismatch/largest_gap"] < 1e-5 and step["mfu"] > 0 and 0 < step["device_utilization"] < 1.5
    assert {"eval/mean@2", "eval/best@2", "eval/length"} <= steps[1].keys() and "eval/mean@2" not in steps[0]


def test_the_same_seed_gives_the_same_run_and_another_seed_another(world: Path, whole: Path, tmp_path: Path) -> None:
    again, other = train(world, tmp_path / "a", steps=2), train(world, tmp_path / "b", steps=1, seed=1)
    assert same(weights(again), weights(whole, 2)) and not same(weights(other), weights(whole, 1))


def test_a_finished_run_resumes_with_more_steps(world: Path, whole: Path, tmp_path: Path, capsys: Captured) -> None:
    part = train(world, tmp_path / "part", steps=2)
    assert main(["train", "--resume", str(part)]) == 0
    assert "All 2 steps are done" in capsys.readouterr().err and len(step_metrics(part)) == 2
    assert main(["train", "--resume", str(part), "steps=3"]) == 0
    assert [step["step"] for step in step_metrics(part)] == [1, 2, 3]
    assert same(weights(part), weights(whole, 3))
    assert "steps: 3" in (part / "run.yaml").read_text()


def test_a_run_whose_groups_have_equal_rewards_reports_it(world: Path, tmp_path: Path, capsys: Captured) -> None:
    run = train(world, tmp_path / "run", steps=1, reward__path="tests.recipes.rewards:level")
    assert "earned the same" in capsys.readouterr().err
    assert step_metrics(run)[0]["zero_variance_share"] == 1 and step_metrics(run)[0]["loss"] == 0


class Greedy(GRPO):
    """A loss that asks for more memory than there is, where no other part reports memory."""

    def advantage(self, reward: Tensor, view: View) -> Tensor:
        return torch.empty(1 << 60) + super().advantage(reward, view)


def test_memory_that_runs_out_in_a_step_is_reported_in_a_sentence(
    world: Path, tmp_path: Path, capsys: Captured
) -> None:
    words = options(world, directory=tmp_path / "run", steps=1, advantage="tests.recipes.run.test_loop:Greedy")
    assert main(["train", *words]) == 2
    message = capsys.readouterr().err
    assert "etude: The system gave this process no more memory (" in message and "`etude plan` says how much" in message


# -- presets ----------------------------------------------------------------------------------------------------------


def test_grpo_learns_from_a_preset(world: Path, tmp_path: Path) -> None:
    run = train(world, tmp_path / "run", "grpo", reward__path="tests.recipes.rewards:digits", steps=1)
    assert "name: grpo" in (run / "run.yaml").read_text() and step_metrics(run)[-1]["grad_norm"] > 0


def test_each_part_of_dapo_has_an_effect(world: Path, tmp_path: Path) -> None:
    """Refills drop groups, the penalty changes rewards, the upper clip is used; each compared with DAPO without it."""
    common = {"overlong.buffer": 4, "mini_batches": 2, "train.learning_rate": 0.1, "steps": 1}
    common |= {"collect.tasks": 6, "collect.group_size": 2}
    whole = train(world, tmp_path / "dapo", "dapo", **common)
    without = {
        "refill": {"collect.refill": 0},
        "penalty": {"overlong": "null", "overlong.buffer": None},
        "clip": {"loss.clip_high": 100},
        "reduction": {"loss.reduction": "seq-mean-token-mean"},
    }
    ends = {name: train(world, tmp_path / name, "dapo", **common | change) for name, change in without.items()}
    for name, end in ends.items():
        assert not same(weights(end), weights(whole)), f"DAPO is the same without its {name}"
    dropped = [step.get("dropped_tasks/every_rollout_earned_the_same", 0) for step in step_metrics(whole)]
    assert sum(dropped) > 0 and sum(step["dropped_tasks"] for step in step_metrics(ends["refill"])) == 0
    assert max(step["zero_variance_share"] for step in step_metrics(ends["refill"])) > 0


def test_the_admitted_rollouts_are_the_trained_ones(trained: Path) -> None:
    store = open_store(trained / "journal.sqlite", read_only=True)
    admitted = [event for _, event in store.read(kinds=(RolloutsAdmitted,)) if isinstance(event, RolloutsAdmitted)]
    for event, step in zip(admitted, step_metrics(trained), strict=True):
        answers = [turn.completion for rollout in event.rollouts for turn in store.turns(rollout)]
        assert sum(len(answer.ids) for answer in answers) == step["action_tokens"]
        rewards = [store.rollout(rollout).last for rollout in event.rollouts]
        assert sum(last.reward for last in rewards if last and last.reward is not None) / len(rewards) == (
            pytest.approx(step["reward"])
        )
    store.close()


def test_options_of_the_helper_are_words_of_a_command_line(world: Path) -> None:
    assert "collect.tasks=3" in options(world) and "reward=function" in options(world)


def test_training_and_evaluation_use_one_event_loop_for_a_judge(world: Path, tmp_path: Path) -> None:
    run = train(
        world,
        tmp_path / "run",
        reward__path="tests.recipes.rewards:gated",
        data__val=f"[{world / 'held_out.jsonl'}]",
        evaluate__every=1,
        steps=1,
    )
    (step,) = step_metrics(run)
    assert step["failed_attempts"] == step["eval/failed"] == 0


def test_the_journal_has_the_advantage_of_each_rollout_once_its_step_has_trained(trained: Path) -> None:
    with closing(open_store(trained / "journal.sqlite", read_only=True)) as store:
        index = StepIndex(store)
        rewards = {state.id: state.last.total for state in store.rollouts() if state.last is not None}
        for entry in index.admitted:
            advantages = index.advantages(entry.step)
            assert sorted(advantages) == sorted(entry.rollouts.tolist())
            ordered = sorted(advantages, key=lambda id: rewards[id] or 0.0)
            assert advantages[ordered[0]] <= 0 <= advantages[ordered[-1]]
        assert any(advantages.values())


def test_trackers_get_some_rollouts_of_each_step_that_is_written(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require("tensorboard")
    shown: dict[int, Sequence[SampledRollout]] = {}
    observe = {"observe.rollouts": 3, "observe.every": 2, "observe.tensorboard": True}
    with build(run_of(world, directory=tmp_path, steps=3, **observe)) as parts:
        monkeypatch.setattr(parts.log, "add_rollouts", shown.__setitem__)
        run_loop(parts)
        texts = {id: parts.store.turns(id)[0].completion.text for id in range(36)}
    assert list(shown) == [2, 3], "the last step is written too"
    for step, rollouts in shown.items():
        assert [len(rollouts), *{sampled.rollout // 12 for sampled in rollouts}] == [3, step - 1]
        rewards, advantages = [sampled.reward for sampled in rollouts], [sampled.advantage for sampled in rollouts]
        assert rewards == sorted(rewards, reverse=True) and advantages[0] > 0 > advantages[-1]
        assert all(sampled.text == texts[sampled.rollout] and "+" in sampled.prompt for sampled in rollouts)


def test_an_evaluation_before_training_has_a_separate_line(trained: Path) -> None:
    first = json.loads((trained / "metrics.jsonl").read_text().splitlines()[0])
    assert first["step"] == 0 and "eval/mean@2" in first and "reward" not in first
    assert all(step["step"] > 0 for step in read_metrics(trained))


def test_engine_metrics_of_scoring_are_counted_separately(trained: Path) -> None:
    for step in step_metrics(trained):
        assert step["engine/finished"] == step["rollouts"] and step["optimizer_steps"] == 1
        assert step.get("eval/engine/finished", 10) == 10 and ("eval/engine/finished" in step) == (
            "eval/length" in step
        )
