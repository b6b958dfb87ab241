"""Requests of the run that owns the store, and of resources and statistics. `requests` lists them with the others."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from etude.store import messages
from etude.store.request_models import Id, Ids, Json, Name, StoreRequest, Text, map_documents
from etude.store.rollout_queue import QueueOwner, RolloutQueue
from etude.store.states import RolloutState

MAX_LEASE_S = 3600.0
"""Longest lease of a run, in seconds."""


# -- of the owning run -------------------------------------------------------------------------------------------------


class AcquireLeaseRequest(StoreRequest):
    """Acquire or renew the lease of the run that owns the store. Without an epoch (`life`) the run begins a new one:
    attempts under way end and are retried, and queued rollouts wait until they are enqueued again. Without a valid
    lease the store assigns no rollouts."""

    class AcquireLeaseReply(BaseModel):
        """The number of the epoch."""

        life: int

    name, reply, caches_reply = "keep", AcquireLeaseReply, True
    run: Name = Field(description="name of the run")
    where: Text = Field(min_length=1, description="directory of the run; it distinguishes the run from a copy")
    life: Id | None = Field(None, description="epoch of the run; null begins a new one")
    lease_s: float | None = Field(
        None, ge=0, le=MAX_LEASE_S, description="seconds of the lease; null lasts until the store is closed"
    )

    @property
    def is_reply_cached(self) -> bool:
        """True if the request begins an epoch, which must happen once. A renewal is executed each time."""
        return self.life is None

    async def execute(self, queue: RolloutQueue) -> dict[str, Any]:
        return {"life": await queue.acquire_lease(QueueOwner(self.run, self.where), self.life, self.lease_s)}


class SealRequest(StoreRequest):
    """Seal rollouts that ended: their agents can record no more rewards. The trainer seals rollouts before it reads
    them."""

    class SealReply(BaseModel):
        """The states of the rollouts, in the order of the request."""

        rollouts: list[RolloutState]

    name, reply, has_long_reply = "seal", SealReply, True
    rollouts: Ids

    async def execute(self, queue: RolloutQueue) -> dict[str, Any]:
        return {"rollouts": await map_documents(await queue.seal(self.rollouts), RolloutState.to_dict)}


class HistoryRequest(StoreRequest):
    """Read all events of a rollout, in the order of the journal."""

    class HistoryReply(BaseModel):
        """The events, in order."""

        class EventModel(BaseModel):
            """An event: its kind, its rollout, its fields, and its payload in base64."""

            kind: str
            rollout: int | None
            body: dict[str, Any]
            payload: str = Field(json_schema_extra={"contentEncoding": "base64"})

        events: list[EventModel]

    name, reply, has_long_reply = "history", HistoryReply, True
    rollout: Id

    async def execute(self, queue: RolloutQueue) -> dict[str, Any]:
        return {"events": await map_documents(await queue.history(self.rollout), messages.encode_event)}


# -- resources and statistics ------------------------------------------------------------------------------------------


class PutResourceRequest(StoreRequest):
    """Write a new version of a resource; its value is any JSON."""

    class PutReply(BaseModel):
        """The version number, from 1."""

        version: int

    name, reply, caches_reply = "put", PutReply, True
    resource: Name
    value: Json

    async def execute(self, queue: RolloutQueue) -> dict[str, Any]:
        return {"version": await queue.put_resource(self.resource, self.value)}


class GetResourceRequest(StoreRequest):
    """Read a resource, by default its newest version."""

    class ResourceReply(BaseModel):
        """The version number and the value."""

        version: int
        value: Any

    name, reply, has_long_reply = "resource", ResourceReply, True
    scopes = frozenset({"admin", "runner"})
    resource: Name
    version: int | None = Field(None, ge=1, lt=2**31)

    async def execute(self, queue: RolloutQueue) -> dict[str, Any]:
        version, value = await queue.get_resource(self.resource, self.version)
        return {"version": version, "value": value}


class RunnersRequest(StoreRequest):
    """List the runners that were active within the last minutes."""

    class RunnersReply(BaseModel):
        """The runners, each as of its last heartbeat or claim."""

        class Runner(BaseModel):
            """The attempts of a runner, the seconds since it was last active, and its own data."""

            name: str
            running: list[dict[str, int]]
            silent_s: float
            told: dict[str, Any]

        runners: list[Runner]

    name, reply, has_long_reply = "runners", RunnersReply, True

    async def execute(self, queue: RolloutQueue) -> dict[str, Any]:
        return {"runners": [messages.encode_runner(runner) for runner in await queue.runners()]}


class StatisticsRequest(StoreRequest):
    """Count rollouts by status, retries and late results, and read the age of the oldest queued rollout."""

    class StatisticsReply(BaseModel):
        """The numbers, by name."""

        statistics: dict[str, float]

    name, reply = "statistics", StatisticsReply

    async def execute(self, queue: RolloutQueue) -> dict[str, Any]:
        return {"statistics": await queue.statistics()}


ADMIN_REQUESTS: tuple[type[StoreRequest], ...] = (
    *(AcquireLeaseRequest, SealRequest, HistoryRequest),
    *(PutResourceRequest, GetResourceRequest, RunnersRequest, StatisticsRequest),
)
