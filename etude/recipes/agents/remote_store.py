"""A run whose rollouts are kept by a store elsewhere (`agent.store`), and whose journal holds them all the same.

    runners ◄─► store ◄─ the far desk ─► journal ◄─ the run
                  ▲
               endpoint ─► engine

What the run asks for it writes down first, and asks for then; what ended it copies whole, before anybody here is told.
So the journal is a journal like any other: it is replayed, resumed and looked at without the store. Asking again does
no harm, which is what a run does that was killed between the two.

The store knows who keeps it (`RolloutQueue.acquire_lease`). A run that is taken up begins another life of its keeping
before its endpoint is there, and says every few seconds that it lives: what an earlier life left is played by nobody
until it is asked for again, and while no trainer is there, nothing is lent that could only fail.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from etude.config.env import store_address
from etude.errors import ConfigError, EtudeError, IllegalTransitionError
from etude.integrity import read_json, write_json
from etude.observe import get_logger
from etude.recipes.run.directory import STORE_RUN_FILE
from etude.records import Turn
from etude.store import Event, Journal, Phase, RolloutQueued, RolloutState, Status, TaskIssued, TaskState, messages
from etude.store.remote_queue import RemoteRolloutQueue
from etude.store.request_limits import VALUES
from etude.store.rollout_queue import QueueOwner, RolloutPage, RolloutQuery, RolloutRequest

__all__ = [
    "LEASE_S",
    "LeaseRenewer",
    "MirroredRolloutQueue",
    "acquire_lease",
    "check_store_not_left",
    "load_owner",
    "read_admin_key",
    "release_lease",
]

LEASE_S, RENEW_S = 20.0, 4.0
"""Seconds for which a store believes that the run is there; and after which it is told again."""
RETRY_S = 3.0
"""Seconds to try to reach it for that."""
MOST_BYTES = 8 * 2**20
"""Of one request for rollouts; a store takes four times as much."""
AT_ONCE = 16
"""Rollouts that are copied beside each other."""
OPEN = frozenset({Status.QUEUED, Status.RUNNING})


def read_admin_key(url: str) -> str:
    """The admin key to the store that is joined."""
    _, key = store_address()
    if not key:
        raise ConfigError(
            f"`agent.store={url}` is joined by its admin key, and ETUDE_STORE_KEY does not tell it. `etude store` says "
            "where it is kept."
        )
    return key


def check_store_not_left(directory: Path, journal: Journal) -> None:
    """Refuse to go on without the store where rollouts of this run are open there: what becomes of them here, it would
    never hear of, and could not be joined again."""
    if (directory / STORE_RUN_FILE).exists() and journal.rollouts(Phase.QUEUED, Phase.RUNNING):
        raise ConfigError(
            f"The run in {directory} has its rollouts kept by a store elsewhere, and some are open: go on with the "
            "`agent.store` that it had."
        )


def load_owner(directory: Path, journal: Journal) -> QueueOwner:
    """Which run this is to a store, and where it lies."""
    file = directory / STORE_RUN_FILE
    if not file.exists():
        if journal.rollouts(Phase.QUEUED, Phase.RUNNING):
            raise ConfigError(
                f"The run in {directory} kept its rollouts itself so far, and some are open: `agent.store` cannot be "
                "set now. Leave it out, or begin a new run."
            )
        write_json(file, {"run": secrets.token_hex(8)})
    record = read_json(file, "It says which run this is to the store: bring it back from a copy.")
    return QueueOwner(record["run"], str(directory.resolve()))


async def acquire_lease(queue: RemoteRolloutQueue, owner: QueueOwner) -> int:
    """Have the store keep the rollouts of this run, and of no other; the number of this life of it."""
    try:
        return await queue.acquire_lease(owner, None, LEASE_S)
    except IllegalTransitionError as error:
        raise ConfigError(f"`agent.store={queue.url}` cannot be joined. {error}") from error
    finally:
        await queue.close()


async def release_lease(url: str, key: str, owner: QueueOwner, epoch: int) -> None:
    """Tell the store that the run is not there any more."""
    client = RemoteRolloutQueue(url, key, patience_s=RETRY_S, timeout_s=RENEW_S)
    with suppress(EtudeError):  # it will find out by itself
        await client.acquire_lease(owner, epoch, 0.0)
    await client.close()


class LeaseRenewer:
    """Tells the store that the run is there, on whatever loop it is entered.

    Waits for the store. Ends where another life of the run has begun; the run hears of that by its next word.
    """

    def __init__(self, url: str, key: str, owner: QueueOwner, epoch: int) -> None:
        self._owner, self._epoch = owner, epoch
        self._queue = RemoteRolloutQueue(url, key, patience_s=RETRY_S, timeout_s=RENEW_S)
        self._renewal: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._renewal = asyncio.create_task(self._renew(), name="etude-keeping")
        return self

    async def __aexit__(self, *raised: object) -> None:
        if self._renewal is not None:
            self._renewal.cancel()
            with suppress(asyncio.CancelledError):
                await self._renewal
        await self._queue.close()

    async def _renew(self) -> None:
        log, last_renewal = get_logger("recipes"), time.monotonic()
        while True:
            try:
                await self._queue.acquire_lease(self._owner, self._epoch, LEASE_S)
            except IllegalTransitionError as error:
                log.error("%s", error)
                return
            except Exception as error:  # whatever it was, the next word may get through
                log.debug("The store was not told that the run is there: %s", error)
            else:
                silent, last_renewal = time.monotonic() - last_renewal, time.monotonic()
                if silent > LEASE_S:
                    log.warning(
                        "The store heard nothing of the run for %.0f s: it stopped what was under way after %g s, and "
                        "has it made again. Where this happens often, nothing gets done.",
                        *(silent, LEASE_S),
                    )
            await asyncio.sleep(RENEW_S)


class MirroredRolloutQueue(RemoteRolloutQueue):
    """The desk elsewhere, whose rollouts are written down here too. For the loop of the run alone.

    A rollout that has ended is sealed there and copied whole; from then on it is read here, and nowhere else.
    """

    def __init__(self, url: str, key: str, journal: Journal, epoch: int) -> None:
        super().__init__(url, key)
        self._journal, self._life = journal, epoch
        self._unknown: dict[int, RolloutState] = {}
        """Ended there, and not known here: the journal was brought back from an earlier time."""

    async def enqueue(self, requests: Sequence[RolloutRequest]) -> list[int]:
        """Queue rollouts, once that they are wanted is written here."""
        ids = [request.id for request in requests if request.id is not None]
        assert len(ids) == len(requests), "a run names its rollouts"
        tasks = self._journal.load_states(TaskState, [request.task.ordinal for request in requests])
        known = self._journal.load_states(RolloutState, ids)
        new: dict[int, TaskIssued] = {}
        events: list[Event] = []
        for id, request in zip(ids, requests, strict=True):
            task, row = request.task, request.task.fields.get("row")
            if task.ordinal not in tasks and task.ordinal not in new:
                row_number = row if isinstance(row, int) else task.ordinal
                new[task.ordinal] = TaskIssued(task.ordinal, row_number, task.source, task.fields)
            if id not in known:
                events.append(RolloutQueued(id, task.ordinal, request.sample, request.use, request.limits))
        if new or events:
            self._journal.append([*new.values(), *events])
        for batch in _split_requests(requests):
            await super().enqueue(batch)
        await self._copy_ended([self._unknown.pop(id) for id in ids if id in self._unknown])
        return ids

    async def seal(self, rollouts: Sequence[int]) -> list[RolloutState]:
        """How rollouts stand that are written here, and sealed."""
        here = self._journal.load_states(RolloutState, rollouts)
        return [here[id] for id in rollouts]

    async def turns(self, rollout: int, attempt: int | None = None) -> list[Turn]:
        """The turns of an attempt, as they are written here."""
        return await asyncio.to_thread(self._journal.turns, rollout, attempt)

    async def find(self, what: RolloutQuery) -> RolloutPage:
        """The rollouts that were asked for; those that ended are written here."""
        page = await super().find(what)
        await self._copy_ended(page.rollouts)
        return page

    async def wait(self, cursor: int, timeout_s: float, limit: int = 256) -> tuple[int, list[RolloutState]]:
        """Rollouts that ended, written here."""
        cursor, ended = await super().wait(cursor, timeout_s, limit)
        await self._copy_ended(ended)
        return cursor, ended

    async def _copy_ended(self, states: Sequence[RolloutState]) -> None:
        """Write down what became of those that the journal has as open, once nothing more can become of them."""
        ids = self._still_open([state.id for state in states if state.status not in OPEN])
        if ids:
            await super().seal(ids)
        known = self._journal.load_states(RolloutState, [state.id for state in states])
        self._unknown |= {state.id: state for state in states if state.id not in known and state.status not in OPEN}
        for at in range(0, len(ids), AT_ONCE):
            batch = ids[at : at + AT_ONCE]
            histories = dict(zip(batch, await asyncio.gather(*(self.history(id) for id in batch)), strict=True))
            for id in self._still_open(batch):  # another may have been at it meanwhile
                self._journal.append([event for event in histories[id] if not isinstance(event, RolloutQueued)])

    def _still_open(self, ids: Sequence[int]) -> list[int]:
        here = self._journal.load_states(RolloutState, ids)
        return [id for id in ids if id in here and here[id].status in OPEN]


def _split_requests(requests: Sequence[RolloutRequest]) -> list[list[RolloutRequest]]:
    """Rollouts in as many requests as they take. They are named, so that it does no harm where only some arrive."""
    portions: list[list[RolloutRequest]] = [[]]
    around = 2  # the object and the list in which they stand
    size, values = 0, around
    for request in requests:
        text = messages.to_json(messages.encode_rollout_request(request))
        added, more = len(text) + 1, 1 + sum(map(text.count, (b",", b"[", b"{")))
        if portions[-1] and (size + added > MOST_BYTES or values + more > VALUES):
            portions.append([])
            size, values = 0, around
        portions[-1].append(request)
        size, values = size + added, values + more
    return portions
