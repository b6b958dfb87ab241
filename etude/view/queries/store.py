"""The rollout queue of a run or of a separate store: open rollouts, runners, attempts, and what is wrong with them.

All of it is read from the journal. So it is true while the queue is served and after it was stopped, no key is needed,
and the server of the store has no more to do. Heartbeats are not in the journal: of a runner its last claim or end is
known.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

from etude.records import Outcome
from etude.store import (
    AttemptEnded,
    AttemptStarted,
    Journal,
    LateResultRecorded,
    Phase,
    RolloutState,
    Status,
)
from etude.store.queue.owner_lease import OWNER_RESOURCE
from etude.view.queries.status import written_at
from etude.view.replies import Table
from etude.view.run_reader import RunReader

RECENT_EVENTS = 10_000
"""The newest events of the journal, from which ends, times and runners are read: a few thousand attempts."""
MOST_FAILURES = 100
USES = {"train": "training", "val": "evaluation"}
"""The uses of a rollout, in words."""
MANY_FAILURES = 0.2
"""The share of attempts without success from which the page warns."""


@dataclass(frozen=True)
class StorePage:
    """The rollout queue of a journal."""

    owner: str
    """The run that owns the queue; empty if there never was one."""
    where: str
    """Its directory."""
    epoch: int
    model: str
    """The model that runners call."""
    events: int
    """Events in the journal."""
    recent: int
    """The newest events, of which the page shows ends, times and runners."""
    written_at: float
    warnings: list[str]
    queue: Table
    """Open rollouts by their use."""
    runners: Table
    attempts: Table
    """The attempts under way."""
    failures: Table
    """The newest attempts that ended without success."""


@dataclass
class _Recent:
    """The attempts in the newest events."""

    started: dict[tuple[int, int], AttemptStarted] = field(default_factory=dict)
    ended: list[AttemptEnded] = field(default_factory=list)
    late: int = 0

    @property
    def last_at(self) -> float:
        """The time of the newest start or end."""
        return max([0.0, *(start.at for start in self.started.values()), *(end.at for end in self.ended)])

    def runner(self, rollout: int, attempt: int) -> str | None:
        """Return the runner of an attempt; None if it began before these events."""
        found = self.started.get((rollout, attempt))
        return None if found is None else found.runner

    def seconds(self, end: AttemptEnded) -> float | None:
        """Return the duration of an attempt, if both of its times are known."""
        start = self.started.get((end.rollout, end.attempt))
        return end.at - start.at if start is not None and start.at and end.at else None


def read_store(reader: RunReader) -> StorePage:
    """Return the rollout queue of a run or of a store."""
    journal = reader.journal
    states = journal.rollouts(Phase.QUEUED, Phase.RUNNING)
    events = journal.position
    recent = _read_recent(journal, events)
    owner, endpoint = journal.resource(OWNER_RESOURCE), journal.resource("endpoint")
    running = [state for state in states if state.phase is Phase.RUNNING]
    queued = len(states) - len(running)
    return StorePage(
        owner.value["run"] if owner else "",
        owner.value["where"] if owner else "",
        owner.version if owner else 0,
        str(endpoint.value.get("model", "")) if endpoint else "",
        events,
        min(events, RECENT_EVENTS),
        max(written_at(reader.directory, reader.sessions), recent.last_at),
        list(_warnings(queued, running, recent)),
        _queue(states),
        _runners(running, recent),
        _attempts(running, recent),
        _failures(recent),
    )


def _read_recent(journal: Journal, newest: int) -> _Recent:
    recent = _Recent()
    kinds = (AttemptStarted, AttemptEnded, LateResultRecorded)
    for _, event in journal.read(max(0, newest - RECENT_EVENTS), kinds=kinds, until=newest):
        match event:
            case AttemptStarted():
                recent.started[event.rollout, event.attempt] = event
            case AttemptEnded():
                recent.ended.append(event)
            case _:
                recent.late += 1
    return recent


def _warnings(queued: int, running: Sequence[RolloutState], recent: _Recent) -> Iterator[str]:
    if queued and not running:
        yield (
            f"No attempt is under way, and queued rollouts wait ({queued}): no runner claims them, or the run that "
            "owns the queue does not renew its lease."
        )
    failed = [end for end in recent.ended if end.outcome is not Outcome.SUCCEEDED]
    if recent.ended and len(failed) >= MANY_FAILURES * len(recent.ended):
        yield f"{len(failed)} of the last {len(recent.ended)} attempts ended without success."
    silent = [end for end in failed if end.outcome is Outcome.UNRESPONSIVE]
    if silent:
        names = sorted({recent.runner(end.rollout, end.attempt) or "unknown" for end in silent})
        yield f"{len(silent)} attempts ended because their runner sent no heartbeat: {', '.join(names[:5])}."
    if recent.late:
        yield f"{recent.late} results came after the queue had ended their attempts, and changed nothing."


def _table(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    return Table({name: [row[place] for row in rows] for place, name in enumerate(names)})


def _queue(states: Sequence[RolloutState]) -> Table:
    counts: Counter[tuple[str, Status]] = Counter((state.use, _status(state)) for state in states)
    statuses = (Status.QUEUED, Status.PREPARING, Status.RUNNING)
    rows = [[title, *(counts[use, status] for status in statuses)] for use, title in USES.items()]
    return _table(["use", *map(str, statuses)], rows)


def _status(state: RolloutState) -> Status:
    """Return the status of an open rollout, or that of its attempt."""
    return state.status if state.phase is Phase.QUEUED or state.last is None else state.last.status


def _runners(running: Sequence[RolloutState], recent: _Recent) -> Table:
    """Return the runners with their attempts. An attempt without a runner is one that the run itself plays."""
    at: dict[str, float] = defaultdict(float)
    outcomes: dict[str, Counter[Outcome]] = defaultdict(Counter)
    seconds: dict[str, list[float]] = defaultdict(list)
    for start in recent.started.values():
        at[start.runner] = max(at[start.runner], start.at)
    for end in recent.ended:
        if (runner := recent.runner(end.rollout, end.attempt)) is not None:
            at[runner] = max(at[runner], end.at)
            outcomes[runner][end.outcome] += 1
            took = recent.seconds(end)
            seconds[runner] += [] if took is None else [took]
    busy = Counter(state.last.runner for state in running if state.last is not None)
    rows = []
    for runner in sorted(at.keys() | busy.keys()):
        ends = outcomes[runner]
        rest = ", ".join(f"{count} {outcome}" for outcome, count in ends.most_common() if outcome != Outcome.SUCCEEDED)
        took = mean(seconds[runner]) if seconds[runner] else None
        rows.append([runner, busy[runner], ends[Outcome.SUCCEEDED], rest, took, at.get(runner) or None])
    return _table(["runner", "running", "succeeded", "others", "mean_s", "last_at"], rows)


def _attempts(running: Sequence[RolloutState], recent: _Recent) -> Table:
    rows = []
    for state in running:
        attempt = len(state.attempts) - 1
        start = recent.started.get((state.id, attempt))
        last = state.attempts[-1]
        limit = None if state.limits is None else state.limits.timeout_s
        began = start.at or None if start else None
        ids = [state.id, state.task, USES[state.use]]
        rows.append([*ids, attempt + 1, last.runner, str(last.status), last.turns, began, limit])
    names = ["rollout", "task", "use", "attempt", "runner", "status", "turns", "began", "timeout_s"]
    return _table(names, rows)


def _failures(recent: _Recent) -> Table:
    failed = [end for end in reversed(recent.ended) if end.outcome is not Outcome.SUCCEEDED][:MOST_FAILURES]
    rows = [
        [
            end.at or None,
            end.rollout,
            end.attempt + 1,
            recent.runner(end.rollout, end.attempt) or "",
            str(end.outcome),
            end.retry,
            recent.seconds(end),
            end.error,
        ]
        for end in failed
    ]
    return _table(["ended", "rollout", "attempt", "runner", "outcome", "retry", "seconds", "error"], rows)
