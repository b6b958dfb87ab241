"""The parts of a supervised run: adapters, references, several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from etude.cli import main
from etude.models import load
from etude.recipes.supervised.builder import build
from etude.train import FrozenModel
from tests.recipes.runs import Captured, refused, step_metrics
from tests.recipes.supervised_runs import RECIPES, learned, loaded, refusal, run_of, weights


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(name, marks=() if name in ("dpo", "sft") else pytest.mark.integration) for name in RECIPES],
)
def test_adapters_are_trained_in_place_of_the_weights(
    recipe: str, supervised_world: Path, tmp_path: Path, capsys: Captured
) -> None:
    run = learned(recipe, supervised_world, tmp_path / "run", **{"lora.rank": 2, "lora.alpha": 8})
    trained = {name for name, _ in loaded(run).trained_weights()}
    others = {name for name in trained if ".lora_" not in name}
    assert len(trained) > 20 and others == ({"score.weight"} if recipe == "reward-model" else set())
    assert main(["export", str(run), str(tmp_path / "model")]) == 0
    head = "score" if recipe == "reward-model" else "language"
    before = load(supervised_world / "model", dtype=torch.float32, head="value" if head == "score" else "language")
    after = dict(load(tmp_path / "model", dtype=torch.float32, head=head).named_weights())
    changed = {name for name, weight in before.named_weights() if not torch.equal(weight, after[name])}
    assert {"model.layers.0.self_attn.q_proj.weight"} <= changed and "model.norm.weight" not in changed
    words = ["export", str(run), str(tmp_path / "adapter"), "--adapter"]
    if recipe == "reward-model":
        assert "also trained a head, which an adapter cannot hold" in refused(capsys, *words)
    else:
        assert main(words) == 0
        assert main(["generate", str(run), "1+1=", "sampling.max_tokens=2"]) == 0


def test_a_reference_is_the_policy_without_its_adapters(supervised_world: Path, tmp_path: Path) -> None:
    with build(run_of("dpo", supervised_world, directory=tmp_path / "run", **{"lora.rank": 2})) as parts:
        parts.learner.update(parts.learner.annotate(parts.examples.next()))
        batch = parts.learner.annotate(parts.examples.next())
    plain = FrozenModel(load(supervised_world / "model", dtype=torch.float32), 10_000)
    assert torch.allclose(batch.require("ref_logp"), plain.logp(batch), atol=1e-6, equal_nan=True)


def test_two_ranks_learn_what_one_does(supervised_world: Path, tmp_path: Path) -> None:
    """Equal except for the norms of transformers' layers, which compute in float32."""
    options: dict[str, Any] = {
        **{"train.precision": "fp64", "train.max_grad_norm": "null", "steps": 2},
        **{"data.val": f"[{supervised_world / 'held_out_pairs.jsonl'}]", "evaluate.every": 1},
    }
    one = learned("dpo", supervised_world, tmp_path / "one", **options)
    two = learned("dpo", supervised_world, tmp_path / "two", **options | {"steps": 1, "ranks": 2})
    assert main(["dpo", "--resume", str(two), "ranks=1", "steps=2"]) == 0
    for alone, shared in zip(step_metrics(one), step_metrics(two), strict=True):
        for name in ("loss", "accuracy", "margin", "grad_norm", "trained_tokens"):
            assert alone[name] == pytest.approx(shared[name], rel=1e-6, abs=1e-6), name
    for name in ("eval/loss", "eval/accuracy", "eval/margin"):
        assert step_metrics(one)[0][name] == pytest.approx(step_metrics(two)[0][name], rel=1e-6, abs=1e-6), name
    mine, theirs = weights(one), weights(two)
    assert all((mine[name] - theirs[name]).abs().max() < 1e-5 for name in mine)


@pytest.mark.parametrize("recipe", RECIPES)
def test_parts_are_frozen_or_have_adapters(
    recipe: str, supervised_world: Path, tmp_path: Path, capsys: Captured
) -> None:
    message = refusal(
        capsys, recipe, supervised_world, tmp_path / "run", **{"lora.rank": 2, "model.freeze": "[layers.0]"}
    )
    assert "with `lora` adapters are trained in their place" in message


def test_an_auxiliary_model_that_the_loss_never_reads_is_refused(
    supervised_world: Path, tmp_path: Path, capsys: Captured
) -> None:
    options = {"loss": "etude.algorithms.losses.supervised:SFT"}
    message = refusal(capsys, "distill", supervised_world, tmp_path / "run", **options)
    assert "This loss reads no output of a teacher" in message and "`etude sft`" in message
    message = refusal(
        capsys, "dpo", supervised_world, tmp_path / "run", **options, reference__path=supervised_world / "teacher"
    )
    assert "`reference.path` names a reference policy, and this loss compares with none" in message
    learned("dpo", supervised_world, tmp_path / "run", steps=1, **options)


def test_options_without_an_effect_are_refused_or_reported(
    supervised_world: Path, tmp_path: Path, capsys: Captured
) -> None:
    message = refusal(capsys, "sft", supervised_world, tmp_path / "run", **{"observe.rollouts": 2})
    assert "`observe.rollouts` shows rollouts in trackers, and nothing samples here" in message
    message = refusal(capsys, "sft", supervised_world, tmp_path / "run", **{"lora.rank": 2, "lora.publish": "merged"})
    assert "nothing samples here" in message
    message = refusal(capsys, "sft", supervised_world, tmp_path / "run", **{"train.offload": "true"})
    assert "computes on the CPU" in message
    learned("sft", supervised_world, tmp_path / "run", steps=1, **{"crew.heartbeat_timeout": 300})
    assert "`crew` says how several ranks wait for each other, and there is one" in capsys.readouterr().err
