"""Verbs of a run that keeps a desk, and of what everybody shares there: `requests` lists them with the others."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from etude.store import messages
from etude.store.request_models import Id, Ids, Json, Name, StoreRequest, Text, map_documents
from etude.store.rollout_queue import QueueOwner, RolloutQueue
from etude.store.states import RolloutState

__all__ = [
    "MAX_LEASE_S",
    "AcquireLeaseRequest",
    "GetResourceRequest",
    "HistoryRequest",
    "PutResourceRequest",
    "RunnersRequest",
    "SealRequest",
    "StatisticsRequest",
]

MAX_LEASE_S = 3600.0
"""Seconds for which a run may say at most that it is there."""


# -- of a run ----------------------------------------------------------------------------------------------------------


class AcquireLeaseRequest(StoreRequest):
    """A run takes the store up, or says that it is still there. Without a life it begins one: what was under way is
    over and made again, and what was queued waits until it is asked for again. While the run is not known to be there,
    nothing is lent."""

    class AcquireLeaseReply(BaseModel):
        """The number of the life."""

        life: int

    name, reply, caches_reply = "keep", AcquireLeaseReply, True
    run: Name = Field(description="which run it is")
    where: Text = Field(min_length=1, description="its directory, by which it is told apart from a copy")
    life: Id | None = Field(None, description="null begins one")
    lease_s: float | None = Field(
        None, ge=0, le=MAX_LEASE_S, description="for how long that holds; null is until the store is closed"
    )

    @property
    def is_reply_cached(self) -> bool:
        """A life is begun once; that a run is there is said anew each time, and not answered from memory."""
        return self.life is None

    async def execute(self, queue: RolloutQueue) -> dict[str, Any]:
        """Say so."""
        return {"life": await queue.acquire_lease(QueueOwner(self.run, self.where), self.life, self.lease_s)}


class SealRequest(StoreRequest):
    """Rollouts that have ended are about to be read, and earn nothing more."""

    class SealReply(BaseModel):
        """How they stand, in the order asked for."""

        rollouts: list[RolloutState]

    name, reply, has_long_reply = "seal", SealReply, True
    rollouts: Ids

    async def execute(self, queue: RolloutQueue) -> dict[str, Any]:
        """Seal them."""
        return {"rollouts": await map_documents(await queue.seal(self.rollouts), RolloutState.to_dict)}


class HistoryRequest(StoreRequest):
    """All that happened to a rollout, in order, as the journal keeps it."""

    class HistoryReply(BaseModel):
        """In order."""

        class EventModel(BaseModel):
            """Something that happened: of which kind it is, its fields, and the bytes that belong to it, in base64."""

            kind: str
            rollout: int | None
            body: dict[str, Any]
            payload: str = Field(json_schema_extra={"contentEncoding": "base64"})

        events: list[EventModel]

    name, reply, has_long_reply = "history", HistoryReply, True
    rollout: Id

    async def execute(self, queue: RolloutQueue) -> dict[str, Any]:
        """Read it."""
        return {"events": await map_documents(await queue.history(self.rollout), messages.encode_event)}


# -- what is shared ----------------------------------------------------------------------------------------------------


class PutResourceRequest(StoreRequest):
    """A new version of a resource; any JSON."""

    class PutReply(BaseModel):
        """Its number, from 1."""

        version: int

    name, reply, caches_reply = "put", PutReply, True
    resource: Name
    value: Json

    async def execute(self, queue: RolloutQueue) -> dict[str, Any]:
        """Put it there."""
        return {"version": await queue.put_resource(self.resource, self.value)}


class GetResourceRequest(StoreRequest):
    """A resource, by default its newest version."""

    class ResourceReply(BaseModel):
        """What it is."""

        version: int
        value: Any

    name, reply, has_long_reply = "resource", ResourceReply, True
    scopes = frozenset({"admin", "runner"})
    resource: Name
    version: int | None = Field(None, ge=1, lt=2**31)

    async def execute(self, queue: RolloutQueue) -> dict[str, Any]:
        """Look at it."""
        version, value = await queue.get_resource(self.resource, self.version)
        return {"version": version, "value": value}


class RunnersRequest(StoreRequest):
    """The runners that spoke within the last minutes."""

    class RunnersReply(BaseModel):
        """Each as it last spoke."""

        class Runner(BaseModel):
            """What it has under way, and for how long it has said nothing."""

            name: str
            running: list[dict[str, int]]
            silent_s: float
            told: dict[str, Any]

        runners: list[Runner]

    name, reply, has_long_reply = "runners", RunnersReply, True

    async def execute(self, queue: RolloutQueue) -> dict[str, Any]:
        """Look around."""
        return {"runners": [messages.encode_runner(runner) for runner in await queue.runners()]}


class StatisticsRequest(StoreRequest):
    """How many rollouts stand where, retries, late results, and the age of the oldest one queued."""

    class StatisticsReply(BaseModel):
        """By name."""

        statistics: dict[str, float]

    name, reply = "statistics", StatisticsReply

    async def execute(self, queue: RolloutQueue) -> dict[str, Any]:
        """Count."""
        return {"statistics": await queue.statistics()}
