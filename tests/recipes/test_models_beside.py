"""The models beside the policy: a critic that is trained, and a teacher that is imitated."""

from __future__ import annotations

import shutil
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from etude.checkpoint import CheckpointManager
from etude.cli import main
from etude.models import create, load, save, tiny_config
from etude.recipes.run.builders.assemble import build
from etude.recipes.workers.policy_worker import PolicyWorker
from tests.recipes.runs import Captured, refused, refused_run, run_of, same, step_metrics, train, weights
from tests.worlds import make_tokenizer

PPO = {"advantage": "gae", "critic.train.precision": "fp32", "critic.train.learning_rate": 0.01}
TAUGHT = {"advantage": "distillation"}


def other_model(world: Path, directory: Path, seed: int = 0) -> Path:
    """The world's model with its weights moved."""
    shutil.copytree(world / "model", directory)
    model = load(world / "model", dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)), alpha=0.2)
    save(model, directory)
    return directory


# -- the critic -------------------------------------------------------------------------------------------------------


def test_a_critic_learns_beside_the_policy(world: Path, tmp_path: Path) -> None:
    """The value predictions of a constant policy become better and better."""
    still = {"collect.tasks": 8, "train.learning_rate": 0.0, "ppo_epochs": 3}
    steps = step_metrics(train(world, tmp_path / "run", steps=6, **PPO | still | {"critic.train.learning_rate": 0.03}))
    assert steps[0]["critic/value_loss"] > 0 and steps[0]["critic/grad_norm"] > 0
    assert steps[0]["explained_variance"] == pytest.approx(0, abs=1e-6), "it begins with 0 everywhere"
    late = [step["critic/value_loss"] for step in steps[-2:]]
    assert sum(late) / 2 < 0.6 * steps[0]["critic/value_loss"]
    assert steps[0]["critic/learning_rate"] == 0.03 and "grad_norm" in steps[0]


ACTS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "ppo": PPO,
    "clip": PPO | {"critic.loss.clip": 0.001},
    "warmup": PPO | {"critic.warmup": 1},
}
ACTS_TOO: dict[str, dict[str, Any]] = {
    "ppo": PPO,
    "slower": PPO | {"critic.train.learning_rate": 0.001},
    "lam": PPO | {"advantage.lam": 0.9},
    "gamma": PPO | {"advantage.gamma": 0.9},
    "whiten": PPO | {"advantage.whiten": "true"},
    "reduction": PPO | {"critic.loss.reduction": "seq-mean-token-mean"},
    "bootstrap": PPO | {"advantage.bootstrap_truncated": "true", "sampling.max_tokens": 3},
    "short": PPO | {"sampling.max_tokens": 3},
}


@pytest.mark.parametrize("cases", [ACTS, pytest.param(ACTS_TOO, marks=pytest.mark.integration)], ids=["most", "more"])
def test_each_option_of_a_critic_changes_the_training(
    cases: dict[str, dict[str, Any]], world: Path, tmp_path: Path
) -> None:
    """Each of its options acts through a run, and the whole differs from GRPO."""
    trained = {
        name: weights(train(world, tmp_path / name, steps=2, mini_batches=2, **options))
        for name, options in cases.items()
    }
    alike = [pair for pair in combinations(trained, 2) if same(trained[pair[0]], trained[pair[1]])]
    assert not alike


@pytest.mark.kept
def test_while_a_critic_warms_up_the_policy_does_not_change(world: Path, tmp_path: Path) -> None:
    run = train(
        world, tmp_path / "run", steps=3, **PPO | {"critic.warmup": 2, "checkpoint.every": 1, "checkpoint.keep": 3}
    )
    steps = step_metrics(run)
    assert [step["optimizer_steps"] for step in steps] == [0, 0, 1]
    assert all("critic/loss" in step for step in steps) and "grad_norm" not in steps[1]
    checkpoints = CheckpointManager(run / "checkpoints").list_complete()
    start = dict(load(world / "model", dtype=torch.float32).named_weights())
    for checkpoint, rested in zip(checkpoints, (True, True, False), strict=True):
        held = {name: torch.empty_like(weight) for name, weight in start.items()}
        CheckpointManager(run / "checkpoints").load(checkpoint, {"weights": held})
        assert same(held, {name: weight.detach() for name, weight in start.items()}) is rested


def test_a_run_with_a_critic_resumes_bit_for_bit(world: Path, tmp_path: Path) -> None:
    whole = train(world, tmp_path / "whole", steps=2, mini_batches=2, **PPO)
    half = train(world, tmp_path / "half", steps=1, mini_batches=2, **PPO)
    train(world, half, steps=2, mini_batches=2, **PPO)
    assert same(weights(whole), weights(half))
    assert step_metrics(whole)[-1]["critic/loss"] == step_metrics(half)[-1]["critic/loss"]


def test_a_critic_may_start_from_another_model(world: Path, tmp_path: Path) -> None:
    judge = create(load(world / "model", dtype=torch.float32).module.config, seed=3, head="score")
    save(judge, tmp_path / "judge")
    step = step_metrics(train(world, tmp_path / "run", steps=1, **PPO | {"critic.path": tmp_path / "judge"}))[0]
    assert step["explained_variance"] != pytest.approx(0, abs=1e-6), "its head foresees something from the start"
    with build(run_of(world, directory=tmp_path / "other", **PPO)) as parts:
        worker = parts.learners.crew._worker  # type: ignore[attr-defined]
        assert isinstance(worker, PolicyWorker) and worker._auxiliary.critic is not None
        ours = worker._auxiliary.critic.model
        assert ours.has_score_head and ours.module is not parts.engine.model


def test_idle_models_are_refused(world: Path, tmp_path: Path, capsys: Captured) -> None:
    for options, message in (
        ({"critic.train.learning_rate": 0.1}, "Choose `advantage=gae`, or leave it out"),
        ({"critic.path": world / "model"}, "this advantage uses no critic"),
        (PPO | {"critic.warmup": 2}, "leaves none of the 2 `steps` to train the policy"),
        ({"teacher.path": world / "model"}, "Choose `advantage=distillation`"),
        (TAUGHT, "give a model directory with `teacher.path=…`"),
        (PPO | {"critic.path": tmp_path / "nowhere"}, "`critic.path="),
        (
            PPO | {"critic.train.lr_scheduler": "linear", "critic.train.warmup_steps": 9},
            "`critic.train.warmup_steps=9` leaves nothing",
        ),
        (PPO | {"critic.train.offload": "true"}, "`critic.train.offload` keeps the optimizer"),
        (TAUGHT | {"teacher.path": tmp_path / "nowhere"}, "`teacher.path="),
    ):
        assert message in refused_run(capsys, world, tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


# -- the teacher ------------------------------------------------------------------------------------------------------


@pytest.mark.integration
def test_a_policy_nears_its_teacher_on_its_own_answers(world: Path, tmp_path: Path, capsys: Captured) -> None:
    teacher = other_model(world, tmp_path / "teacher")
    options = TAUGHT | {"teacher.path": teacher, "collect.tasks": 6, "reward": "nothing", "reward.path": None}
    steps = step_metrics(train(world, tmp_path / "run", steps=25, **options))
    assert "earned the same" not in capsys.readouterr().err
    # the advantage is −(log π − log π_teacher): its mean is the remaining divergence, with its sign turned
    assert steps[0]["advantage_mean"] < 0 and steps[-1]["advantage_mean"] > 0.6 * steps[0]["advantage_mean"]


def test_a_teacher_with_another_vocabulary_is_refused(world: Path, tmp_path: Path, capsys: Captured) -> None:
    size = make_tokenizer(tmp_path / "large", "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    save(create(tiny_config(size, layers=1, hidden=16, heads=2, kv_heads=1), seed=0), tmp_path / "large")
    message = refused_run(capsys, world, tmp_path / "run", **TAUGHT | {"teacher.path": tmp_path / "large"})
    assert f"knows {size} tokens" in message and "`teacher.path` of the same tokenizer" in message
    turned = other_model(world, tmp_path / "turned")
    text = (turned / "tokenizer.json").read_text()
    swapped = text.replace('"1"', '"§"').replace('"2"', '"1"').replace('"§"', '"2"')
    assert swapped != text
    (turned / "tokenizer.json").write_text(swapped)
    message = refused_run(capsys, world, tmp_path / "run", **TAUGHT | {"teacher.path": turned})
    assert "has another tokenizer than the policy: id" in message


def test_an_auxiliary_model_with_a_shorter_context_is_refused(world: Path, tmp_path: Path, capsys: Captured) -> None:
    """Rows may have 16 + 6 tokens."""
    for context, refuses in ((21, True), (22, False)):
        short = tmp_path / f"reads-{context}"
        config = tiny_config(make_tokenizer(short), layers=1, hidden=16, heads=2, kv_heads=1, context=context)
        save(create(config, seed=0, dtype=torch.float32), short)
        for role, options in (("critic", PPO), ("teacher", TAUGHT), ("reference", {"kl": "reverse"})):
            given = {**options, f"{role}.path": short}
            if not refuses:
                with build(run_of(world, directory=tmp_path / role, **given)):
                    continue
            message = refused_run(capsys, world, tmp_path / "run", **given)
            assert f"The {role} in {short} has a context of 21 tokens, and a row of this run may have 22" in message
            assert "`sampling.max_tokens`" in message


def test_an_agent_may_make_rows_as_long_as_the_context_of_the_engine(
    world: Path, tmp_path: Path, capsys: Captured
) -> None:
    short = tmp_path / "short"
    config = tiny_config(make_tokenizer(short), layers=1, hidden=16, heads=2, kv_heads=1, context=30)
    save(create(config, seed=0, dtype=torch.float32), short)
    options = {"agent.path": "tests.recipes.players:talker", "kl": "reverse", "reference.path": short}
    with build(run_of(world, directory=tmp_path / "run", **options)):
        pass
    assert "has a context of 30 tokens, and a conversation of the agent may have 128" in capsys.readouterr().err


def test_a_run_without_a_reward_is_refused_if_its_advantage_reads_one(
    world: Path, tmp_path: Path, capsys: Captured
) -> None:
    message = refused_run(capsys, world, tmp_path / "run", **{"reward": "nothing", "reward.path": None})
    assert "`reward=nothing`" in message and "reads the reward" in message


def test_a_run_records_the_files_of_its_teacher(world: Path, tmp_path: Path, capsys: Captured) -> None:
    teacher = other_model(world, tmp_path / "teacher")
    run = train(world, tmp_path / "run", steps=1, **TAUGHT | {"teacher.path": teacher})
    moved = teacher.rename(tmp_path / "moved")
    assert main(["train", "--resume", str(run), "steps=2", f"teacher.path={moved}"]) == 0
    save(load(world / "model", dtype=torch.float32), moved)
    message = refused(capsys, "train", "--resume", str(run), "steps=3", f"teacher.path={moved}")
    assert "was started on other files: teacher" in message
