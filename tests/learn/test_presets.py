"""Each preset learns: it beats a control with a learning rate of zero, the same seeds and the same warmed-up model."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from etude.config.compose import compose
from etude.demo import digits
from etude.recipes.build import build
from etude.recipes.loop import practise
from etude.recipes.presets import PRESETS
from etude.recipes.run import Run

STEPS, TRAINED, HELD_OUT = 10, 2000, 300


def accuracy(directory: Path, model: Path, preset: str, learning_rate: float, **more: object) -> list[float]:
    """What each held-out problem earned after a short run; `lora__rank` stands for `lora.rank`."""
    directory.mkdir(parents=True)
    for name, count, held_out in (("train", TRAINED, False), ("held_out", HELD_OUT, True)):
        rows = digits.rows(0, count, held_out=held_out)
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {
        "model.path": model,
        "data.train": f"[{directory / 'train.jsonl'}]",
        "data.val": f"[{directory / 'held_out.jsonl'}]",
        "data.max_prompt": 16,
        "reward": "exact",
        "sampling.max_tokens": 8,
        "evaluate.first": "false",
        "evaluate.sampling.max_tokens": 8,
        "collect.tasks": 16,
        "collect.group_size": 16,
        "train.precision": "fp32",
        "train.learning_rate": learning_rate,
        "steps": STEPS,
        "threads": 1,
        "observe.console": "off",
        "observe.level": "error",
        "directory": directory / "run",
    } | ({"overlong.buffer": 2} if preset == "dapo" else {})
    options |= {name.replace("__", "."): value for name, value in more.items()}
    run = compose(Run, [f"{key}={value}" for key, value in options.items()], preset=PRESETS[preset])
    with build(run) as parts:
        practise(parts)
        assert parts.evaluate.evaluator is not None
        return [answer.reward for answer in parts.evaluate.evaluator.answers()]


def gained(trained: list[float], control: list[float]) -> tuple[float, float]:
    """How much better each problem was answered than by the control: the mean, and its standard error."""
    gains = [after - before for after, before in zip(trained, control, strict=True)]
    mean = sum(gains) / len(gains)
    return mean, math.sqrt(sum((gain - mean) ** 2 for gain in gains) / (len(gains) - 1) / len(gains))


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_beats_its_control_by_four_standard_errors(preset: str, warmed: Path, tmp_path: Path) -> None:
    trained = accuracy(tmp_path / "trained", warmed, preset, 3e-4)
    control = accuracy(tmp_path / "control", warmed, preset, 0.0)
    mean, error = gained(trained, control)
    assert mean > 4 * error > 0, f"{preset}: {sum(control) / HELD_OUT:.3f} became {sum(trained) / HELD_OUT:.3f}"
