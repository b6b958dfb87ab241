"""A short run that is killed, again and again, at a named point or at any moment, and started again until it is done.

The children are forked from a server that has imported everything, so that a life costs its work and not its imports.
A kill is SIGKILL: nothing is flushed, no handler runs. The run is exact where a resumed run must be bit for bit the
uninterrupted one: the embedded engine, float32, one thread, batches whose rows do not see each other.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from etude.checkpoint import CheckpointManager
from etude.config.compose import compose
from etude.envs import Observation, TextEnv
from etude.recipes.run.build import build
from etude.recipes.run.components import RunComponents
from etude.recipes.run.config import Run
from etude.recipes.run.loop import run_loop
from etude.recipes.workers.policy_worker import PolicyWorker
from etude.records import Task
from etude.store import RolloutsAdmitted, TaskIssued, open_store
from tests.worlds import make_model, make_tasks

POINTS = (
    "judging",
    "admitted",
    "updated",
    "published",
    "evaluated",
    "checkpoint.writing",
    "checkpoint.renaming",
    "saved",
)
"""Where a life may end: mid-generation, after the admission and before the update, before the publish, before the
evaluation, before the save, while a checkpoint is written, before it gets its name, and before the step is logged.
With an environment also at `stepping`: amid a rollout of many turns."""

STEPS, PATIENCE = 12, 120.0
_lives: dict[str, int] = {}


@dataclass(frozen=True)
class Life:
    """How one life of the run ends: at the `count`-th time a point is reached, or never."""

    point: str = ""
    count: int = 1


@dataclass(frozen=True)
class Story:
    """What came of a run, however often it was killed."""

    kills: int
    lives: int
    tasks: Counter[int]
    """How often each task was trained on."""
    issued: list[tuple[int, int]]
    """Each task's ordinal and row, in the order they were issued."""
    weights: str
    """A hash of every weight."""
    seconds: float = 0.0
    """How long its last life took."""


def run_of(directory: Path, world: Path, **changes: Any) -> Run:
    """A few steps on sums, with a filter that drops groups and a checkpoint now and then."""
    options = {
        "model.path": world / "model",
        "data.train": f"[{world / 'tasks.jsonl'}]",
        "data.max_prompt_length": 16,
        "data.val": f"[{world / 'held_out.jsonl'}]",
        "data.sampler": "curriculum",
        "evaluate.every": 4,
        "evaluate.sampling.max_tokens": 4,
        "reward": "function",
        "reward.path": f"{__name__}:digits",
        "sampling.max_tokens": 6,
        "collect.tasks": 3,
        "collect.group_size": 4,
        "collect.refill": 2,
        "train.precision": "fp32",
        "train.learning_rate": 0.01,
        "checkpoint.every": 4,
        "steps": STEPS,
        "observe.console": "off",
        "observe.level": "error",
        "directory": directory,
        **changes,
    }
    return compose(Run, [f"{key}={value}" for key, value in options.items()])


def make_world(directory: Path) -> Path:
    """The model and the tasks that every life begins from."""
    make_model(directory / "model")
    make_tasks(directory / "tasks.jsonl", 40)
    make_tasks(directory / "held_out.jsonl", 8, seed=1)
    return directory


def digits(task: Task, answer: str) -> float:
    """Whether an answer has three digits or more, so that some groups teach and some do not. Answers that begin with an
    early letter cannot be judged: some rollouts are tried again, and some fail for good."""
    reached("judging")
    if answer[:1] in "abcde":
        raise ValueError("an answer that cannot be judged")
    return float(sum(letter.isdigit() for letter in answer) > 2)


class Moody(TextEnv):
    """Two or three turns, each paid for a digit at its beginning. Some answers it cannot stand."""

    def begin(self) -> str:
        self.left = self.rng.choice((2, 3))
        return ""

    def play(self, answer: str) -> Observation:
        reached("stepping")
        if answer[:1] in "fgh":
            raise ValueError("an answer that nobody can stand")
        self.left -= 1
        return Observation(f"{self.left}:", reward=0.5 * answer[:1].isdigit(), done=not self.left)


def reached(point: str) -> None:
    """Die here, if this life is to end here."""
    if point in _lives:
        _lives[point] -= 1
        if _lives[point] == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def live(directory: Path, world: Path, life: Life, changes: dict[str, Any]) -> None:
    """One life of the run, in a process of its own; `environment` is that of the process."""
    os.environ.update(changes.pop("environment", {}))
    torch.set_num_threads(1)
    _lives.clear()
    if life.point:
        _lives[life.point] = life.count
    with build(run_of(directory, world, **changes)) as parts:
        run_loop(_marked(parts))


def _marked(parts: RunComponents) -> RunComponents:
    """The parts of a loop, with the points where a life may end between them."""
    saver = parts.checkpoint
    saver.checkpoints = CheckpointManager(saver.checkpoints.directory, saver.checkpoints.keep, on_point=reached)
    parts.source.next = _then(parts.source.next, "admitted")  # type: ignore[method-assign]
    parts.learners.update = _then(parts.learners.update, "updated")  # type: ignore[method-assign]
    parts.publish = _then(parts.publish, "published")  # type: ignore[method-assign]
    parts.evaluate.maybe_run = _then(parts.evaluate.maybe_run, "evaluated")  # type: ignore[method-assign]
    saver.save = _then(saver.save, "saved")  # type: ignore[method-assign]
    return parts


def _then(verb: Callable[..., Any], point: str) -> Callable[..., Any]:
    def act(*arguments: Any) -> Any:
        done = verb(*arguments)
        reached(point)
        return done

    return act


class Theatre:
    """Starts lives, and kills them from outside where a time is given instead of a point."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        first = self._context.Process(target=int)  # so that no life waits for the imports
        first.start()
        first.join(PATIENCE)

    def live(
        self,
        directory: Path,
        world: Path,
        life: Life,
        after: float | None = None,
        meanwhile: Callable[[int], None] | None = None,
        **changes: Any,
    ) -> bool:
        """One life; returns whether it came to the end of the run. `after`: seconds to a kill from outside.
        `meanwhile`: is called with its process."""
        process: BaseProcess = self._context.Process(target=live, args=(directory, world, life, changes), daemon=True)
        process.start()
        until = time.monotonic() + (PATIENCE if after is None else after)
        if meanwhile is not None:
            assert process.pid is not None
            meanwhile(process.pid)
        process.join(max(0.0, until - time.monotonic()))
        if process.is_alive():
            assert after is not None, f"a life did not end within {PATIENCE:g} seconds"
            with suppress(ProcessLookupError):
                assert process.pid is not None
                os.kill(process.pid, signal.SIGKILL)
            process.join(PATIENCE)
        assert process.exitcode in (0, -signal.SIGKILL), f"a life ended with {process.exitcode}"
        return process.exitcode == 0

    def play(self, directory: Path, world: Path, ends: list[Life | float], **changes: Any) -> Story:
        """The run, killed as told: at points, or after so many seconds; then let go on to its end."""
        kills, began = 0, time.perf_counter()
        for end in ends:
            began = time.perf_counter()
            life, after = (end, None) if isinstance(end, Life) else (Life(), end)
            if self.live(directory, world, life, after, **changes):
                break
            kills += 1
        else:
            began = time.perf_counter()
            assert self.live(directory, world, Life(), **changes)
        seconds = time.perf_counter() - began
        return replace(story(directory, world, **changes), kills=kills, lives=kills + 1, seconds=seconds)


def story(directory: Path, world: Path, **changes: Any) -> Story:
    """What the journal and the last checkpoint say of a run that is done."""
    store = open_store(directory / "journal.sqlite", read_only=True)
    tasks: Counter[int] = Counter()
    issued: list[tuple[int, int]] = []
    for _, event in store.read(kinds=(RolloutsAdmitted, TaskIssued)):
        if isinstance(event, TaskIssued):
            issued.append((event.task, event.row))
        elif isinstance(event, RolloutsAdmitted):
            tasks.update({store.rollout(rollout).task for rollout in event.rollouts})
    store.close()
    with build(run_of(directory, world, **changes)) as parts:
        assert parts.checkpoint.step == int(changes.get("steps", STEPS))
        hashed = hashlib.sha256()
        for name, weight in parts.learners.crew.call(PolicyWorker.weights):
            hashed.update(name.encode() + weight.contiguous().numpy().tobytes())
    return Story(0, 1, tasks, issued, hashed.hexdigest())


def some_ends(count: int, seed: int, whole: Story) -> list[Life | float]:
    """Ends of lives, at points and at any time, in turn; each soon enough that many fit into one run."""
    chance = random.Random(seed)
    points = (Life(POINTS[i % len(POINTS)]) for i in range(count))
    return [next(points) if i % 2 == 0 else chance.uniform(0.1, 0.3) * whole.seconds for i in range(count)]
