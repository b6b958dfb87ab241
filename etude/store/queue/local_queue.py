"""A rollout queue over a journal in this process.

    queue = LocalRolloutQueue(open_store(directory / "journal.sqlite"))
    await queue.put_resource("endpoint", {"base_url": "http://127.0.0.1:8000/v1", "model": "policy"})
    ids = await queue.enqueue([RolloutRequest(Task(0, {"prompt": "2+2?"}))])
    cursor, ended = await queue.wait(0, timeout_s=60)

A writer thread (`writer_thread`) executes the calls. It writes concurrent calls in one transaction and acknowledges
each after the commit.

Any number of event loops may use the queue at once, each in its own thread: the trainer's and the server's. While the
queue is open, it alone moves rollouts. Tasks may be admitted and dropped through the journal meanwhile, and anything
may be read.

A queue that is opened over a journal with open work resumes it. Queued rollouts stay queued, in the order of ids.
Runners keep their leases, with time to send a heartbeat.

A run that takes the queue over calls `acquire_lease`. Attempts under way then end, and are retried without being
counted. Queued rollouts are suspended until the run enqueues them again: they must be sampled with weights that the run
has yet to load.

Memory holds only the open work. Limits are measured in the running time of this process: while it is stopped, no limit
passes, and no runner counts as silent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from copy import copy
from dataclasses import replace
from functools import lru_cache, partial
from itertools import islice
from typing import Any, TypeVar

from etude.errors import DataError, EtudeError, NotFoundError, StoreError
from etude.images import ImageRef
from etude.records import Turn
from etude.running_time import running_time
from etude.store.journal.events import (
    AttemptEnded,
    AttemptRewarded,
    Event,
    NoteRecorded,
    ResourcePut,
    RolloutCancelled,
    RolloutExpired,
    TurnRecorded,
    TurnRewarded,
)
from etude.store.journal.journal import Journal, Transaction
from etude.store.journal.json_values import json_size, to_json_value
from etude.store.journal.states import RolloutState, TaskState
from etude.store.queue.bounds import check_count, check_seconds
from etude.store.queue.checks import check_unsealed, get_attempt, is_same_reward, parse_reward
from etude.store.queue.keys import Keyring
from etude.store.queue.owner_lease import OWNER_RESOURCE
from etude.store.queue.queue_state import QueueState
from etude.store.queue.records import (
    OWN_RUNNER,
    AttemptEnd,
    AttemptId,
    AttemptReport,
    Claim,
    Ended,
    LeasedAttempt,
    QueueOwner,
    Resource,
    Reward,
    RolloutPage,
    RolloutQuery,
    RolloutRequest,
    RunnerState,
    StopOrder,
)
from etude.store.queue.rollout_queue import RolloutQueue
from etude.store.queue.stored_images import store_images
from etude.store.queue.waiters import RUNNER_INFO, PendingClaim, PendingWait
from etude.store.queue.writer_thread import PendingResult, WriterThread

T = TypeVar("T")

KEY_GRACE_S = 600.0
"""Seconds that the keys of an attempt stay valid beyond its time limit."""
UNLIMITED_S = 30 * 86400.0
"""Seconds that the keys are valid where the attempt has no time limit."""
KEPT_VERSIONS = 64
"""Older versions of resources that stay in memory, for rollouts that get them."""
ENDS = (AttemptEnded, RolloutCancelled, RolloutExpired)
LOCAL_OWNER = QueueOwner("this run", "here")
"""The owner of a queue over a run's own journal, in any directory. File permissions decide who may write to it."""


@contextmanager
def open_own_queue(journal: Journal, keyring: Keyring | None = None) -> Iterator[LocalRolloutQueue]:
    """Open the queue of a run's own journal, until the end of the block. Attempts that a stop of the run cut off are
    over then, and its queued rollouts wait until the run enqueues them again."""
    queue = LocalRolloutQueue(journal, keyring)
    try:
        asyncio.run(queue.acquire_lease(LOCAL_OWNER))
        yield queue
    finally:
        asyncio.run(queue.close())


class LocalRolloutQueue(RolloutQueue):
    """A rollout queue over a journal. The caller that opened the journal closes it."""

    def __init__(self, journal: Journal, keyring: Keyring | None = None) -> None:
        self.journal = journal
        self.keyring = keyring or Keyring()
        self._epoch: int | None = None
        self._state = QueueState(journal)
        self._writer = WriterThread(journal, self._state)
        self._read_resource = lru_cache(KEPT_VERSIONS)(self._find_resource)

    def on_attempts_ended(self, callback: Callable[[Sequence[AttemptId]], None]) -> None:
        """Call `callback` with attempts soon after they end. It runs on the writer thread, so it must not block."""
        self._state.on_attempts_ended = callback

    # -- for the trainer ----------------------------------------------------------------------------------------------

    async def acquire_lease(self, owner: QueueOwner, epoch: int | None = None, lease_s: float | None = None) -> int:
        lease_s = None if lease_s is None else check_seconds(lease_s, "lease_s")
        return await self._call(lambda txn, _: self._state.acquire_lease(txn, owner, epoch, lease_s))

    async def release_owner(self) -> None:
        """Let the run that owns this queue take it over from another directory, and no longer from its present one."""
        await self._call(lambda txn, _: self._state.release_owner(txn))

    def with_epoch(self, epoch: int) -> LocalRolloutQueue:
        queue = copy(self)
        queue._epoch = epoch
        return queue

    async def enqueue(self, wanted: Sequence[RolloutRequest]) -> list[int]:
        copied = tuple(wanted)  # the writer thread reads it, perhaps after the caller was cancelled
        return await self._call(lambda txn, _: self._state.enqueue(txn, copied))

    async def cancel(self, rollouts: Sequence[int], why: str) -> None:
        copied = tuple(rollouts)
        await self._call(lambda txn, _: self._state.cancel(txn, copied, why))

    async def seal(self, rollouts: Sequence[int]) -> list[RolloutState]:
        copied = tuple(rollouts)
        return await self._call(lambda txn, _: self._state.seal(txn, copied))

    async def wait(self, cursor: int = 0, timeout_s: float = 0.0, limit: int = 256) -> Ended:
        until = running_time() + check_seconds(timeout_s, "timeout_s")
        while True:
            pending = PendingWait(cursor, check_count(limit, "limit"), until)
            ends = await self._call(partial(self._state.add_wait, pending))
            if ends is None:
                cursor, ends = await asyncio.to_thread(self._read_ends, cursor, limit)
                if not ends:
                    continue
            if not ends:
                return Ended(cursor, [])
            ids = [id for _, id in ends]
            states = await asyncio.to_thread(self.journal.load_states, RolloutState, ids)
            return Ended(ends[-1][0], [states[id] for id in ids])

    async def find(self, query: RolloutQuery) -> RolloutPage:
        check_count(query.limit, "limit")
        return await asyncio.to_thread(self._read_page, query)

    async def turns(self, rollout: int, attempt: int | None = None) -> list[Turn]:
        return await asyncio.to_thread(self._read_turns, rollout, attempt)

    async def history(self, rollout: int) -> list[Event]:
        return await asyncio.to_thread(self._read_history, rollout)

    async def notes(self, rollout: int, attempt: int | None = None) -> list[dict[str, Any]]:
        return await asyncio.to_thread(self._read_notes, rollout, attempt)

    # -- for runners --------------------------------------------------------------------------------------------------

    async def claim(self, runner: str, n: int = 1, wait_s: float = 0.0) -> list[Claim]:
        if not runner:
            raise DataError("A runner that claims rollouts needs a name. Give each runner a separate name.")
        async with self._leases(runner, n, wait_s) as leased:
            return [await self._claim(attempt) for attempt in leased]

    async def claim_own(self, n: int, wait_s: float) -> list[LeasedAttempt]:
        """Claim up to `n` rollouts for the run's own runner, as `claim` does for others."""
        async with self._leases(OWN_RUNNER, n, wait_s) as leased:
            return leased

    async def finish_own(self, ends: Sequence[AttemptEnd]) -> list[RolloutState | EtudeError]:
        """Record the ends of attempts by the run's own runner.

        Return the state of each rollout then: one that is queued will be attempted again. An end that is refused is its
        error, and affects no other. If the write fails, its error is raised.
        """
        copied = tuple(ends)
        return await self._call(lambda txn, _: self._state.ends.finish_own(txn, copied))

    async def ready(self, attempt: AttemptId) -> None:
        await self._call(lambda txn, _: self._state.ready(txn, attempt))

    async def heartbeat(
        self, runner: str, running: Sequence[AttemptId], info: Mapping[str, Any] | None = None
    ) -> list[StopOrder]:
        if info is not None:
            json_size(info, "The runner's `info`", *RUNNER_INFO)
        copied = tuple(running)
        return await self._call(lambda txn, _: self._state.heartbeat(txn, runner, copied, info))

    async def finish(self, attempt: AttemptId, report: AttemptReport) -> bool:
        return await self._call(lambda txn, _: self._state.ends.finish(txn, attempt, report))

    # -- records of a running attempt ---------------------------------------------------------------------------------

    async def record_turn(self, attempt: AttemptId, turn: Turn, began: float = 0.0) -> int:

        def record(txn: Transaction, _: object) -> int:
            index = get_attempt(txn, attempt).turns
            numbered = turn if turn.index == index else replace(turn, index=index)
            txn.append([TurnRecorded(*attempt, numbered, time.time(), began)])
            return index

        if turn.reward is not None:
            raise DataError(
                f"A turn of rollout {attempt.rollout} already carries a reward. Record the turn without one, then "
                "record its reward by its index."
            )
        return await self._call(record)

    async def record_reward(self, attempt: AttemptId, reward: Reward, turn: int | None = None) -> None:
        value, parts = parse_reward(reward, attempt, turn)
        event = AttemptRewarded(*attempt, value, parts) if turn is None else TurnRewarded(*attempt, turn, value, parts)
        await self._call(lambda txn, _: self._record(txn, attempt, event))

    async def record_note(self, attempt: AttemptId, name: str, data: Any = None) -> None:
        # the event is made on the writer thread, since it copies data that may be long
        await self._call(lambda txn, _: self._record(txn, attempt, NoteRecorded(*attempt, name, data)))

    # -- images -------------------------------------------------------------------------------------------------------

    async def put_images(self, contents: Sequence[bytes]) -> list[ImageRef]:
        return await asyncio.to_thread(store_images, self.journal, tuple(contents))

    async def get_images(self, digests: Sequence[str]) -> dict[str, bytes]:
        found = await asyncio.to_thread(self.journal.images, tuple(digests))
        return {digest: image.content for digest, image in found.items()}

    # -- resources and statistics -------------------------------------------------------------------------------------

    async def put_resource(self, name: str, value: Any) -> int:
        return await self._call(lambda txn, _: self._state.put_resource(txn, name, value))

    async def get_resource(self, name: str, version: int | None = None) -> Resource:
        if name not in self._state.resources:
            known = ", ".join(sorted(self._state.resources)) or "none"
            raise NotFoundError(f"There is no resource '{name}'. The store has: {known}.")
        newest, value = self._state.resources[name]
        if version is not None and version != newest:
            value = await asyncio.to_thread(self._read_resource, name, version)
        return Resource(version or newest, to_json_value(value, "value"))

    async def runners(self) -> list[RunnerState]:
        return await self._call(lambda _txn, _: self._state.runners())

    async def statistics(self) -> dict[str, float]:
        return await self._call(lambda _txn, _: self._state.statistics())

    async def close(self) -> None:
        """Write the pending calls and stop the writer thread. A queue bound to an epoch closes nothing."""
        if self._epoch is None:
            await self._writer.close()

    # -- helpers ------------------------------------------------------------------------------------------------------

    async def _call(self, operation: Callable[[Transaction, PendingResult], T]) -> T:
        """Execute an operation on the writer thread, unless this queue's epoch is over."""

        def execute(txn: Transaction, promise: PendingResult) -> T:
            if self._epoch is not None:
                self._state.owner_lease.check(self._epoch)
            return operation(txn, promise)

        return await self._writer.call(execute)

    @asynccontextmanager
    async def _leases(self, runner: str, n: int, wait_s: float) -> AsyncIterator[list[LeasedAttempt]]:
        """Claim rollouts. If the block fails or is cancelled, no runner has them, and they are queued again."""
        pending = PendingClaim(runner, check_count(n, "n"), running_time() + check_seconds(wait_s, "wait_s"))
        try:
            yield await self._call(partial(self._state.add_claim, pending))
        except BaseException:
            with suppress(StoreError):  # the queue was closed meanwhile, and assigns no more rollouts
                self._writer.submit(lambda txn, _: self._state.cancel_claim(txn, pending))
            raise

    async def _claim(self, leased: LeasedAttempt) -> Claim:
        expires_s = UNLIMITED_S if leased.limits.timeout_s is None else leased.limits.timeout_s + KEY_GRACE_S
        newest = {name: held[1] for name, held in self._state.resources.items() if name != OWNER_RESOURCE}
        named = {name: (await self.get_resource(name, leased.resources[name])).value for name in leased.resources}
        return Claim(
            attempt_id=leased.attempt_id,
            task=leased.task,
            use=leased.use,
            limits=leased.limits,
            resources={name: to_json_value(value, "value") for name, value in (newest | named).items()},
            model_key=self.keyring.model_key(leased.attempt_id, expires_s),
            reward_key=self.keyring.reward_key(leased.attempt_id, expires_s),
        )

    def _record(self, txn: Transaction, key: AttemptId, event: AttemptRewarded | TurnRewarded | NoteRecorded) -> None:
        attempt = get_attempt(txn, key)
        if not (isinstance(event, AttemptRewarded) and is_same_reward(attempt, event)):
            if not isinstance(event, NoteRecorded):
                check_unsealed(txn, key)
            txn.append([event])

    # -- reads, in threads that may block on the disk -----------------------------------------------------------------

    def _read_ends(self, cursor: int, limit: int) -> tuple[int, list[tuple[int, int]]]:
        """Return the newest position, and the first ends after a cursor as pairs of position and rollout, from the
        journal."""
        newest = self.journal.position
        ends = (
            (position, event.rollout)
            for position, event in self.journal.read(cursor, kinds=ENDS)
            if isinstance(event, ENDS) and not (isinstance(event, AttemptEnded) and event.retry)
        )
        return newest, list(islice(ends, limit))

    def _read_page(self, query: RolloutQuery) -> RolloutPage:
        matching = (
            state
            for state in self._candidates(query)
            if (not query.statuses or state.status in query.statuses) and query.use in (None, state.use)
        )
        page = tuple(islice(matching, query.limit + 1))
        return RolloutPage(page[: query.limit], len(page) > query.limit)

    def _candidates(self, query: RolloutQuery) -> Iterator[RolloutState]:
        """Yield the rollouts that may match, behind `after`, in the order of the query."""
        backwards = query.sort == "-id"
        if not query.ids and not query.tasks:
            yield from self.journal.iter_states(RolloutState, query.after, backwards=backwards, use=query.use)
            return
        ids = set(query.ids)
        if query.tasks:
            tasks = self.journal.load_states(TaskState, query.tasks).values()
            of_tasks = {rollout for task in tasks for rollout in task.rollouts}
            ids = ids & of_tasks if query.ids else of_tasks
        states = self.journal.load_states(RolloutState, list(ids))
        for id in sorted(states, reverse=backwards):
            if query.after is None or (id < query.after if backwards else id > query.after):
                yield states[id]

    def _read_turns(self, rollout: int, attempt: int | None) -> list[Turn]:
        self._check(rollout, attempt)
        return self.journal.turns(rollout, attempt)

    def _read_history(self, rollout: int) -> list[Event]:
        self._check(rollout, None)
        return [event for _, event in self.journal.read(rollout=rollout)]

    def _read_notes(self, rollout: int, attempt: int | None) -> list[dict[str, Any]]:
        newest = self._check(rollout, attempt)
        wanted = newest if attempt is None else attempt
        notes = (event for _, event in self.journal.read(kinds=(NoteRecorded,), rollout=rollout))
        return [
            {"name": event.name, "data": event.data, "attempt": event.attempt}
            for event in notes
            if isinstance(event, NoteRecorded) and event.attempt == wanted
        ]

    def _check(self, rollout: int, attempt: int | None) -> int:
        """Check that the attempt exists; return the index of the newest one."""
        attempts = len(self.journal.rollout(rollout).attempts)
        if attempt is not None and not 0 <= attempt < attempts:
            raise NotFoundError(f"Rollout {rollout} has {attempts} attempts, and no attempt {attempt}.")
        return attempts - 1

    def _find_resource(self, name: str, version: int) -> Any:
        for _, event in self.journal.read(kinds=(ResourcePut,)):
            if isinstance(event, ResourcePut) and (event.name, event.version) == (name, version):
                return event.value
        newest, _ = self._state.resources[name]
        raise NotFoundError(f"The resource '{name}' has the versions 1 to {newest}, and no version {version}.")
