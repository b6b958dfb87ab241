"""A short run that every preset can have: the demonstration's task, a warmed-up model, answers of a few tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from etude.config.compose import compose
from etude.demo import sorting_task as digits
from etude.recipes.presets import PRESETS
from etude.recipes.run.config import Run

__all__ = ["HELD_OUT", "OWN", "STEPS", "practice"]

STEPS, TRAINED, HELD_OUT = 10, 2000, 300

ONE_EACH = {"collect.tasks": 256, "collect.group_size": 1}
OWN: dict[str, dict[str, Any]] = {
    "dapo": {"overlong.buffer": 2},
    "gdpo": {"reward": "function", "reward.path": "tests.learn.rewards:in_parts"},
    "grpo_vision": {"vision.train": "false"},  # the model reads text alone
    # With more samples, two are often right, and the group has equal rewards.
    "pass_at_k": {
        "collect.tasks": 128,
        "collect.group_size": 2,
    },
    "ppo": ONE_EACH | {"critic.train.precision": "fp32", "critic.train.learning_rate": 1e-3},
    "reinforce_pp": ONE_EACH,
    "remax": ONE_EACH,
    "scalerl": {"train.warmup_steps": 0},
}
"""The additional options of a preset, for answers of a few tokens and ten steps."""


def practice(directory: Path, model: Path, preset: str, learning_rate: float, **more: Any) -> Run:
    """Return a run of a preset in a directory, with its training problems and its held-out ones."""
    directory.mkdir(parents=True)
    for name, count, held_out in (("train", TRAINED, False), ("held_out", HELD_OUT, True)):
        rows = digits.make_rows(0, count, held_out=held_out)
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options: dict[str, Any] = {
        "model.path": model,
        "data.train": f"[{directory / 'train.jsonl'}]",
        "data.val": f"[{directory / 'held_out.jsonl'}]",
        "data.max_prompt_length": 16,
        "reward": "exact_match",
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
    }
    options |= OWN.get(preset, {}) | more
    return compose(Run, [f"{key}={value}" for key, value in options.items()], preset=PRESETS[preset])
