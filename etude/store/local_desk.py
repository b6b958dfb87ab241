"""The desk of a journal in this process: what is asked is done by a thread of its own (`clerk`), which writes together
what was asked together, and acknowledges it after the commit.

    desk = LocalDesk(open_store(directory / "journal.sqlite"))
    await desk.put("endpoint", {"base_url": "http://127.0.0.1:8000/v1", "model": "policy"})
    ids = await desk.enqueue([Wanted(Task(0, {"prompt": "2+2?"}))])
    cursor, ended = await desk.wait(0, timeout_s=60)

It may be used from any number of event loops at once, each in a thread of its own: a trainer's and a server's. While a
desk is open, rollouts are moved by it alone; tasks may be admitted and dropped through the journal meanwhile, and
anything may be read. A desk that is opened over a journal with open work takes it up: what was queued is queued, in the
order of ids, and who had an attempt has it still, with time to say so. A run that takes it up says so (`keep`): what
was under way is over, and is nobody's failure; and what was queued waits until it is asked for again, since the run's
weights are not yet those that its rollouts are to be sampled with.

No more is kept in memory than the work that is open. Limits are measured by a clock that nobody sets; and where the
process itself stood still, silence meanwhile is held against no runner.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from etude.errors import DataError, StoreError, UnknownError
from etude.records import Turn
from etude.store.bounds import at_least_one, bounded
from etude.store.clerk import Clerk, Promise
from etude.store.desk import Claim, Desk, Ended, Find, Keeper, Key, Page, Reward, RunnerState, Wanted
from etude.store.events import (
    AttemptEnded,
    Event,
    Noted,
    ResourcePut,
    Rewarded,
    RolloutCancelled,
    RolloutExpired,
    TurnPaid,
    TurnRecorded,
)
from etude.store.journal import Journal, Writing
from etude.store.keys import Keyring
from etude.store.ledger import Ledger
from etude.store.plain import plain
from etude.store.states import RolloutState, TaskState
from etude.store.tenure import KEEPER
from etude.store.waiting import Claimant, Lent, Watch
from etude.store.words import attempt_of, earned, said_before, unsealed

__all__ = ["LocalDesk"]

T = TypeVar("T")

LATE_S = 600.0
"""How long the keys of an attempt are good beyond its time."""
UNLIMITED_S = 30 * 86400.0
"""How long they are where it may take any time."""
ENDS = (AttemptEnded, RolloutCancelled, RolloutExpired)


class LocalDesk(Desk):
    """A desk over a journal, which stays its opener's to close."""

    def __init__(self, journal: Journal, keyring: Keyring | None = None) -> None:
        self._journal, self._keyring = journal, keyring or Keyring()
        self._life: int | None = None
        self._ledger = Ledger(journal)
        self._clerk = Clerk(journal, self._ledger)

    @property
    def journal(self) -> Journal:
        """What is written down."""
        return self._journal

    def tell(self, over: Callable[[Sequence[Key]], None]) -> None:
        """Have this called with attempts that are over, soon after each is: on a thread of the desk's, so it must not
        wait."""
        self._ledger.tell = over

    @property
    def keyring(self) -> Keyring:
        """What makes and reads the keys of its attempts."""
        return self._keyring

    # -- who wants rollouts -------------------------------------------------------------------------------------------

    async def keep(self, keeper: Keeper, life: int | None = None, lease_s: float | None = None) -> int:
        """A run takes the desk up, or says that it is still there."""
        lease_s = None if lease_s is None else bounded(lease_s, "lease_s")
        return await self._ask(lambda writing, _: self._ledger.keep(writing, keeper, life, lease_s))

    async def give_over(self) -> None:
        """The run that keeps this desk has moved: it may be taken up in another place, and not in this one."""
        await self._ask(lambda writing, _: self._ledger.give_over(writing))

    def in_life(self, life: int) -> LocalDesk:
        """This desk, at which each word counts only while this is the life of its keeper."""
        made = copy(self)
        made._life = life
        return made

    async def enqueue(self, wanted: Sequence[Wanted]) -> list[int]:
        """Queue rollouts, all or none; their ids."""
        wanted = tuple(wanted)
        return await self._ask(lambda writing, _: self._ledger.enqueue(writing, wanted))

    async def cancel(self, rollouts: Sequence[int], why: str) -> None:
        """Nobody wants these any more."""
        rollouts = tuple(rollouts)
        await self._ask(lambda writing, _: self._ledger.cancel(writing, rollouts, why))

    async def seal(self, rollouts: Sequence[int]) -> list[RolloutState]:
        """These are about to be read, and earn nothing more."""
        rollouts = tuple(rollouts)
        return await self._ask(lambda writing, _: self._ledger.seal(writing, rollouts))

    async def wait(self, cursor: int, timeout_s: float, limit: int = 256) -> tuple[int, list[RolloutState]]:
        """Rollouts that came to their end after `cursor`, and the next cursor."""
        until = time.monotonic() + bounded(timeout_s, "timeout_s")
        while True:
            watch = Watch(cursor, at_least_one(limit, "limit"), until)
            ends = await self._ask(partial(self._watch, watch))
            if ends is None:
                cursor, ends = await asyncio.to_thread(self._ends_read, cursor, limit)
                if not ends:
                    continue
            if not ends:
                return cursor, []
            ids = [id for _, id in ends]
            states = await asyncio.to_thread(self._journal.some, RolloutState, ids)
            return ends[-1][0], [states[id] for id in ids]

    async def find(self, what: Find) -> Page:
        """The rollouts that were asked for."""
        at_least_one(what.limit, "limit")
        return await asyncio.to_thread(self._found, what)

    async def turns(self, rollout: int, attempt: int | None = None) -> list[Turn]:
        """The turns of an attempt in order, each with what it was paid."""
        return await asyncio.to_thread(self._turns_read, rollout, attempt)

    async def history(self, rollout: int) -> list[Event]:
        """All that happened to a rollout, in order."""
        return await asyncio.to_thread(self._all_read, rollout)

    async def events(self, rollout: int, attempt: int | None = None) -> list[dict[str, Any]]:
        """What was noted during an attempt."""
        return await asyncio.to_thread(self._notes_read, rollout, attempt)

    # -- who plays them -----------------------------------------------------------------------------------------------

    async def claim(self, runner: str, n: int, wait_s: float) -> list[Claim]:
        """Up to `n` rollouts that waited longest."""
        if not runner:
            raise DataError("A runner that claims rollouts needs a name, by which it is told apart from others.")
        seat = Claimant(runner, at_least_one(n, "n"), time.monotonic() + bounded(wait_s, "wait_s"))
        try:
            lent = await self._ask(lambda _, promise: self._ledger.sit(seat, promise))
        except asyncio.CancelledError:
            with suppress(StoreError):  # it was closed meanwhile, and lends nothing any more
                self._clerk.post(lambda writing, _: self._ledger.leave(writing, seat))
            raise
        return [self._claim(each) for each in lent]

    async def ready(self, key: Key) -> None:
        """An attempt that was prepared runs now."""
        await self._ask(lambda writing, _: self._ledger.ready(writing, key))

    async def heartbeat(
        self, runner: str, running: Sequence[Key], told: Mapping[str, Any] | None = None
    ) -> dict[Key, str]:
        """A runner is alive; returns what it is to stop, and why."""
        running = tuple(running)
        return await self._ask(lambda writing, _: self._ledger.heartbeat(writing, runner, running, told))

    async def finish(self, key: Key, ended: Ended) -> bool:
        """An attempt is over. False if it was over before by somebody else's word."""
        return await self._ask(lambda writing, _: self._ledger.finish(writing, key, ended))

    # -- what is written of an attempt that runs ----------------------------------------------------------------------

    async def turn(self, key: Key, turn: Turn) -> int:
        """Write down one call to the model; its index."""

        def record(writing: Writing, _: object) -> int:
            index = attempt_of(writing, key).turns
            placed = turn if turn.index == index else replace(turn, index=index)
            writing.take([TurnRecorded(*key, placed, time.time())])
            return index

        if turn.reward is not None:
            raise DataError(
                f"A turn of rollout {key.rollout} came with a reward of its own. Record the turn, and then reward it "
                "by its index."
            )
        return await self._ask(record)

    async def reward(self, key: Key, reward: Reward, turn: int | None = None) -> None:
        """What an attempt earned in all, said once; or one of its turns, which adds up."""
        value, parts = earned(reward, key, turn)
        event = Rewarded(*key, value, parts) if turn is None else TurnPaid(*key, turn, value, parts)
        await self._ask(lambda writing, _: self._of_attempt(writing, key, event))

    async def note(self, key: Key, name: str, data: Any) -> None:
        """An event, or a span, that somebody will want to look at."""
        # made on the clerk's thread, as it copies what may be long
        await self._ask(lambda writing, _: self._of_attempt(writing, key, Noted(*key, name, data)))

    # -- what is shared -----------------------------------------------------------------------------------------------

    async def put(self, name: str, value: Any) -> int:
        """A new version of a resource. Returns its number, from 1."""
        return await self._ask(lambda writing, _: self._ledger.put(writing, name, value))

    async def resource(self, name: str, version: int | None = None) -> tuple[int, Any]:
        """A resource and its version, by default the newest."""
        if name not in self._ledger.resources:
            known = ", ".join(sorted(self._ledger.resources)) or "none"
            raise UnknownError(f"There is no resource '{name}'; there are: {known}.")
        newest, value = self._ledger.resources[name]
        if version is not None and version != newest:
            value = await asyncio.to_thread(self._resource_read, name, version, newest)
        return version or newest, plain(value, "value")

    async def runners(self) -> list[RunnerState]:
        """The runners that spoke within the last minutes."""
        return await self._ask(lambda _writing, _: self._ledger.runners())

    async def statistics(self) -> dict[str, float]:
        """How many rollouts stand where, retries, late results, and the age of the oldest one queued."""
        return await self._ask(lambda _writing, _: self._ledger.statistics())

    async def close(self) -> None:
        """Write what was asked, stop watching, and let go of the journal."""
        if self._life is None:
            await self._clerk.close()

    # -- small parts --------------------------------------------------------------------------------------------------

    async def _ask(self, do: Callable[[Writing, Promise], T]) -> T:
        """Have this done by the clerk, if the life in which it is said is not over."""
        if self._life is None:
            return await self._clerk.ask(do)
        return await self._clerk.ask(partial(self._in_time, self._life, do))

    def _in_time(self, life: int, do: Callable[[Writing, Promise], T], writing: Writing, promise: Promise) -> T:
        self._ledger.tenure.check(life)
        return do(writing, promise)

    def _watch(self, watch: Watch, writing: Writing, promise: Promise) -> Any:
        return self._ledger.watch(writing, watch, promise)

    def _claim(self, lent: Lent) -> Claim:
        lasts = UNLIMITED_S if lent.limits.timeout_s is None else lent.limits.timeout_s + LATE_S
        return Claim(
            key=lent.key,
            task=lent.task,
            use=lent.use,
            limits=lent.limits,
            resources={
                name: plain(value, "value")
                for name, (_, value) in list(self._ledger.resources.items())
                if name != KEEPER
            },
            model_key=self._keyring.model_key(lent.key, lasts),
            reward_key=self._keyring.reward_key(lent.key, lasts),
        )

    def _of_attempt(self, writing: Writing, key: Key, event: Rewarded | TurnPaid | Noted) -> None:
        attempt = attempt_of(writing, key)
        if not (isinstance(event, Rewarded) and said_before(attempt, event)):
            if not isinstance(event, Noted):
                unsealed(writing, key)
            writing.take([event])

    # -- reading, in threads that may wait for the disk ---------------------------------------------------------------

    def _ends_read(self, cursor: int, limit: int) -> tuple[int, list[tuple[int, int]]]:
        """The first ends after a cursor as the journal has them; the newest position, if there are none."""
        newest = self._journal.position
        ends = (
            (at, event.rollout)
            for at, event in self._journal.read(cursor, kinds=ENDS)
            if isinstance(event, ENDS) and not (isinstance(event, AttemptEnded) and event.retry)
        )
        return newest, list(islice(ends, limit))

    def _found(self, what: Find) -> Page:
        fits = (state for state in self._candidates(what) if _fits(state, what))
        found = tuple(islice(fits, what.limit + 1))
        return Page(found[: what.limit], len(found) > what.limit)

    def _candidates(self, what: Find) -> Iterator[RolloutState]:
        """Those that may fit, in the order asked for, behind `after`."""
        backwards = what.sort == "-id"
        if not what.ids and not what.tasks:
            yield from self._journal.listed(RolloutState, what.after, backwards=backwards)
            return
        ids = set(what.ids)
        if what.tasks:
            tasks = self._journal.some(TaskState, what.tasks).values()
            tried = {rollout for task in tasks for rollout in task.rollouts}
            ids = ids & tried if what.ids else tried
        states = self._journal.some(RolloutState, list(ids))
        for id in sorted(states, reverse=backwards):
            if what.after is None or (id < what.after if backwards else id > what.after):
                yield states[id]

    def _turns_read(self, rollout: int, attempt: int | None) -> list[Turn]:
        self._check(rollout, attempt)
        return self._journal.turns(rollout, attempt)

    def _all_read(self, rollout: int) -> list[Event]:
        self._check(rollout, None)
        return [event for _, event in self._journal.read(rollout=rollout)]

    def _notes_read(self, rollout: int, attempt: int | None) -> list[dict[str, Any]]:
        newest = self._check(rollout, attempt)
        wanted = newest if attempt is None else attempt
        notes = (event for _, event in self._journal.read(kinds=(Noted,), rollout=rollout))
        return [
            {"name": event.name, "data": event.data, "attempt": event.attempt}
            for event in notes
            if isinstance(event, Noted) and event.attempt == wanted
        ]

    def _check(self, rollout: int, attempt: int | None) -> int:
        """That there is such an attempt; the number of the newest one."""
        attempts = len(self._journal.rollout(rollout).attempts)
        if attempt is not None and not 0 <= attempt < attempts:
            raise UnknownError(f"Rollout {rollout} has {attempts} attempts, and no attempt {attempt}.")
        return attempts - 1

    def _resource_read(self, name: str, version: int, newest: int) -> Any:
        for _, event in self._journal.read(kinds=(ResourcePut,)):
            if isinstance(event, ResourcePut) and (event.name, event.version) == (name, version):
                return event.value
        raise UnknownError(f"The resource '{name}' has the versions 1 to {newest}, and no version {version}.")


def _fits(state: RolloutState, what: Find) -> bool:
    statuses = not what.statuses or state.status in what.statuses
    return statuses and (what.use is None or state.use == what.use)
