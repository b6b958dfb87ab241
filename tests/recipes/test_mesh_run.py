"""Whole runs in which several ranks compute the same rollouts, by the command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from etude.cli import main
from etude.observe import configure_logging
from etude.recipes.run import checks
from tests.recipes.run.test_loop import EVERY_STEP
from tests.recipes.runs import Captured, options, refused, run_of, step_metrics, train
from tests.recipes.supervised_runs import learned
from tests.recipes.supervised_runs import weights as learned_weights
from tests.recipes.test_ranks_run import children, drawn, furthest

TWO_PARTS: dict[str, Any] = {"ranks": 2, "mesh__tensor": 2}


def test_a_run_in_parts_is_one_of_strands_or_of_one_rank_later(
    world: Path, whole: Path, tmp_path: Path, capsys: Captured
) -> None:
    """It draws what one rank draws, on all engines; each step has one batch, told once; and its checkpoint is any's."""
    run = train(world, tmp_path / "run", steps=2, **TWO_PARTS)
    assert not children()
    steps = step_metrics(run)
    assert [step["step"] for step in steps] == [1, 2]
    for step, alone in zip(steps, step_metrics(whole), strict=False):
        of_parts = {name for name in EVERY_STEP if name.startswith("reward/")}
        assert step.keys() >= EVERY_STEP - of_parts | {"exchange_seconds"} and "imbalance" not in step
        for name in ("rollouts", "tokens", "trained_tokens", "action_tokens", "optimizer_steps", "engine/finished"):
            assert step[name] == alone[name], name
        assert step["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-3)
        assert step["publish_bytes"] == 0
    assert [(ids, logp) for ids, logp, _ in drawn(run, 1)] == [(ids, logp) for ids, logp, _ in drawn(whole, 1)]
    assert main(["train", "--resume", str(run), "mesh.tensor=1", "mesh.sequence=2", "steps=3"]) == 0
    assert main(["train", "--resume", str(run), "mesh.sequence=1", "ranks=1", "steps=4"]) == 0
    assert [step["step"] for step in step_metrics(run)] == [1, 2, 3, 4] and "exchange_seconds" not in step_metrics(run)[
        3
    ]
    assert furthest(run, whole) < 1e-3


def test_what_a_mesh_cannot_be_is_refused_or_reported(world: Path, tmp_path: Path, capsys: Captured) -> None:
    given = {"directory": tmp_path / "run", "ranks": 3, "mesh.tensor": 2}
    message = refused(capsys, "train", *options(world, **given))
    assert "are 2 ranks to the same rollouts, and `ranks=3` is no multiple of that. Set `ranks=2`" in message
    assert not (tmp_path / "run").exists()
    configure_logging("info")
    checks.check_run(run_of(world, ranks=4, mesh__sequence=2, collect__tasks=1, threads=1))
    assert "A step has 1 groups, each of which 2 ranks train together on, and there are 4" in capsys.readouterr().err


@pytest.mark.soak
def test_supervised_learning_in_parts_and_strands(supervised_world: Path, tmp_path: Path) -> None:
    alone = learned_weights(learned("dpo", supervised_world, tmp_path / "alone", steps=3))
    for place, mesh in enumerate(({"mesh__tensor": 2}, {"mesh__sequence": 2})):
        run = learned("dpo", supervised_world, tmp_path / str(place), steps=3, ranks=2, **mesh)
        assert max(float((weight - alone[name]).abs().max()) for name, weight in learned_weights(run).items()) < 1e-4
