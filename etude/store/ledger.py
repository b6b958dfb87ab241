"""What every verb of a desk comes to: which events are written, and what is kept at hand of the work that is open.

All of it is called by one thread (`clerk`), inside a round: a verb first has its events taken, which refuses what is
illegal, and then changes what is kept. Where the round cannot be written, everything kept is made anew from the
journal, of which it is never more than a part: what waits, what runs, and the last ends.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from etude.errors import DataError, IllegalMoveError, UnknownError
from etude.observe import get_log
from etude.records import Outcome, Task
from etude.store.clerk import LATER, TICK_S, Promise
from etude.store.desk import Ended, Keeper, Key, RunnerState, Wanted
from etude.store.events import (
    AttemptEnded,
    AttemptReady,
    AttemptStarted,
    Event,
    LateEnd,
    ResourcePut,
    Rewarded,
    RolloutAsked,
    RolloutCancelled,
    RolloutExpired,
    RolloutQueued,
    RolloutSealed,
)
from etude.store.journal import Journal, Writing
from etude.store.limits import RETRIED, Limits
from etude.store.open_work import Due, OpenWork
from etude.store.plain import plain
from etude.store.states import LIVE, Phase, ResourceState, RolloutState, Status, TaskState
from etude.store.tenure import KEEPER, Tenure
from etude.store.waiting import Claimant, Ends, Lent, Runners, Watch
from etude.store.words import (
    asked_before,
    attempt_of,
    earned,
    issue,
    limits_of,
    other_words,
    reason,
    retries_of,
    rollout_of,
    same_task,
    why_over,
)

__all__ = ["INTERRUPTED", "Ledger"]

INTERRUPTED = "The run was stopped while this was under way."
"""The error of an attempt that a stop of its run ended; it says nothing of the rollout and is not held against it,
however often."""

FARTHEST = 2**62
"""The largest id that may be given, beyond which there is room for others."""

ENDED = frozenset(Status) - LIVE - {Status.QUEUED}


class Ledger:
    """The verbs, and what they keep."""

    def __init__(self, journal: Journal) -> None:
        self._journal, self.tenure = journal, Tenure()
        self.resources: dict[str, tuple[int, Any]] = {}
        """The newest version of each, and its number. It is read by other threads, and nobody changes a value."""
        self._seats: deque[Claimant] = deque()
        self._watches: list[Watch] = []
        self._runners = Runners(self._say)
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
        self.tenure.stand(self._journal.resource(KEEPER), now)
        self._work = OpenWork()
        self._counts: Counter[Status] = Counter()
        self._late = self._retries = 0
        self._next_id = 0
        for state in self._journal.listed(RolloutState):
            self._next_id = state.id + 1
            self._late += sum(attempt.late is not None for attempt in state.attempts)
            self._retries += retries_of(state)
            if state.status is Status.QUEUED and self.tenure.life not in (0, state.life):
                self._work.asleep.add(state.id)
            elif state.status is Status.QUEUED:
                self._work.wait(state.id, state.limits or Limits(), now)
            elif state.status in ENDED:
                self._counts[state.status] += 1
            elif state.status is Status.RUNNING and state.attempts[-1].runner:  # else whoever queued it plays it
                key = Key(state.id, len(state.attempts) - 1)
                self._work.lend(key, state.attempts[-1].runner, state.limits or Limits(), now)
        self._ends = Ends(self._journal.position)

    # -- who wants rollouts -------------------------------------------------------------------------------------------

    def keep(self, writing: Writing, keeper: Keeper, life: int | None, lease_s: float | None) -> int:
        """A run takes the desk up, or says that it is still there."""
        now = time.monotonic()
        if life is None:
            told = self.tenure.begun(keeper, lease_s, now, empty=self._next_id == 0)
            self._next_life(writing, told)
            self._say("The run in %s is here; this is its life %d.", keeper.where, self.tenure.life)
        else:
            self.tenure.check(life)
            if lease_s == 0:
                self._say("The run in %s has left; nothing is lent until it is back.", keeper.where)
            self.tenure.renew(lease_s, now)
            held, self._work.held = self._work.held, []
            for id in held:
                self._work.wait(id, limits_of(rollout_of(writing, id)), now)
        return self.tenure.life

    def _say(self, told: str, *words: object) -> None:
        """Tell of who comes and goes, where that is a store's whole business; a run that keeps its own has more."""
        own = self.tenure.life > 0 and not self.tenure.renewed
        get_log("store").log(logging.DEBUG if own else logging.INFO, told, *words)

    def give_over(self, writing: Writing) -> None:
        """The run that keeps the desk has moved: it may be taken up in another place."""
        if (told := self.tenure.given_over()) is not None:
            self._next_life(writing, told)

    def _next_life(self, writing: Writing, told: dict[str, Any]) -> None:
        """What was under way in the life before is over, and what waits waits until it is asked for again."""
        keys, at = list(self._work.leases), time.time()
        broken = Outcome.INFRA_ERROR
        writing.take([AttemptEnded(*key, broken, INTERRUPTED, retry=True, watched=True, at=at) for key in keys])
        self._put(writing, KEEPER, told)
        self._retries += len(keys)
        self._over += keys
        self._work.sleep()

    def enqueue(self, writing: Writing, wanted: Sequence[Wanted]) -> list[int]:
        """Queue these, all or none."""
        events: list[Event] = []
        tasks: dict[int, Task] = {}
        new: dict[int, Wanted] = {}
        woken: set[int] = set()
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
                if id in self._work.asleep and id not in woken:
                    woken.add(id)
                    events.append(RolloutAsked(id, self.tenure.life))
                continue
            new[id] = one
            events.append(RolloutQueued(id, ordinal, one.sample, one.use, one.limits, self.tenure.life))
        writing.take(events)
        self._next_id = next_id
        now = time.monotonic()
        for id, one in zip(ids, wanted, strict=True):
            if id in new or id in woken:
                self._work.wait(id, one.limits, now)
        return ids

    def cancel(self, writing: Writing, rollouts: Sequence[int], why: str) -> None:
        """Nobody wants these any more."""
        why = reason(why)
        states = [rollout_of(writing, id) for id in dict.fromkeys(rollouts)]
        events = [RolloutCancelled(state.id, why) for state in states if state.phase in (Phase.QUEUED, Phase.RUNNING)]
        last = writing.take(events)
        for place, event in enumerate(events):
            id = event.rollout
            self._work.leave(id)
            key = Key(id, len(rollout_of(writing, id).attempts) - 1)
            self._work.leases.pop(key, None)
            self._over.append(key)
            self._ended(last - len(events) + 1 + place, id, Status.CANCELLED)

    def seal(self, writing: Writing, rollouts: Sequence[int]) -> list[RolloutState]:
        """These are about to be read, and earn nothing more."""
        states = [rollout_of(writing, id) for id in dict.fromkeys(rollouts)]
        writing.take([RolloutSealed(each.id) for each in states if not each.sealed and each.settled is None])
        return [rollout_of(writing, id) for id in rollouts]

    def watch(self, writing: Writing, watch: Watch, promise: Promise) -> Any:
        """The ends after a cursor: positions and rollouts, now or as soon as there is one. None if they are older than
        what is kept: they are in the journal."""
        if watch.cursor > (newest := writing.start + len(writing.records)):
            raise UnknownError(f"The journal ends at {newest}, so {watch.cursor} is no cursor of it: begin with 0.")
        if watch.cursor < self._ends.floor:
            return None
        if found := self._ends.after(watch):
            return found
        watch.promise = promise
        self._watches.append(watch)
        return LATER

    # -- who plays them -----------------------------------------------------------------------------------------------

    def sit(self, seat: Claimant, promise: Promise) -> Any:
        """A runner waits for work; it is answered when there is some."""
        self._runners.spoke(seat.runner)
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
        self._runners.spoke(runner, told)
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
        if name == KEEPER:
            raise DataError(f"The resource '{KEEPER}' says who keeps the desk, and is not for others to put.")
        return self._put(writing, name, value)

    def _put(self, writing: Writing, name: str, value: Any) -> int:
        newest = writing.state(ResourceState, ResourceState.id_of(name))
        version = 1 if newest is None else newest.version + 1
        put = ResourcePut(name, version, value)
        writing.take([put])
        self.resources[name] = version, put.value
        return version

    def runners(self) -> list[RunnerState]:
        """The runners that spoke lately, and what each has."""
        has = ((lease.runner, key) for key, lease in self._work.leases.items())
        return self._runners.states(has, time.monotonic())

    def statistics(self) -> dict[str, float]:
        """How much stands where."""
        now, waiting = time.monotonic(), self._work.queue
        ended = {str(status): float(self._counts[status]) for status in Status if status in ENDED}
        return {
            "queued": float(len(waiting) + len(self._work.asleep) + len(self._work.held)),
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
            self.tenure.forgive(stalled, self._attended)
        if self._work.leases and not self.tenure.lasts(now):
            get_log("store").warning("Nobody has heard of the run: %d attempts are stopped.", len(self._work.leases))
            for key in list(self._work.leases):
                self._end(writing, key, Outcome.INFRA_ERROR, INTERRUPTED, watched=True)
        for due in list(self._work.due(now)):
            self._pass(writing, due)
        self._lend(writing, now, answer)
        self._answer_watches(now, answer)
        self._runners.forget(now)
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
            limits = limits_of(rollout_of(writing, due.key.rollout))
            if not self.tenure.lends(now := time.monotonic()):  # while nothing is lent, nothing waits in vain
                self._work.wait(due.key.rollout, limits, now)
                return
            why = f"It waited in the queue for {limits.queue_timeout_s:g} s."
            position = writing.take([RolloutExpired(due.key.rollout, why)])
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
        lends = self.tenure.lends(now)
        for seat in self._seats:
            assert seat.promise is not None
            if seat.left or seat.promise.answered or seat.promise.future.done():
                continue
            while lends and self._work.queue and len(seat.lent) < seat.n:
                seat.lent.append(self._lend_next(writing, seat.runner, now))
            if seat.lent or seat.until <= now:
                self._runners.spoke(seat.runner)
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
            found = self._ends.after(watch)
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
        limits, cut = limits_of(state), error == INTERRUPTED
        outcomes = [Outcome(attempt.status) for attempt in state.attempts[:-1] if attempt.error != INTERRUPTED]
        retry = cut or (outcome in RETRIED and limits.allow_another([*outcomes, outcome]))
        position = writing.take([*before, AttemptEnded(*key, outcome, error, retry, watched, time.time())])
        self._work.leases.pop(key, None)
        self._over.append(key)
        if retry:
            self._retries += 1
            if outcome is Outcome.INFRA_ERROR and not cut and self.tenure.renewed:
                self._work.held.append(key.rollout)
            else:
                self._work.wait(key.rollout, limits, time.monotonic())
        else:
            self._ended(position, key.rollout, Status(outcome))

    def _ended(self, position: int, rollout: int, status: Status) -> None:
        self._counts[status] += 1
        self._ends.add(position, rollout)
