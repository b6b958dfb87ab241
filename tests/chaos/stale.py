"""A run with rollouts that are made while the policy trains, and what it promises however often it is killed.

The versions of its tokens depend on the speed of the machine, so it need not equal an uninterrupted run. `check_run`
and `replay_run` hold its journal, its checkpoints and the weights of its processes to the promises of
docs/internals/exactness.md ("Kills during rollouts of an older policy").
"""

from __future__ import annotations

import json
import random
import shutil
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import count, cycle
from pathlib import Path
from typing import Any

import numpy as np

from etude.checkpoint import CheckpointManager
from etude.data.sampler import CurriculumSampler
from etude.recipes.run.rules.group_size import min_group_size
from etude.records import Task, has_zero_variance
from etude.store import (
    AttemptStarted,
    Event,
    Journal,
    PolicyPublished,
    RolloutsAdmitted,
    Status,
    TaskDropped,
    TurnRecorded,
    open_store,
)
from tests.chaos.scenario import STEPS, WEIGHTS, KillPoint, RunKiller, digits, run_of
from tests.recipes.recorded_order import record_in_order, scores

POINTS = (
    "issued",
    "streaming",
    "pausing",
    "transferring",
    "resumed",
    "admitted",
    "annotated",
    "updated",
    "checkpoint.writing",
)
"""The points of a kill: after rollouts are issued, between two tokens of an answer, before the engine stops for new
weights, when it has half of them, before it goes on with them, after an admission, before advantages are estimated,
after an update, and within a save."""

TASKS, GROUP, REFILL, ROWS = 3, 4, 1, 40
LONGEST = TASKS * (1 + REFILL)
"""The groups at which a window closes, whatever became of them."""
CHANGES: dict[str, Any] = {
    "reward.path": f"{__name__}:digits_late",
    "sampling.max_tokens": 12,
    "collect.refill": REFILL,
    "placement.layout": "split",
    "correction.weight": "truncate",
    "threads": 2,
}
"""The options of the run, beside its bound: `max_staleness`."""
WINDOWED: dict[str, Any] = {"collect.order": "windowed"}
"""The options of a run that trains on the groups that end first."""
Versions = dict[int, list[int]]
"""The oldest and the newest version among the tokens of each rollout."""


def digits_late(task: Task, answer: str) -> float:
    """Judge as `digits`. Answers to some tasks come late, and those to others cannot be judged at all."""
    if task.ordinal % 3 == 2:
        raise ValueError("a task that cannot be judged")
    if task.ordinal % 4 == 1:
        time.sleep(0.05)
    return digits(task, answer)


def stale(bound: int, **changes: Any) -> dict[str, Any]:
    """Return the options of a run with this bound."""
    return CHANGES | {"max_staleness": bound} | changes


def random_stale_kills(number: int, seed: int, seconds: float) -> list[KillPoint | float]:
    """Return kills at points and at random times, in turn, for a run that takes so many seconds without one."""
    draw = random.Random(seed)
    points = draw.sample(POINTS, len(POINTS))
    visits = {"streaming": 150, "issued": 5, "checkpoint.writing": 1}  # so many that most processes come there
    drawn = (KillPoint(point, draw.randint(1, visits.get(point, 3))) for point in cycle(points))
    return [draw.uniform(0.1, 0.6) * seconds if i % 2 else next(drawn) for i in range(number)]


def run_killed(
    killer: RunKiller, directory: Path, world: Path, bound: int, kills: Sequence[KillPoint | float], **changes: Any
) -> tuple[int, int]:
    """Run processes that are killed, then let one finish. After each, check what the run has written.

    Return the number of kills, and the largest staleness that a step trained on.
    """
    done, options = 0, stale(bound, **changes)
    for kill in kills:
        point, after = (kill, None) if isinstance(kill, KillPoint) else (KillPoint(), kill)
        if killer.run_once(directory, world, point, after, **options):
            break
        done += 1
        check_run(directory, options)
    else:
        assert killer.run_once(directory, world, KillPoint(), **options)
    staleness = check_run(directory, options)
    check_last_checkpoint(directory)
    check_replay(killer, directory, world, options)
    return done, staleness


# -- the promises -----------------------------------------------------------------------------------------------------


def check_run(directory: Path, options: Mapping[str, Any]) -> int:
    """Check what a run has written so far, finished or killed. Return the largest staleness that a step trained on."""
    if not (directory / "journal.sqlite").exists():
        return 0  # it was killed before
    with closing(open_store(directory / "journal.sqlite", read_only=True)) as store:
        assert _stored(store) == _derived(store), "states follow from events"
        admissions = [event for event in _events(store, RolloutsAdmitted) if isinstance(event, RolloutsAdmitted)]
        assert [event.step for event in admissions] == list(range(1, len(admissions) + 1)), "each step, once, in order"
        _check_tasks(store, admissions)
        if not options.items() >= WINDOWED.items():
            _check_order(store, admissions)
        _check_attempts(store)
        oldest = _check_versions(store)
        staleness = {event.step: _staleness(event, oldest, options["max_staleness"]) for event in admissions}
    _check_metrics(directory, staleness)
    _check_weights(directory)
    return max(staleness.values(), default=0)


def check_last_checkpoint(directory: Path) -> None:
    """Check that a finished run has all its steps, and that its order of tasks has the rewards of each task once."""
    checkpoint = CheckpointManager(directory / "checkpoints").newest()
    assert checkpoint is not None and checkpoint.step == STEPS
    with closing(open_store(directory / "journal.sqlite", read_only=True)) as store:
        assert len(store.admitted()) == STEPS
        order = CurriculumSampler().start(ROWS, 0)
        record_in_order(store, order, checkpoint.facts["position"], GROUP)
    assert order.state() == checkpoint.facts["source"]


def check_replay(killer: RunKiller, directory: Path, world: Path, options: Mapping[str, Any]) -> None:
    """Train a new policy on the journal of a finished run: each version has the same weights, in every bit."""
    copy = directory.with_name(f"{directory.name}-replayed")
    shutil.copytree(directory, copy, ignore=shutil.ignore_patterns("checkpoints", "metrics.jsonl"))
    assert killer.run_once(copy, world, KillPoint(), **options)
    lines = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["replayed"]) for line in lines if line["step"]] == [(s, 1) for s in range(1, STEPS + 1)]
    replayed, trained = _weights(copy), _weights(directory)
    assert replayed.keys() == set(range(STEPS + 1)) and replayed == trained, "weights follow from the journal"


def _events(store: Journal, *kinds: type[Event]) -> list[Event]:
    return [event for _, event in store.read(kinds=kinds)]


def _stored(store: Journal) -> list[Any]:
    return [*store.rollouts(), *store.tasks()]


def _derived(store: Journal) -> list[Any]:
    states = store.replay()
    return [states[key] for kind in ("rollout", "task") for key in sorted(states) if key[0] == kind]


def _rewards(store: Journal, task: int) -> dict[int, float]:
    """Return the rewards of a task's rollouts with a score, by their ids."""
    states = map(store.rollout, sorted(store.task(task).rollouts))
    return {state.id: score for state in states for score in scores([state])}


def _check_tasks(store: Journal, admissions: list[RolloutsAdmitted]) -> None:
    """Check that no task is lost and none is trained twice: a step takes all tasks that it looked at from the line,
    without those that it skipped, and each of these is trained or dropped."""
    dropped = {event.task for event in _events(store, TaskDropped) if isinstance(event, TaskDropped)}
    line, end = set[int](), 0
    for admission in admissions:
        line |= set(range(end, admission.end))
        taken, trained = line - set(admission.skipped), {store.rollout(id).task for id in admission.rollouts}
        assert trained <= taken and taken - trained <= dropped and not trained & dropped
        line, end = line - taken, admission.end


def _check_order(store: Journal, admissions: list[RolloutsAdmitted]) -> None:
    """Check that the steps have the tasks of a walk over the ordinals by rewards alone, whatever the speed and the
    kills were."""
    fewest, tasks, first = min_group_size((run := run_of(Path(), Path())).advantage, run.collect.group_size), count(), 0
    for admission in admissions:
        usable, equal, end = list[int](), list[int](), first
        while len(usable) < TASKS and end - first < LONGEST:
            task = next(tasks)
            rewards, end = _rewards(store, task).values(), task + 1
            if len(rewards) >= fewest:
                (equal if has_zero_variance(min(rewards), max(rewards)) else usable).append(task)
        chosen = sorted(usable + equal[: TASKS - len(usable)])
        assert admission.rollouts == tuple(id for task in chosen for id in _rewards(store, task)), admission.step
        assert (admission.end, admission.version, admission.skipped) == (end, admission.step - 1, ())
        first = end


def _check_attempts(store: Journal) -> None:
    """Check that no rollout was drawn again after it had a score."""
    for state in store.rollouts():
        before = [attempt.status for attempt in state.attempts[:-1]]
        assert Status.SUCCEEDED not in before and Status.RUNNING not in before, f"rollout {state.id} was drawn twice"


def _check_versions(store: Journal) -> Versions:
    """Check that no attempt has a token from before it was issued, and that versions rise in an answer."""
    floor, floors, versions = -1, dict[tuple[int, int], int](), Versions()
    for event in _events(store, PolicyPublished, AttemptStarted, TurnRecorded):
        if isinstance(event, PolicyPublished):
            floor = event.version
        elif isinstance(event, AttemptStarted):
            floors[event.rollout, event.attempt] = floor
            versions.pop(event.rollout, None)
        elif isinstance(event, TurnRecorded):
            drawn = event.turn.completion.version
            assert drawn.min() >= floors[event.rollout, event.attempt] and (np.diff(drawn) >= 0).all()
            versions[event.rollout] = [int(drawn.min()), int(drawn.max())]
    return versions


def _staleness(admission: RolloutsAdmitted, versions: Versions, bound: int) -> int:
    """Return the staleness of a step's oldest token; check that it is within the bound."""
    oldest, newest = zip(*(versions[id] for id in admission.rollouts), strict=True)
    staleness = admission.step - 1 - min(oldest)
    assert staleness <= bound, f"step {admission.step} trained on tokens of version {min(oldest)}"
    assert max(newest) < admission.step
    return staleness


def _check_metrics(directory: Path, staleness: dict[int, int]) -> None:
    """Check that each trained step has one line of metrics, and reports the staleness of its tokens."""
    file = directory / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    steps = {line["step"]: line["staleness/max"] for line in lines if line["step"]}
    assert list(steps) == list(range(1, len(steps) + 1)) and len(lines) - len(steps) <= 1
    assert steps.items() <= staleness.items()


def _weights(directory: Path) -> dict[int, set[str]]:
    """Return the hashes of each version, from all processes of a run."""
    hashes, file = defaultdict[int, set[str]](set), directory.with_suffix(WEIGHTS)
    for line in file.read_text().splitlines() if file.exists() else ():
        version, hashed = line.split()
        hashes[int(version)].add(hashed)
    return hashes


def _check_weights(directory: Path) -> None:
    """Check that a version means the same weights in every process, of the trainer and of the engine."""
    assert all(len(hashes) == 1 for hashes in _weights(directory).values()), "a version was made again with others"
