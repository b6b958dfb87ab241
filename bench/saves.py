"""Time that training waits for a checkpoint: written at once, and in the background (`checkpoint.async_save`).

    python -m bench.saves [--rounds 3] [--size 50m] [--steps 4] [--directory DIR] [--json FILE]

A model in fp32 learns from random rows. Each round trains some steps with each way, the ways in turn, and saves before
the first of them. A checkpoint has the weights and both moments, so it is three times as large as the weights. The
directory is on the disk to measure; by default a temporary one.

    wait     seconds that training waits: for the whole save, or for the copy and then for the end of the write
    steps    seconds of the steps after it; in the background they share the processor with the writer
    whole    seconds until the checkpoint is on the disk
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from bench.common import written
from etude.algorithms.losses.supervised import SFT
from etude.batch import Batch
from etude.checkpoint import BackgroundSaver, CheckpointManager, TensorTree, flat
from etude.data.tokenization import TokenRow
from etude.models import create, tiny_config
from etude.observe import make_console, progress
from etude.recipes.supervised.examples import batch_of
from etude.recipes.workers.policy_worker import LossObjective
from etude.train import Learner, TrainConfig

SIZES = {
    "50m": {"layers": 12, "hidden": 512, "heads": 8, "kv_heads": 4, "intermediate": 1536, "vocab_size": 8192},
    "15m": {"layers": 4, "hidden": 384, "heads": 8, "kv_heads": 4, "intermediate": 1536, "vocab_size": 8192},
    "tiny": {"layers": 1, "hidden": 32, "heads": 4, "kv_heads": 2, "intermediate": 64, "vocab_size": 64},
}
WAYS = ("no save", "at once", "in the background")


@dataclass(frozen=True)
class Saved:
    """One save, and the steps after it; seconds."""

    way: str
    wait: float
    steps: float
    whole: float


def rows(vocabulary: int, count: int = 8, tokens: int = 128) -> Batch:
    """Return examples of random tokens."""
    chance = np.random.default_rng(0)
    learned = np.arange(tokens) >= 1
    ids = (chance.integers(0, vocabulary, tokens).astype(np.int32) for _ in range(count))
    return batch_of([((TokenRow(row, learned, np.zeros(tokens, np.int16)),),) for row in ids])


class Trial:
    """A learner that trains and saves."""

    def __init__(self, size: str, steps: int, directory: Path) -> None:
        model = create(tiny_config(**SIZES[size]), dtype=torch.float32, seed=0)
        self.learner = Learner(model, TrainConfig(precision="fp32"), steps=None)
        self.batch, self.objective = rows(SIZES[size]["vocab_size"]), LossObjective(SFT())
        self.checkpoints, self.steps = CheckpointManager(directory, keep=1), steps
        self.megabytes = sum(tensor.nbytes for tensor in flat(self.learner.state()).values()) / 1e6
        self.train()

    def train(self) -> float:
        """Make the steps, and return their seconds."""
        began = time.perf_counter()
        for _ in range(self.steps):
            self.learner.update(self.batch, self.objective)
        return time.perf_counter() - began

    def run(self, way: str) -> Saved:
        """Save in a way, and train meanwhile or afterwards."""
        if way == "no save":
            return Saved(way, 0.0, self.train(), 0.0)
        began, state, written = time.perf_counter(), self.learner.state(), list[float]()
        if way == "at once":
            self.checkpoints.save(1, state, {})
            wait = whole = time.perf_counter() - began
            return Saved(way, wait, self.train(), whole)
        saver = Timed(written)
        saver.begin(self.checkpoints, 1, state, {})
        wait = time.perf_counter() - began
        steps, ended = self.train(), time.perf_counter()
        saver.finish()
        return Saved(way, wait + time.perf_counter() - ended, steps, written[0] - began)


class Timed(BackgroundSaver):
    """A saver that notes when the write has ended."""

    def __init__(self, written: list[float]) -> None:
        super().__init__()
        self._written = written

    def begin(self, checkpoints: CheckpointManager, step: int, tensors: TensorTree, facts: Mapping[str, Any]) -> None:
        """Begin a save."""
        super().begin(checkpoints, step, tensors, facts)
        assert self._write is not None
        self._write.add_done_callback(lambda _: self._written.append(time.perf_counter()))


def main(words: Sequence[str] | None = None) -> list[Saved]:
    """Print the table of medians, and return every save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="steps after each save")
    parser.add_argument("--size", choices=SIZES, default="50m")
    parser.add_argument("--directory", type=Path, help="directory on the disk to measure")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(words)
    console, saves = make_console(), list[Saved]()
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        trial = Trial(options.size, options.steps, Path(directory))
        with progress("saving", options.rounds * len(WAYS), console) as bar:
            for round_number in range(options.rounds):
                for way in WAYS[round_number % 3 :] + WAYS[: round_number % 3]:
                    saves.append(trial.run(way))
                    bar.advance()
    table = Table(box=SIMPLE_HEAD, title=f"{trial.megabytes:.0f} MB, {options.steps} steps after each save; s")
    for column in ("", "wait", "steps", "whole"):
        table.add_column(column, justify="right" if column else "left")
    for way in WAYS:
        found = [save for save in saves if save.way == way]
        table.add_row(way, *(f"{median(getattr(s, name) for s in found):.2f}" for name in ("wait", "steps", "whole")))
    console.print(table)
    if options.json:
        written(options.json, [asdict(save) for save in saves], {})
    return saves


if __name__ == "__main__":
    main()
