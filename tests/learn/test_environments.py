"""Rollouts of several turns teach: each run beats a control with a learning rate of zero, the same seeds and first
weights.

One step of the control is as good as many: its weights stay, and the same weights draw the same answers at any step.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from etude.config.compose import compose
from etude.recipes.run.builders.assemble import build
from etude.recipes.run.config import Run
from etude.recipes.run.loop import run_loop
from tests.learn import games
from tests.worlds import make_model

HELD_OUT = 150


def earned(directory: Path, learning_rate: float, **changes: Any) -> list[float]:
    """Return the reward of each held-out task after a short run."""
    options: dict[str, Any] = {
        "data.train": directory / "train.jsonl",
        "data.val": directory / "held_out.jsonl",
        "model.path": directory / "model",
        "data.max_prompt_length": 16,
        "evaluate.first": "false",
        "collect.tasks": 16,
        "collect.group_size": 8,
        "train.precision": "fp32",
        "train.learning_rate": learning_rate,
        "threads": 1,
        "observe.console": "off",
        "observe.level": "error",
        "directory": directory / f"run-{learning_rate:g}",
    }
    options |= {name.replace("__", "."): value for name, value in changes.items()}
    with build(compose(Run, [f"{key}={value}" for key, value in options.items()])) as parts:
        run_loop(parts)
        assert parts.evaluate.evaluator is not None
        return [answer.reward for answer in parts.evaluate.evaluator.with_sampling().answer_all(step=0)]


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as lines of JSON."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def beats(trained: list[float], control: list[float]) -> None:
    """Return whether the mean gain is more than four standard errors."""
    gains = [after - before for after, before in zip(trained, control, strict=True)]
    mean = sum(gains) / len(gains)
    error = math.sqrt(sum((gain - mean) ** 2 for gain in gains) / (len(gains) - 1) / len(gains))
    assert mean > 4 * error > 0, f"{sum(control) / len(gains):.3f} became {sum(trained) / len(gains):.3f}"


def test_a_model_learns_to_call_a_tool_instead_of_guessing(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    games.make_speaker(tmp_path / "model")
    write(tmp_path / "train.jsonl", games.lookups(400, seed=0))
    write(tmp_path / "held_out.jsonl", games.lookups(HELD_OUT, seed=1))
    tool = {"env.tools": f"[{games.__name__}:look]", "env.max_turns": 3, "sampling.max_tokens": 8}
    trained, control = (earned(tmp_path, rate, steps=steps, **tool) for rate, steps in ((2e-3, 10), (0.0, 1)))
    beats(trained, control)
    steps = [json.loads(line) for line in (tmp_path / "run-0.002/metrics.jsonl").read_text().splitlines()]
    assert steps[-1]["tool_calls"] > 1.5 * steps[0]["tool_calls"]


@pytest.mark.parametrize("advantage", ["turn_baseline", pytest.param("gigpo", marks=pytest.mark.soak)])
def test_a_model_learns_a_game_from_rewards_of_turns(advantage: str, tmp_path: Path) -> None:
    """It starts from random weights. It learns first to answer with a digit, and then which one."""
    make_model(tmp_path / "model")
    for name, count, seed in (("train", 400, 0), ("held_out", HELD_OUT, 1)):
        write(tmp_path / f"{name}.jsonl", [{"prompt": "?", "answer": "", "seed": f"{seed} {n}"} for n in range(count)])
    game = {"env.path": f"{games.__name__}:Seek", "env.max_turns": 3, "env.kwargs.highest": 3}
    given = game | {"reward": "environment", "sampling.max_tokens": 1, "advantage": advantage}
    trained, control = (earned(tmp_path, rate, steps=steps, **given) for rate, steps in ((8e-3, 12), (0.0, 1)))
    beats(trained, control)
