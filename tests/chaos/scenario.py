"""A short run that is killed, again and again, at a named point or at any moment, and restarted until it is finished.

The processes are forked from a server that has imported everything, so that a restart costs no imports. A kill is
SIGKILL: nothing is flushed, no handler runs. A resumed run must equal the uninterrupted one bit for bit. So the run is
deterministic: the embedded engine, float32, one thread, batches whose rows do not see each other.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from etude.checkpoint import CheckpointManager
from etude.cli import main
from etude.config.compose import compose
from etude.dispatch import LocalCrew
from etude.envs import Observation, TextEnv
from etude.recipes.run import loop
from etude.recipes.run.builders.assemble import build
from etude.recipes.run.config import Run
from etude.recipes.run.steps.components import RunComponents
from etude.recipes.workers.policy_worker import PolicyWorker
from etude.records import Task
from etude.rollout import TorchEngine
from etude.rollout.request import Request
from etude.store import RolloutQueued, RolloutsAdmitted, TaskIssued, open_store
from etude.store.journal.event_records import decode
from etude.store.journal.journal import Transaction
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
"""The points at which a process may be killed: during generation, after the admission and before the update, before the
publish, before the evaluation, before the save, while a checkpoint is written, before it gets its name, and before the
step is logged. With an environment also at `stepping`: within a rollout of many turns. Further points are in
`tests.chaos.stale`."""

STEPS, PATIENCE = 12, 120.0
WEIGHTS = ".weights"
"""The suffix of the file beside a run's directory with the hash of each version, as trainer and engine had it."""
_countdown: dict[str, int] = {}


@dataclass(frozen=True)
class KillPoint:
    """A kill at the `count`-th time that a process reaches a point, or none."""

    point: str = ""
    count: int = 1


@dataclass(frozen=True)
class RunResult:
    """The result of a run that was killed any number of times."""

    kills: int
    processes: int
    tasks: Counter[int]
    """The number of times each task was trained on."""
    issued: list[tuple[int, int]]
    """Each task's ordinal and row, in the order they were issued."""
    weights: str
    """A hash of every weight."""
    seconds: float = 0.0
    """Seconds that its last process took."""


def run_of(directory: Path, world: Path, **changes: Any) -> Run:
    """Return the run of `words_of`."""
    return compose(Run, words_of(directory, world, **changes))


def words_of(directory: Path, world: Path, **changes: Any) -> list[str]:
    """Return the options of a run of a few steps on sums, with a filter that drops groups and a checkpoint every few
    steps."""
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
        "sampling.top_p": 0.95,
        "correction.center": "true",
        "correction.alternatives": 4,
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
    return [f"{key}={value}" for key, value in options.items()]


def make_world(directory: Path) -> Path:
    """Create the model and the tasks that every process starts from."""
    make_model(directory / "model")
    make_tasks(directory / "tasks.jsonl", 40)
    make_tasks(directory / "held_out.jsonl", 8, seed=1)
    return directory


def digits(task: Task, answer: str) -> float:
    """Return 1 if an answer has three digits or more, so that some groups have equal rewards and some do not. An answer
    that begins with an early letter cannot be judged: some rollouts are retried, and some fail for good."""
    reached("judging")
    if answer[:1] in "abcde":
        raise ValueError("an answer that cannot be judged")
    return float(sum(letter.isdigit() for letter in answer) > 2)


class UnreliableEnv(TextEnv):
    """An environment of two or three turns; each pays for a digit at the start of the answer. Some answers make it
    fail."""

    def begin(self) -> str:
        self.left = self.rng.choice((2, 3))
        return ""

    def play(self, answer: str) -> Observation:
        reached("stepping")
        if answer[:1] in "fgh":
            raise ValueError("an answer that fails the environment")
        self.left -= 1
        return Observation(f"{self.left}:", reward=0.5 * answer[:1].isdigit(), done=not self.left)


def reached(point: str) -> None:
    """Kill this process if it is to end at this point."""
    if point in _countdown:
        _countdown[point] -= 1
        if _countdown[point] == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def run_process(directory: Path, world: Path, kill: KillPoint, changes: dict[str, Any]) -> None:
    """Run `etude train` as one process of the run; `environment` has its variables."""
    os.environ.update(changes.pop("environment", {}))
    torch.set_num_threads(1)
    _countdown.clear()
    if kill.point:
        _countdown[kill.point] = kill.count
    run_loop = loop.run_loop
    loop.run_loop = lambda parts: run_loop(_marked(parts))
    sys.exit(main(["train", *words_of(directory, world, **changes)]))


def _marked(parts: RunComponents) -> RunComponents:
    """Let a process be killed at the points between the parts of a loop, and within them."""
    saver = parts.checkpoint
    saver.checkpoints = CheckpointManager(saver.checkpoints.directory, saver.checkpoints.keep, on_point=reached)
    parts.source.next = _then(parts.source.next, "admitted")  # type: ignore[method-assign]
    parts.learners.annotate = _then(parts.learners.annotate, "annotated")  # type: ignore[method-assign]
    parts.learners.update = _then(parts.learners.update, "updated")  # type: ignore[method-assign]
    parts.publish = _then(_noting_weights(parts), "published")  # type: ignore[method-assign]
    parts.evaluate.maybe_run = _then(parts.evaluate.maybe_run, "evaluated")  # type: ignore[method-assign]
    saver.save = _then(saver.save, "saved")  # type: ignore[method-assign]
    parts.store._commit = _marked_commit(parts.store._commit)  # type: ignore[assignment,method-assign]
    Request.append_token = _then(Request.append_token, "streaming")  # type: ignore[method-assign]
    if isinstance(parts.engine, TorchEngine):
        parts.engine.update_weights = _marked_publish(parts.engine.update_weights)  # type: ignore[assignment,method-assign]
    return parts


def _then(verb: Callable[..., Any], point: str) -> Callable[..., Any]:
    def act(*arguments: Any) -> Any:
        done = verb(*arguments)
        reached(point)
        return done

    return act


def _marked_commit(commit: Callable[[Transaction], None]) -> Callable[[Transaction], None]:
    """Let a process be killed when rollouts have been issued, before one is requested from the engine."""

    def act(txn: Transaction) -> None:
        commit(txn)
        if any(isinstance(decode(record), RolloutQueued) for record in txn.records):
            reached("issued")

    return act


def _marked_publish(update_weights: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """Let a process be killed before the engine stops between two tokens for new weights, when it has half of them,
    and when it goes on with all of them."""

    async def act(weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        reached("pausing")
        await update_weights(_reached_halfway(list(weights)), version)
        reached("resumed")

    return act


def _reached_halfway(weights: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for number, weight in enumerate(weights):
        if number == len(weights) // 2:
            reached("transferring")
        yield weight


def _noting_weights(parts: RunComponents) -> Callable[[int], Any]:
    """Have each publish write down a hash of the weights, as the trainer and the engine have them then. Of several
    ranks each has its own part of them."""
    publish, file = parts.publish, parts.directory.with_suffix(WEIGHTS)
    if not isinstance(parts.learners.crew, LocalCrew):
        return publish

    def act(version: int) -> Any:
        metrics = publish(version)
        hashes = {hash_of(parts.learners.crew.call(PolicyWorker.weights))}
        if isinstance(parts.engine, TorchEngine):
            hashes.add(hash_of(parts.engine.model.named_weights()))
        with file.open("a") as notes:  # one write, which is whole or not there
            notes.write("".join(f"{version} {hashed}\n" for hashed in hashes))
        return metrics

    return act


def hash_of(weights: Iterable[tuple[str, Tensor]]) -> str:
    """Return a hash of named weights."""
    hashed = hashlib.sha256()
    for name, weight in sorted(weights, key=lambda pair: pair[0]):
        hashed.update(name.encode() + weight.detach().contiguous().numpy().tobytes())
    return hashed.hexdigest()


class RunKiller:
    """Starts processes, and kills them from outside if a time is given instead of a point."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        first = self._context.Process(target=int)  # so that no later process waits for the imports
        first.start()
        first.join(PATIENCE)

    def run_once(
        self,
        directory: Path,
        world: Path,
        kill: KillPoint,
        after: float | None = None,
        meanwhile: Callable[[int], None] | None = None,
        **changes: Any,
    ) -> bool:
        """Run one process; return whether it finished the run. `after`: seconds until a kill from outside. `meanwhile`:
        called with its process id."""
        process: BaseProcess = self._context.Process(
            target=run_process, args=(directory, world, kill, changes), daemon=True
        )
        process.start()
        until = time.monotonic() + (PATIENCE if after is None else after)
        if meanwhile is not None:
            assert process.pid is not None
            meanwhile(process.pid)
        process.join(max(0.0, until - time.monotonic()))
        if process.is_alive():
            assert after is not None, f"a process did not end within {PATIENCE:g} seconds"
            with suppress(ProcessLookupError):
                assert process.pid is not None
                os.kill(process.pid, signal.SIGKILL)
            process.join(PATIENCE)
        assert process.exitcode in (0, -signal.SIGKILL), f"a process ended with {process.exitcode}"
        return process.exitcode == 0

    def run_to_end(
        self, directory: Path, world: Path, kill_times: list[KillPoint | float], **changes: Any
    ) -> RunResult:
        """Run processes that are killed at points or after seconds, then let one finish; return the result."""
        kills, began = 0, time.perf_counter()
        for end in kill_times:
            began = time.perf_counter()
            kill, after = (end, None) if isinstance(end, KillPoint) else (KillPoint(), end)
            if self.run_once(directory, world, kill, after, **changes):
                break
            kills += 1
        else:
            began = time.perf_counter()
            assert self.run_once(directory, world, KillPoint(), **changes)
        seconds = time.perf_counter() - began
        return replace(read_result(directory, world, **changes), kills=kills, processes=kills + 1, seconds=seconds)


def read_result(directory: Path, world: Path, **changes: Any) -> RunResult:
    """Read the result of a finished run from the journal and the last checkpoint."""
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
        weights = hash_of(parts.learners.crew.call(PolicyWorker.weights))
    return RunResult(0, 1, tasks, issued, weights)


def random_kills(count: int, seed: int, uninterrupted: RunResult) -> list[KillPoint | float]:
    """Return kills at points and at random times, in turn, each soon enough that many fit into one run."""
    chance = random.Random(seed)
    points = (KillPoint(POINTS[i % len(POINTS)]) for i in range(count))
    return [next(points) if i % 2 == 0 else chance.uniform(0.1, 0.3) * uninterrupted.seconds for i in range(count)]
