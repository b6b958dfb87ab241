"""Tasks from Python, in an order of your own: `python examples/tasks_from_python.py [DIRECTORY]`, half a minute.

`data.train` accepts `module:Name` as well as files: an iterable of rows, or a function that returns one. `data.sampler`
accepts a class: here one with easy tasks first. This order is a function of the position, so a resumed run needs no
other state. An order that depends on rewards has to keep them in its `state`.

    PYTHONPATH=examples etude train grpo … data.train=[tasks_from_python:tasks] data.sampler=tasks_from_python:EasyFirst
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from etude.config.compose import compose
from etude.data import RowOrder, Sampler
from etude.demo.sorting_model import make_tokenizer, new_model
from etude.models import save
from etude.recipes.run.config import Run
from etude.recipes.run.directory import read_metrics
from etude.recipes.run.loop import train

LEVELS = 3


def tasks() -> Iterator[dict[str, Any]]:
    """Yield tasks to write the first of one, two or three digits; more digits are harder. Read once, to the end."""
    chance = random.Random(0)
    for level in range(1, LEVELS + 1):
        for _ in range(100):
            digits = "".join(chance.choices("0123", k=level))
            yield {"prompt": f"{digits}:", "answer": digits[0], "data_source": f"{level} digits"}


class EasyFirst(Sampler):
    """Data sources in the order of their names, `each` tasks of each; after the last one, rows of all sources."""

    each: int = Field(100, ge=1, description="number of tasks of a data source before those of the next")

    def start(self, rows: int, seed: int, sources: Callable[[], Sequence[str]] = list) -> RowOrder:
        """Return the order of a run over this number of rows."""
        names = list(sources())
        levels = [[row for row in range(rows) if names[row] == source] for source in sorted(set(names))]
        return _EasyFirst(rows, seed, self.each, levels)


class _EasyFirst(RowOrder):
    def __init__(self, rows: int, seed: int, each: int, levels: Sequence[Sequence[int]]) -> None:
        super().__init__(rows, seed)
        self._each, self._levels = each, [*levels, range(rows)]

    def next_row(self) -> int:
        """Return the row of the ordinal `self.position`."""
        level = self._levels[min(self.position // self._each, len(self._levels) - 1)]
        return random.Random(f"{self.seed} {self.position}").choice(level)


def main(directory: Path) -> None:
    """Train a tiny model on each of the three levels, and then on all of them, fifteen steps each."""
    model = directory / "model"
    save(new_model(make_tokenizer(model), seed=0), model)
    run = compose(
        Run,
        [
            f"model.path='{model}'",
            "data.train=[tasks_from_python:tasks]",
            "data.sampler=tasks_from_python:EasyFirst",
            "data.sampler.each=120",
            "data.max_prompt_length=16",
            "sampling.max_tokens=1",
            "collect.tasks=8",
            "collect.group_size=16",
            "train.precision=fp32",
            "train.learning_rate=2e-3",
            "steps=60",
            "threads=1",
            f"directory='{directory / 'run'}'",
        ],
    )
    train(run)
    steps = read_metrics(directory / "run")
    stages = [f"{steps[15 * stage - 1]['reward']:.3f}" for stage in range(1, LEVELS + 2)]
    print(f"reward at the end of each level, and of all of them: {', '.join(stages)}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/easy-first"))
