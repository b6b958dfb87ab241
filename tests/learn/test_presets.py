"""Each preset learns: it beats a control with a learning rate of zero, the same seeds and the same warmed-up model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from etude.cli import main
from etude.recipes.presets import PRESETS
from etude.recipes.run.builders.assemble import build
from etude.recipes.run.loop import run_loop
from tests.learn.practice import HELD_OUT, OWN, STEPS, practice

FAMILIES = ("grpo", "dapo", "ppo")
"""One family compares within groups, one refills groups, one has a critic. Other presets are trained as long where time
does not matter."""


def accuracy(directory: Path, model: Path, preset: str, learning_rate: float, **more: Any) -> list[float]:
    """Return the reward of each held-out problem after a short run."""
    run = practice(directory, model, preset, learning_rate, **more)
    with build(run) as parts:
        run_loop(parts)
        assert parts.evaluate.evaluator is not None
        return [float(answer.reward == 1) for answer in parts.evaluate.evaluator.with_sampling().answer_all(step=0)]


@pytest.fixture(scope="session")
def control(warmed: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The rewards of the held-out problems without training, for any algorithm."""
    return accuracy(tmp_path_factory.mktemp("control") / "grpo", warmed, "grpo", 0.0, steps=1)


@pytest.fixture(scope="session")
def better(warmed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that was trained for a while."""
    base = tmp_path_factory.mktemp("better")
    accuracy(base / "grpo", warmed, "grpo", 3e-4, steps=2 * STEPS)
    assert main(["export", str(base / "grpo" / "run"), str(base / "model")]) == 0
    return base / "model"


def beats(trained: list[float], control: list[float], preset: str) -> None:
    """Return whether the gain is more than four standard errors of the difference on the same problems."""
    gains = [after - before for after, before in zip(trained, control, strict=True)]
    mean = sum(gains) / len(gains)
    error = math.sqrt(sum((gain - mean) ** 2 for gain in gains) / (len(gains) - 1) / len(gains))
    assert mean > 4 * error > 0, f"{preset}: {sum(control) / HELD_OUT:.3f} became {sum(trained) / HELD_OUT:.3f}"


def learns(preset: str, warmed: Path, directory: Path, control: list[float], **more: Any) -> None:
    beats(accuracy(directory / "trained", warmed, preset, 3e-4, **more), control, preset)


@pytest.mark.parametrize("preset", FAMILIES)
def test_a_family_learns(preset: str, warmed: Path, tmp_path: Path, control: list[float]) -> None:
    learns(preset, warmed, tmp_path, control)


@pytest.mark.smoke
def test_a_policy_learns_from_rollouts_of_older_versions(warmed: Path, tmp_path: Path, control: list[float]) -> None:
    stale = {"max_staleness": 2, "placement.layout": "split", "correction.weight": "truncate"}
    learns("grpo", warmed, tmp_path, control, **stale)


@pytest.mark.soak
@pytest.mark.parametrize("preset", sorted(PRESETS.keys() - {*FAMILIES, "distillation"}))
def test_every_other_preset_learns(preset: str, warmed: Path, tmp_path: Path, control: list[float]) -> None:
    learns(preset, warmed, tmp_path, control)


@pytest.mark.soak
def test_distillation_learns_from_a_better_model(
    warmed: Path, better: Path, tmp_path: Path, control: list[float]
) -> None:
    learns("distillation", warmed, tmp_path, control, **{"teacher.path": better, "reward": "exact_match"})


def test_every_family_is_a_preset() -> None:
    assert set(FAMILIES) <= PRESETS.keys() and set(OWN) <= PRESETS.keys()
