"""What every verb of a desk comes to: which events are written, and what is kept at hand of the work that is open.

All of it is called by one thread (`clerk`), inside a round: a verb first has its events taken, which refuses what is
illegal, and then changes what is kept. Where the round cannot be written, everything kept is made anew from the
journal, of which it is never more than a part: what waits, what runs, and the last ends.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from etude.errors import DataError, IllegalMoveError, UnknownError
from etude.observe import get_log
from etude.records import Outcome, Task
from etude.store.clerk import LATER, TICK_S, Promise
from etude.store.desk import Ended, Key, RunnerState, Wanted
from etude.store.events import (
    AttemptEnded,
    AttemptReady,
    AttemptStarted,
    Event,
    LateEnd,
    ResourcePut,
    Rewarded,
    RolloutCancelled,
    RolloutExpired,
    RolloutQueued,
)
from etude.store.journal import Journal, Writing
from etude.store.limits import RETRIED, Limits, Use
from etude.store.open_work import Due, OpenWork
from etude.store.plain import plain
from etude.store.states import LIVE, Phase, ResourceState, RolloutState, Status, TaskState
from etude.store.words import (
    asked_before,
    attempt_of,
    earned,
    issue,
    limits_of,
    other_words,
    retries_of,
    rollout_of,
    same_task,
    why_over,
)

__all__ = ["INTERRUPTED", "Claimant", "Ledger", "Lent", "Watch"]

INTERRUPTED = "The run was stopped while this was under way."
"""The error of an attempt that a stop of its run ended; it says nothing of the rollout and is not held against it."""

LAST_ID, FARTHEST = 2**63 - 1, 2**62
"""The largest number of a journal; and the largest id that may be given, beyond which there is room for others."""
KEPT_ENDS = 4096
"""How many of the last ends are found without reading the journal."""
REMEMBERED_S = 300.0
"""For how long a runner is known after its last word."""


ENDED = frozenset(Status) - LIVE - {Status.QUEUED}


class Lent(NamedTuple):
    """What a claim comes to."""

    key: Key
    task: Task
    use: Use
    limits: Limits


@dataclass(slots=True, eq=False)
class Claimant:
    """A runner that waits for work."""

    runner: str
    n: int
    until: float
    promise: Promise | None = None
    lent: list[Lent] = field(default_factory=list)
    left: bool = False
    """Whether it no longer waits."""


@dataclass(slots=True, eq=False)
class Watch:
    """Somebody who waits for rollouts to end."""

    cursor: int
    limit: int
    until: float
    promise: Promise | None = None


@dataclass(slots=True)
class _Runner:
    heard: float
    told: Mapping[str, Any] = field(default_factory=dict)


class Ledger:
    """The verbs, and what they keep."""

    def __init__(self, journal: Journal, asleep: Iterable[int] = ()) -> None:
        """asleep: rollouts that are queued, and of which nothing is done before they are asked for again."""
        self._journal, self._asleep = journal, set(asleep)
        self.resources: dict[str, tuple[int, Any]] = {}
        """The newest version of each, and its number. It is read by other threads, and nobody changes a value."""
        self._seats: deque[Claimant] = deque()
        self._watches: list[Watch] = []
        self._runners: dict[str, _Runner] = {}
        self._attended = time.monotonic()
        self._over: list[Key] = []
        self.tell: Callable[[Sequence[Key]], None] | None = None
        """Is told of attempts that are over, once that is written, on the clerk's thread: it must not wait."""
        self.start_over()

    def start_over(self) -> None:
        """Stand where the journal stands. Who has an attempt keeps it, and is given time to say so."""
        now = time.monotonic()
        self._over = []
        for seat in self._seats:
            seat.lent.clear()  # it was not written, so nobody has it
        self.resources = {state.name: (state.version, state.value) for state in self._journal.listed(ResourceState)}
        self._work = OpenWork()
        self._counts: Counter[Status] = Counter()
        self._late = self._retries = 0
        self._next_id = 0
        for state in self._journal.listed(RolloutState):
            self._next_id = state.id + 1
            self._late += sum(attempt.late is not None for attempt in state.attempts)
            self._retries += retries_of(state)
            if state.status is Status.QUEUED and state.id not in self._asleep:
                self._work.wait(state.id, state.limits or Limits(), now)
            elif state.status in ENDED:
                self._counts[state.status] += 1
            elif state.status is Status.RUNNING and state.attempts[-1].runner:  # else whoever queued it plays it
                key = Key(state.id, len(state.attempts) - 1)
                self._work.lend(key, state.attempts[-1].runner, state.limits or Limits(), now)
        self._ends: deque[tuple[int, int]] = deque()
        self._floor = self._journal.position
        """Ends up to here are found in the journal only."""

    # -- who wants rollouts -------------------------------------------------------------------------------------------

    def enqueue(self, writing: Writing, wanted: Sequence[Wanted]) -> list[int]:
        """Queue these, all or none."""
        events: list[Event] = []
        tasks: dict[int, Task] = {}
        new: dict[int, Wanted] = {}
        ids, next_id = [], self._next_id
        for one in wanted:
            ordinal = one.task.ordinal
            if ordinal not in tasks:
                events += issue(writing, one.task)
            elif not same_task(tasks[ordinal], one.task):
                raise other_words(f"Task {ordinal}", "issued")
            tasks[ordinal] = one.task
            id = next_id if one.id is None else one.id
            if not 0 <= id <= FARTHEST:
                raise DataError(f"A rollout cannot be called {id}: its id is a number from 0 to {FARTHEST}.")
            next_id = max(next_id, id + 1)
            ids.append(id)
            if asked_before(writing, new, id, one):
                continue
            new[id] = one
            events.append(RolloutQueued(id, ordinal, one.sample, one.use, one.limits))
        writing.take(events)
        self._next_id = next_id
        now = time.monotonic()
        for id, one in zip(ids, wanted, strict=True):
            if id in new or id in self._asleep:
                self._asleep.discard(id)
                self._work.wait(id, one.limits, now)
        return ids

    def cancel(self, writing: Writing, rollouts: Sequence[int], why: str) -> None:
        """Nobody wants these any more."""
        states = [rollout_of(writing, id) for id in dict.fromkeys(rollouts)]
        events = [RolloutCancelled(state.id, why) for state in states if state.phase in (Phase.QUEUED, Phase.RUNNING)]
        last = writing.take(events)
        for place, event in enumerate(events):
            id = event.rollout
            self._asleep.discard(id)
            self._work.queue.pop(id, None)
            key = Key(id, len(rollout_of(writing, id).attempts) - 1)
            self._work.leases.pop(key, None)
            self._over.append(key)
            self._ended(last - len(events) + 1 + place, id, Status.CANCELLED)

    def watch(self, writing: Writing, watch: Watch, promise: Promise) -> Any:
        """The ends after a cursor: positions and rollouts, now or as soon as there is one. None if they are older than
        what is kept: they are in the journal."""
        if watch.cursor > (newest := writing.start + len(writing.records)):
            raise UnknownError(f"The journal ends at {newest}, so {watch.cursor} is no cursor of it: begin with 0.")
        if watch.cursor < self._floor:
            return None
        if found := self._ends_after(watch):
            return found
        watch.promise = promise
        self._watches.append(watch)
        return LATER

    # -- who plays them -----------------------------------------------------------------------------------------------

    def sit(self, seat: Claimant, promise: Promise) -> Any:
        """A runner waits for work; it is answered when there is some."""
        self._spoke(seat.runner)
        seat.promise = promise
        self._seats.append(seat)
        return LATER

    def leave(self, writing: Writing, seat: Claimant) -> None:
        """A runner went away while it waited. What it was lent and cannot have heard of is queued again."""
        seat.left = True
        for lent in seat.lent:
            if lent.key in self._work.leases:
                why = f"The runner '{seat.runner}' went away while it was claiming this."
                self._end(writing, lent.key, Outcome.INFRA_ERROR, why, watched=True)

    def ready(self, writing: Writing, key: Key) -> None:
        """An attempt runs now; said again, it is as if it had been said once."""
        if attempt_of(writing, key).status is not Status.RUNNING:
            writing.take([AttemptReady(*key)])
        self._work.heard(key, time.monotonic())

    def heartbeat(
        self, writing: Writing, runner: str, running: Sequence[Key], told: Mapping[str, Any] | None
    ) -> dict[Key, str]:
        """What a runner is to stop, of what it has under way."""
        self._spoke(runner, told)
        now, stop = time.monotonic(), {}
        for key in running:
            lease = self._work.leases.get(key)
            if lease is not None and lease.runner == runner:
                lease.heard = now
            elif lease is not None:
                stop[key] = f"It is being played by the runner '{lease.runner}'."
            else:
                stop[key] = why_over(writing, key)
        return stop

    def finish(self, writing: Writing, key: Key, ended: Ended) -> bool:
        """An attempt is handed in. Whether that is how it ended."""
        attempt = attempt_of(writing, key)
        reward, parts = (None, {}) if ended.reward is None else earned(ended.reward, key)
        rewarded = reward is None or (attempt.reward, attempt.parts) == (reward, parts)
        if attempt.status in LIVE:
            events = [] if rewarded else [Rewarded(*key, reward or 0.0, parts)]
            self._end(writing, key, ended.outcome, ended.error, before=events)
            return True
        words = {"outcome": ended.outcome, "error": ended.error, "reward": reward, "parts": parts}
        if attempt.watched:
            if attempt.late != words:
                writing.take([LateEnd(*key, ended.outcome, ended.error, reward, parts)])
                self._late += 1
            return False
        if (attempt.status, attempt.error) != (Status(ended.outcome), ended.error) or not rewarded:
            raise IllegalMoveError(
                f"Attempt {key.attempt} of rollout {key.rollout} is {attempt.status} (reward {attempt.reward}), as it "
                f"was handed in before, and cannot become {ended.outcome} (reward {reward})."
            )
        return True

    # -- what is shared -----------------------------------------------------------------------------------------------

    def put(self, writing: Writing, name: str, value: Any) -> int:
        """A new version of a resource."""
        newest = writing.state(ResourceState, ResourceState.id_of(name))
        version = 1 if newest is None else newest.version + 1
        put = ResourcePut(name, version, value)
        writing.take([put])
        self.resources[name] = version, put.value
        return version

    def runners(self) -> list[RunnerState]:
        """The runners that spoke lately, and what each has."""
        now = time.monotonic()
        running: dict[str, list[Key]] = {name: [] for name in self._runners}
        for key, lease in self._work.leases.items():
            if lease.runner in running:
                running[lease.runner].append(key)
        return [
            RunnerState(name, tuple(running[name]), now - runner.heard, runner.told)
            for name, runner in sorted(self._runners.items())
        ]

    def statistics(self) -> dict[str, float]:
        """How much stands where."""
        now, waiting = time.monotonic(), self._work.queue
        ended = {str(status): float(self._counts[status]) for status in Status if status in ENDED}
        return {
            "queued": float(len(waiting) + len(self._asleep)),
            "running": float(len(self._work.leases)),
            **ended,
            "retries": float(self._retries),
            "late": float(self._late),
            "oldest_queued_s": now - next(iter(waiting.values())) if waiting else 0.0,
        }

    # -- what time demands --------------------------------------------------------------------------------------------

    def attend(self, writing: Writing, now: float, answer: Callable[[Promise, Any], None]) -> None:
        """End what passed its limits, lend what waits to who waits, and answer those whose wait is over."""
        if (stalled := now - self._attended - TICK_S) > TICK_S:
            self._work.forgive(stalled)  # this process stood still, and nobody was heard
        for due in list(self._work.due(now)):
            self._pass(writing, due)
        self._lend(writing, now, answer)
        self._answer_watches(now, answer)
        for name in [name for name, runner in self._runners.items() if now - runner.heard > REMEMBERED_S]:
            del self._runners[name]
        self._attended = time.monotonic()

    def written(self) -> None:
        """Tell of the attempts that are over by now."""
        if self._over:
            over, self._over = self._over, []
            try:
                if self.tell is not None:
                    self.tell(over)
            except Exception:  # whoever listens may fail, and the desk goes on
                get_log("store").exception("Who listens for the ends of attempts failed.")

    def next_due(self) -> float | None:
        """When to attend again."""
        times = [seat.until for seat in self._seats]
        times += [watch.until for watch in self._watches]
        if (due := self._work.next_due()) is not None:
            times.append(due)
        return min(times, default=None)

    def waiting(self) -> list[Promise]:
        """Who waits for work, or for ends."""
        promises = [*(seat.promise for seat in self._seats), *(watch.promise for watch in self._watches)]
        return [promise for promise in promises if promise is not None]

    def _pass(self, writing: Writing, due: Due) -> None:
        """End what passed a limit."""
        if due.cause == "queue":
            limit = limits_of(rollout_of(writing, due.key.rollout)).queue_timeout_s
            position = writing.take([RolloutExpired(due.key.rollout, f"It waited in the queue for {limit:g} s.")])
            del self._work.queue[due.key.rollout]
            self._ended(position, due.key.rollout, Status.FAILED)
            return
        lease = self._work.leases.get(due.key)
        if lease is None:  # it passed both its limits at once
            return
        if due.cause == "time":
            why = f"It was not done {lease.limits.timeout_s:g} s after it was claimed."
            self._end(writing, due.key, Outcome.TIMED_OUT, why, watched=True)
        else:
            why = f"Its runner '{lease.runner}' said nothing for {lease.limits.unresponsive_s:g} s."
            self._end(writing, due.key, Outcome.UNRESPONSIVE, why, watched=True)

    def _lend(self, writing: Writing, now: float, answer: Callable[[Promise, Any], None]) -> None:
        """Give those that wait longest to those that wait longest."""
        still: deque[Claimant] = deque()
        for seat in self._seats:
            assert seat.promise is not None
            if seat.left or seat.promise.answered or seat.promise.future.done():
                continue
            while self._work.queue and len(seat.lent) < seat.n:
                seat.lent.append(self._lend_next(writing, seat.runner, now))
            if seat.lent or seat.until <= now:
                self._spoke(seat.runner)
                answer(seat.promise, seat.lent)
            else:
                still.append(seat)
        self._seats = still

    def _lend_next(self, writing: Writing, runner: str, now: float) -> Lent:
        id = next(iter(self._work.queue))
        state = rollout_of(writing, id)
        key = Key(id, len(state.attempts))
        writing.take([AttemptStarted(*key, runner, time.time())])
        del self._work.queue[id]
        self._work.lend(key, runner, limits_of(state), now)
        task = writing.state(TaskState, state.task)
        assert task is not None, f"rollout {id} is a try at task {state.task}, which has no state"
        fields = plain(task.fields, "fields")  # a copy, as whoever plays it may change it
        return Lent(key, Task(task.id, fields, task.source), state.use, limits_of(state))

    def _answer_watches(self, now: float, answer: Callable[[Promise, Any], None]) -> None:
        still = []
        for watch in self._watches:
            assert watch.promise is not None
            found = self._ends_after(watch)
            if found or watch.until <= now:
                answer(watch.promise, found)
            elif not (watch.promise.answered or watch.promise.future.done()):
                still.append(watch)
        self._watches = still

    # -- small parts --------------------------------------------------------------------------------------------------

    def _end(
        self,
        writing: Writing,
        key: Key,
        outcome: Outcome,
        error: str,
        *,
        before: Sequence[Event] = (),
        watched: bool = False,
    ) -> None:
        """An attempt is over, and its rollout with it or queued again."""
        state = rollout_of(writing, key.rollout)
        outcomes = [Outcome(attempt.status) for attempt in state.attempts[:-1] if attempt.error != INTERRUPTED]
        retry = outcome in RETRIED and limits_of(state).allow_another([*outcomes, outcome])
        position = writing.take([*before, AttemptEnded(*key, outcome, error, retry, watched, time.time())])
        self._work.leases.pop(key, None)
        self._over.append(key)
        if retry:
            self._retries += 1
            self._work.wait(key.rollout, limits_of(state), time.monotonic())
        else:
            self._ended(position, key.rollout, Status(outcome))

    def _ended(self, position: int, rollout: int, status: Status) -> None:
        self._counts[status] += 1
        self._ends.append((position, rollout))
        if len(self._ends) > KEPT_ENDS:
            self._floor, _ = self._ends.popleft()

    def _ends_after(self, watch: Watch) -> list[tuple[int, int]]:
        if not self._ends or self._ends[-1][0] <= watch.cursor:
            return []
        first = bisect_right(self._ends, (watch.cursor, LAST_ID))
        return [self._ends[place] for place in range(first, min(len(self._ends), first + watch.limit))]

    def _spoke(self, runner: str, told: Mapping[str, Any] | None = None) -> None:
        known = self._runners.setdefault(runner, _Runner(0.0))
        known.heard = time.monotonic()
        if told is not None:
            known.told = told
