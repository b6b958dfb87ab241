"""Flip single bits in every file of a run, cut its files short, resume it, and print the results: `python -m
tests.chaos.flips`.

The run was killed within a step, and has steps after its last checkpoint to replay. Each damage may end in two ways:
the resumed run has, in every bit, the weights of the undamaged run, or an error names the file. Any other end is wrong:
other weights, an error that is none of Etude's, no name.

All is real with one exception: model, engine and judge are created once, and every resumed run is given the same.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from etude.checkpoint import CheckpointManager
from etude.data import Dataset
from etude.errors import EtudeError
from etude.observe import configure_logging, read_last_step
from etude.recipes.event_loop import LoopThread
from etude.recipes.run import directory as run_directory
from etude.recipes.run.builders.collection import RolloutBuilder
from etude.recipes.run.builders.crew import build_crew
from etude.recipes.run.builders.policy import build_chat_renderer
from etude.recipes.run.config import Run
from etude.recipes.run.resume import inputs
from etude.recipes.run.steps.components import Learners
from etude.recipes.run.steps.save_resume import resume_run
from etude.recipes.workers.policy_worker import PolicyWorker
from etude.rewards import Judge
from etude.store import open_store
from tests.chaos.scenario import KillPoint, RunKiller, make_world, run_of

__all__ = ["Damage", "Resuming", "damages", "killed", "kind_of", "main"]

CHANGES: dict[str, Any] = {
    **{"steps": 6, "checkpoint.every": 2, "evaluate.every": 2, "evaluate.limit": 2},
    **{"collect.tasks": 2, "collect.group_size": 3, "sampling.max_tokens": 4},
}
"""The options of the run: it is killed in its sixth step, and its last checkpoint is of the fourth."""


@dataclass(frozen=True)
class Damage:
    """Damage to one file: a flipped bit, or a cut after a byte."""

    file: str
    bit: int | None = None
    cut: int | None = None

    def do(self, directory: Path) -> None:
        """Damage the file in a directory."""
        path = directory / self.file
        data = bytearray(path.read_bytes())
        if self.bit is not None:
            data[self.bit // 8] ^= 1 << self.bit % 8
        path.write_bytes(data[: self.cut])


def killed(place: Path, world: Path, killer: RunKiller | None = None) -> list[Path]:
    """The directory of a killed run with the database's log, and the same once the log is in the database."""
    first, second = place / "killed", place / "folded"
    assert not (killer or RunKiller()).run_once(first, world, KillPoint("judging", 106), **CHANGES), (
        "it ended before it was killed"
    )
    shutil.copytree(first, second)
    open_store(second / run_directory.JOURNAL).close()
    return [first, second]


SHARES = {"journal.sqlite": 12, "journal.sqlite-wal": 6, "rank-0.tensors": 4, "tensors.json": 4, "facts.json": 4}
SHARES |= {"run.yaml": 3, "inputs.json": 3, "best.json": 3, "metrics.jsonl": 2}
"""The weight of each kind of file; any other has 1."""


def damages(directories: list[Path], flips: int, cuts: int, seed: int = 0) -> Iterator[tuple[Path, Damage]]:
    """Return this many flips and cuts, spread over the files of these directories by weight, not by size."""
    chance = random.Random(seed)
    files = [(base, name) for base in directories for name in files_of(base)]
    shares = [SHARES.get(Path(name).name, 1) for _, name in files]
    cut = set(chance.sample(range(flips + cuts), cuts))
    for number in range(flips + cuts):
        base, name = files[number] if number < len(files) else chance.choices(files, shares)[0]
        byte = chance.randrange((base / name).stat().st_size)
        yield base, Damage(name, cut=byte) if number in cut else Damage(name, 8 * byte + chance.randrange(8))


def files_of(directory: Path) -> list[str]:
    """Return the files of a run that are not empty; of the checkpoints, only the last one, because others are not
    read."""
    earlier = sorted((directory / "checkpoints").glob("step-*"))[:-1]
    result = [path for path in sorted(directory.rglob("*")) if path.is_file() and path.stat().st_size]
    return [str(path.relative_to(directory)) for path in result if not any(path.is_relative_to(old) for old in earlier)]


def kind_of(file: str) -> str:
    """Return the kind of a file."""
    name = Path(file).name
    return "evaluations/*.jsonl" if file.startswith("evaluations") else name


class Resuming:
    """Resumes copies of a run, one after the other, to the last step."""

    def __init__(self, world: Path, stack: ExitStack) -> None:
        run = run_of(world / "nowhere", world, **CHANGES)
        self._run, self._chat = run_directory.with_absolute_paths(run), build_chat_renderer(run)
        torch.set_num_threads(1)
        self._crew, self._engine, _ = build_crew(run, self._chat, world, stack)
        self._judge = stack.enter_context(Judge(run.reward, run.judging))
        self._loop = stack.enter_context(LoopThread())
        self._dataset = Dataset.load(run.data.train, run.data.columns)

    def weights(self, directory: Path, damage: Damage | None = None) -> str:
        """Return a hash of the final weights."""
        run = self._run.model_copy(update={"directory": directory})
        with run_directory.lock_directory(directory):
            # Building reads only the options for this check, and takes a while.
            if damage is None or damage.file == run_directory.OPTIONS:
                run_directory.check_same_options(directory, run)
            inputs.RunInputs(directory, run).check()
            with closing(open_store(directory / run_directory.JOURNAL)) as store:
                return self._resumed(run, directory, store)

    def _resumed(self, run: Run, directory: Path, store: Any) -> str:
        length = self._crew.call(PolicyWorker.max_total_tokens)
        learners = Learners(self._crew, run.model_columns(), run.mini_batches, run.loss.split_unit)
        checkpoints = CheckpointManager(directory / "checkpoints", run.checkpoint.keep)
        with ExitStack() as stack:
            rollouts = RolloutBuilder(run, self._chat, self._engine, self._judge, self._loop, length, {})
            collector = rollouts.build_parts(directory, self._dataset, store, self._crew.put, stack, None).collector
            done = resume_run(run.checkpoint, checkpoints, learners, collector, run.steps)
            read_last_step(directory)
            self._crew.call(PolicyWorker.publish, done)
            for step in range(done + 1, run.steps + 1):
                scored = collector.next(step).scored
                batch = learners.annotate(scored, step - 1)
                learners.update(learners.estimate(batch, step))
                self._crew.call(PolicyWorker.publish, step)
        hashed = hashlib.sha256()
        for name, weight in self._crew.call(PolicyWorker.weights):
            hashed.update(name.encode() + weight.contiguous().numpy().tobytes())
        return hashed.hexdigest()

    def outcome(self, base: Path, damage: Damage, wanted: str, place: Path) -> str:
        """Resume a damaged copy; return `refused`, `no effect`, or a description of what is wrong."""
        with copied(base, place) as directory:
            damage.do(directory)
            try:
                result = self.weights(directory, damage)
            except EtudeError as error:
                names = Path(damage.file).name.removesuffix("-wal"), Path(damage.file).name
                return "refused" if any(name in str(error) for name in names) else f"no name: {error}"
            except Exception as error:
                return f"{type(error).__name__}: {error}"
            return "no effect" if result == wanted else "other weights"


@contextmanager
def copied(base: Path, place: Path) -> Iterator[Path]:
    """Copy a directory until the block ends."""
    directory = place / "copy"
    shutil.copytree(base, directory)
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def main() -> int:
    """Damage the files and print the table; return 0 if no end was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    configure_logging("error")
    parser.add_argument("--flips", type=int, default=2100, help="how many bits are turned, one at a time")
    parser.add_argument("--cuts", type=int, default=200, help="how often a file is cut short")
    parser.add_argument("--seed", type=int, default=0, help="what the places are derived from")
    arguments = parser.parse_args()
    counts: dict[str, Counter[str]] = {}
    wrong: list[str] = []
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        place = Path(name)
        world = make_world(place / "world")
        directories = killed(place, world)
        resuming = Resuming(world, stack)
        with copied(directories[0], place) as whole:
            wanted = resuming.weights(whole)
        with suppress(KeyboardInterrupt):  # Ctrl-C shows the results so far
            for base, damage in damages(directories, arguments.flips, arguments.cuts, arguments.seed):
                result = resuming.outcome(base, damage, wanted, place)
                done = "flips" if damage.bit is not None else "cuts"
                counts.setdefault(kind_of(damage.file), Counter()).update([done, result.partition(":")[0]])
                if result not in ("refused", "no effect"):
                    wrong.append(f"{base.name}: {damage}: {result}")
                    print(wrong[-1], flush=True)
    _show(counts, time.perf_counter() - began)
    return 1 if wrong else 0


def _show(counts: dict[str, Counter[str]], seconds: float) -> None:
    columns = ("flips", "cuts", "refused", "no effect")
    table = Table("file", *columns, "wrong", title=f"One bit turned, or a file cut short ({seconds:.0f} s)")
    for kind, of_kind in [*sorted(counts.items()), ("all", sum(counts.values(), Counter[str]()))]:
        wrong = of_kind.total() - sum(of_kind[name] for name in columns)
        table.add_row(kind, *(str(of_kind[name]) for name in columns), str(wrong))
    Console(width=100).print(table)


if __name__ == "__main__":
    raise SystemExit(main())
