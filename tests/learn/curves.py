"""The curves of docs/reference/recipes: each preset on the demonstration's task, beside a control with a learning
rate of zero.

python -m tests.learn.curves [NAME …]

Each preset has a picture, docs/curves/NAME.png: the accuracy on held-out problems, sampled at temperature 1, over
thirty steps. A preset takes about half a minute, and the warm-up of the model that all of them start from takes two
more.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from etude.cli import main as etude
from etude.demo.sorting_model import warm_up
from etude.observe import make_console, progress
from etude.recipes.presets import PRESETS
from etude.recipes.run.builders.assemble import build
from etude.recipes.run.loop import run_loop
from etude.tools.metric_curves import read_curves
from etude.tools.plot import draw
from tests.learn.practice import practice
from tests.pages.recipes import CURVES

LENGTH, METRIC = 30, "eval/mean@1"


def practised(directory: Path, model: Path, preset: str, rate: float = 3e-4, **more: Any) -> Path:
    """Return the directory of a run that was scored every few steps."""
    given = {"steps": LENGTH, "evaluate.every": 3, "evaluate.first": "true", **more}
    run = practice(directory, model, preset, rate, **given)
    with build(run) as parts:
        run_loop(parts)
        return parts.directory


def main(names: Sequence[str]) -> int:
    """Draw the curves."""
    console = make_console()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        with progress("warming up", None, console):
            warm_up(base / "warm", 0, lambda: None)
        control = read_curves(practised(base / "control", base / "warm", "grpo", 0.0))
        teacher = base / "teacher"
        with progress("curves", len(names), console) as bar:
            for name in names:
                given: dict[str, Any] = {}
                if name == "distillation":
                    run = practised(base / "examples", base / "warm", "grpo")
                    assert etude(["export", str(run), str(teacher)]) == 0
                    given = {"teacher.path": teacher, "reward": "exact_match"}
                learned = read_curves(practised(base / name, base / "warm", name, **given))
                CURVES.mkdir(exist_ok=True)
                draw([learned, control], [name, "nothing is learned"], [METRIC], CURVES / f"{name}.png")
                bar.advance()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:] or sorted(PRESETS)))
