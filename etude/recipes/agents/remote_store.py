"""A run with its rollouts in a remote store (`agent.store`), and a complete copy in the run's own journal.

    runners ◄─► store ◄─ the remote queue ─► journal ◄─ the run
                  ▲
               endpoint ─► engine

The run writes a request to its journal before it sends it. It copies an ended rollout completely before anything here
uses it. So the journal is a journal like any other: it is replayed, resumed and inspected without the store. Sending a
request again has no effect, as a run does that was killed between the two.

The store knows its owner (`RolloutQueue.acquire_lease`). A resumed run begins a new epoch of its lease before its
endpoint exists. It renews the lease every few seconds. Rollouts of an earlier epoch are not executed until they are
requested again. While no trainer holds the lease, no rollout is assigned, because it could only fail.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from etude.config.env import store_address
from etude.errors import ConfigError, EtudeError, IllegalTransitionError
from etude.images import ImageRef
from etude.integrity import read_json, write_json
from etude.observe import get_logger
from etude.recipes.run.directory import STORE_RUN_FILE
from etude.records import Turn
from etude.store import (
    Event,
    Journal,
    Phase,
    RolloutCancelled,
    RolloutQueued,
    RolloutState,
    Status,
    TaskIssued,
    TaskState,
    TurnRecorded,
)
from etude.store.http.forms import encode_as
from etude.store.http.remote_queue import RemoteRolloutQueue
from etude.store.http.request_limits import VALUES
from etude.store.journal.json_values import to_json
from etude.store.queue.checks import queue_rollout
from etude.store.queue.rollout_queue import Ended, QueueOwner, RolloutPage, RolloutQuery, RolloutRequest
from etude.store.queue.stored_images import store_images

LEASE_S, RENEW_S = 20.0, 4.0
"""Seconds of a lease, and seconds between two renewals."""
RETRY_S = 3.0
"""Seconds of retries to reach the store for a renewal."""
MOST_BYTES = 8 * 2**20
"""Most bytes of one request for rollouts; a store accepts four times as much."""
PAGE = 256
"""Rollouts of one query."""
AT_ONCE = 16
"""Rollouts that are copied at a time."""
OPEN = frozenset({Status.QUEUED, Status.RUNNING})


def read_admin_key(url: str) -> str:
    """Return the admin key of the joined store."""
    _, key = store_address()
    if not key:
        raise ConfigError(
            f"`agent.store={url}` needs the store's admin key, and ETUDE_STORE_KEY is not set. `etude store` says "
            "where the key is."
        )
    return key


def check_store_not_left(directory: Path, journal: Journal) -> None:
    """Refuse to resume without the store while rollouts of this run are open there.

    The store would never learn the results from here, and could not be joined again.
    """
    if (directory / STORE_RUN_FILE).exists() and journal.rollouts(Phase.QUEUED, Phase.RUNNING):
        raise ConfigError(
            f"The run in {directory} has its rollouts in a remote store, and some are open: continue with the "
            "`agent.store` that it had."
        )


def load_owner(directory: Path, journal: Journal) -> QueueOwner:
    """Return the identity of this run at a store, and its directory."""
    file = directory / STORE_RUN_FILE
    if not file.exists():
        if journal.rollouts(Phase.QUEUED, Phase.RUNNING):
            raise ConfigError(
                f"The run in {directory} kept its rollouts itself so far, and some are open: `agent.store` cannot be "
                "set now. Leave it out, or begin a new run."
            )
        write_json(file, {"run": secrets.token_hex(8)})
    record = read_json(file, "It holds the identity of this run at the store: bring it back from a copy.")
    return QueueOwner(record["run"], str(directory.resolve()))


async def acquire_lease(queue: RemoteRolloutQueue, owner: QueueOwner) -> int:
    """Acquire the store for this run alone, and return the epoch of the lease."""
    try:
        return await queue.acquire_lease(owner, None, LEASE_S)
    except IllegalTransitionError as error:
        raise ConfigError(f"`agent.store={queue.url}` cannot be joined. {error}") from error
    finally:
        await queue.close()


async def release_lease(url: str, key: str, owner: QueueOwner, epoch: int) -> None:
    """Release the lease of the store."""
    client = RemoteRolloutQueue(url, key, patience_s=RETRY_S, timeout_s=RENEW_S)
    with suppress(EtudeError):  # the lease expires by itself
        await client.acquire_lease(owner, epoch, 0.0)
    await client.close()


@asynccontextmanager
async def renew_lease(url: str, key: str, owner: QueueOwner, epoch: int) -> AsyncIterator[None]:
    """Renew the store's lease of this run inside the block.

    Waits for the store. Ends if the run has started another epoch; the run gets that error at its next request.
    """
    client = RemoteRolloutQueue(url, key, patience_s=RETRY_S, timeout_s=RENEW_S)
    renewal = asyncio.create_task(_renew(client, owner, epoch), name="etude-keeping")
    try:
        yield
    finally:
        renewal.cancel()
        with suppress(asyncio.CancelledError):
            await renewal
        await client.close()


async def _renew(client: RemoteRolloutQueue, owner: QueueOwner, epoch: int) -> None:
    log, last_renewal = get_logger("recipes"), time.monotonic()
    while True:
        try:
            await client.acquire_lease(owner, epoch, LEASE_S)
        except IllegalTransitionError as error:
            log.error("%s", error)
            return
        except Exception as error:  # the next renewal may succeed, after any error
            log.debug("The lease of the store could not be renewed: %s", error)
        else:
            silent, last_renewal = time.monotonic() - last_renewal, time.monotonic()
            if silent > LEASE_S:
                log.warning(
                    "The lease of the store was not renewed for %.0f s. After %g s the store stopped all running "
                    "rollouts, and starts them again. If this happens often, no rollout gets done.",
                    silent,
                    LEASE_S,
                )
        await asyncio.sleep(RENEW_S)


class MirroredRolloutQueue(RemoteRolloutQueue):
    """The remote rollout queue, mirrored into the run's journal. For the loop of the run alone.

    A rollout that has ended is sealed there and copied completely. From then on it is read only here.
    """

    def __init__(self, url: str, key: str, journal: Journal, epoch: int) -> None:
        super().__init__(url, key)
        self._journal = journal
        self._epoch = epoch
        self._unknown: dict[int, RolloutState] = {}
        """Rollouts that ended there and are unknown here, because the journal was restored from an earlier copy."""
        self._late: list[RolloutState] = []
        """Those of them that were copied here when they were requested again, after `wait` had passed them."""

    async def enqueue(self, requests: Sequence[RolloutRequest]) -> list[int]:
        """Enqueue rollouts, after the requests are written to the journal."""
        ids = [request.id for request in requests if request.id is not None]
        assert len(ids) == len(requests), "a run gives ids to its rollouts"
        tasks = self._journal.load_states(TaskState, [request.task.ordinal for request in requests])
        known = self._journal.load_states(RolloutState, ids)
        new: dict[int, TaskIssued] = {}
        events: list[Event] = []
        for id, request in zip(ids, requests, strict=True):
            task, row = request.task, request.task.fields.get("row")
            if task.ordinal not in tasks and task.ordinal not in new:
                row_number = row if isinstance(row, int) else task.ordinal
                new[task.ordinal] = TaskIssued(task.ordinal, row_number, task.source, task.fields, request.use)
            if id not in known:
                events.append(queue_rollout(id, request))
        if new or events:
            self._journal.append([*new.values(), *events])
        for batch in _split_requests(requests):
            await super().enqueue(batch)
        late = [self._unknown.pop(id) for id in ids if id in self._unknown]
        await self._copy_ended(late)
        self._late += late
        return ids

    async def cancel(self, rollouts: Sequence[int], why: str) -> None:
        """Cancel rollouts there, and copy them here. One that was never sent there is cancelled here."""
        for ids in (rollouts[at : at + PAGE] for at in range(0, len(rollouts), PAGE)):
            query = RolloutQuery(ids=tuple(ids), limit=PAGE)
            await super().cancel([state.id for state in (await self.find(query)).rollouts], why)
            await self.find(query)
        here = self._journal.load_states(RolloutState, rollouts).values()
        self._journal.append([RolloutCancelled(state.id, why) for state in here if state.phase is Phase.QUEUED])

    async def seal(self, rollouts: Sequence[int]) -> list[RolloutState]:
        """Return the states of rollouts that were copied here, which are sealed."""
        here = self._journal.load_states(RolloutState, rollouts)
        return [here[id] for id in rollouts]

    async def turns(self, rollout: int, attempt: int | None = None) -> list[Turn]:
        """Return the turns of an attempt from the journal."""
        return await asyncio.to_thread(self._journal.turns, rollout, attempt)

    async def find(self, what: RolloutQuery) -> RolloutPage:
        """Return the rollouts of a query; those that ended are copied here first."""
        page = await super().find(what)
        await self._copy_ended(page.rollouts)
        return page

    async def wait(self, cursor: int = 0, timeout_s: float = 0.0, limit: int = 256) -> Ended:
        """Return rollouts that ended, after they are copied here."""
        ended = await super().wait(cursor, 0.0 if self._late else timeout_s, limit)
        await self._copy_ended(ended.rollouts)
        late = self._late
        self._late = []
        return Ended(ended.cursor, [*late, *ended.rollouts])

    async def put_images(self, contents: Sequence[bytes]) -> list[ImageRef]:
        """Store images here and there."""
        refs = await asyncio.to_thread(store_images, self._journal, tuple(contents))
        await super().put_images(contents)
        return refs

    async def get_images(self, digests: Sequence[str]) -> dict[str, bytes]:
        """Return the bytes of images from the journal, which gets those that it lacks from there."""
        here = await asyncio.to_thread(self._journal.images, digests)
        found = {digest: image.content for digest, image in here.items()}
        lacked = [digest for digest in digests if digest not in found]
        if lacked:
            copied = await super().get_images(lacked)
            await asyncio.to_thread(store_images, self._journal, list(copied.values()))
            found |= copied
        return found

    async def _copy_images(self, events: Sequence[Event]) -> None:
        """Copy the images that turns show and the journal lacks."""
        shown = {span.digest for event in events if isinstance(event, TurnRecorded) for span in event.turn.images}
        if not shown:
            return
        known = await asyncio.to_thread(self._journal.image_refs, list(shown))
        await self.get_images([digest for digest in shown if digest not in known])

    async def _copy_ended(self, states: Sequence[RolloutState]) -> None:
        """Copy ended rollouts that are open in the journal, after sealing them there."""
        ids = self._still_open([state.id for state in states if state.status not in OPEN])
        if ids:
            await super().seal(ids)
        known = self._journal.load_states(RolloutState, [state.id for state in states])
        self._unknown |= {state.id: state for state in states if state.id not in known and state.status not in OPEN}
        for at in range(0, len(ids), AT_ONCE):
            batch = ids[at : at + AT_ONCE]
            histories = dict(zip(batch, await asyncio.gather(*(self.history(id) for id in batch)), strict=True))
            for history in histories.values():
                await self._copy_images(history)
            for id in self._still_open(batch):  # another task may have copied it meanwhile
                self._journal.append([event for event in histories[id] if not isinstance(event, RolloutQueued)])

    def _still_open(self, ids: Sequence[int]) -> list[int]:
        here = self._journal.load_states(RolloutState, ids)
        return [id for id in ids if id in here and here[id].status in OPEN]


def _split_requests(requests: Sequence[RolloutRequest]) -> list[list[RolloutRequest]]:
    """Split requests into batches within the store's limits. Requests have ids, so it does no harm if only some batches
    arrive."""
    portions: list[list[RolloutRequest]] = [[]]
    around = 2  # the object and the list around the requests
    size, values = 0, around
    for request in requests:
        text = to_json(encode_as(RolloutRequest, request))
        added, more = len(text) + 1, 1 + sum(map(text.count, ",[{"))
        if portions[-1] and (size + added > MOST_BYTES or values + more > VALUES):
            portions.append([])
            size, values = 0, around
        portions[-1].append(request)
        size, values = size + added, values + more
    return portions
