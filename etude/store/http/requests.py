"""The requests of the HTTP API: the body of each, its required key, its effect, and its reply.

Each is a model whose fields are the body of `POST /v1/store/NAME`. A client sends them as plain values
(`rollout_queue`), and the server validates and executes the request. `write_requests` has those that record something
of an attempt. The list `REQUESTS` at the end defines the routes, the validation of bodies, the access check and the
OpenAPI document. So they cannot disagree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field

from etude.store.http.json_records import encode_claim, encode_event, encode_runner, encode_turn
from etude.store.http.request_limits import INLINE_BYTES, RUNNER_INFO, SHORT_BYTES, json_size
from etude.store.http.request_models import (
    LONGEST_POLL,
    AttemptIdModel,
    ClaimModel,
    EmptyReply,
    EventModel,
    Id,
    Ids,
    Json,
    Name,
    Number,
    ReplyModel,
    RolloutRequestModel,
    Runner,
    StoreRequest,
    Text,
    TurnModel,
    map_documents,
)
from etude.store.http.write_requests import (
    FinishRequest,
    MarkReadyRequest,
    RecordNoteRequest,
    RecordRewardRequest,
    RecordTurnRequest,
)
from etude.store.journal.states import RolloutState, Status
from etude.store.queue.records import QueueOwner, RolloutQuery
from etude.store.queue.rollout_limits import RolloutPurpose

if TYPE_CHECKING:
    from etude.store.queue.rollout_queue import RolloutQueue

MAX_LEASE_S = 3600.0
"""Longest lease of a run, in seconds."""


def _check_info(info: dict[str, Any]) -> dict[str, Any]:
    json_size(info, "The runner's `info`", *RUNNER_INFO)
    return info


# -- for the trainer ---------------------------------------------------------------------------------------------------


class AcquireLeaseReply(ReplyModel):
    """The number of the epoch."""

    epoch: int


class AcquireLeaseRequest(StoreRequest):
    """Acquire or renew the lease of the run that owns the store. Without an epoch the run begins a new one:
    attempts under way end and are retried, and queued rollouts wait until they are enqueued again. Without a valid
    lease the store assigns no rollouts."""

    name = "acquire_lease"
    reply = AcquireLeaseReply
    caches_reply = True
    run: Name = Field(description="name of the run")
    where: Text = Field(min_length=1, description="directory of the run; it distinguishes the run from a copy")
    epoch: Id | None = Field(None, description="epoch of the run; null begins a new one")
    lease_s: float | None = Field(
        None, ge=0, le=MAX_LEASE_S, description="seconds of the lease; null lasts until the store is closed"
    )

    @property
    def is_reply_cached(self) -> bool:
        """True if the request begins an epoch, which must happen once. A renewal is executed each time."""
        return self.epoch is None

    async def execute(self, queue: RolloutQueue) -> AcquireLeaseReply:
        return AcquireLeaseReply(
            epoch=await queue.acquire_lease(QueueOwner(self.run, self.where), self.epoch, self.lease_s)
        )


class EnqueueReply(ReplyModel):
    """The ids of the rollouts, in the order of the request."""

    ids: list[int]


class EnqueueRequest(StoreRequest):
    """Queue rollouts, all or none. A rollout that was enqueued before with the same id and content is not queued
    again."""

    name = "enqueue"
    reply = EnqueueReply
    caches_reply = True
    wanted: list[RolloutRequestModel]

    @property
    def must_run_once(self) -> bool:
        """True if a rollout has no id, since it would be queued again."""
        return any(wanted.id is None for wanted in self.wanted)

    async def execute(self, queue: RolloutQueue) -> EnqueueReply:
        return EnqueueReply(ids=await queue.enqueue(await map_documents(self.wanted, RolloutRequestModel.to_request)))


class CancelRequest(StoreRequest):
    """Cancel rollouts, queued or running, and record the reason. Runners learn of it at their next heartbeat. Rollouts
    that have ended stay as they are."""

    name = "cancel"
    rollouts: Ids
    why: Annotated[Text, Field(min_length=1)]

    async def execute(self, queue: RolloutQueue) -> EmptyReply:
        await queue.cancel(self.rollouts, self.why)
        return EmptyReply()


class SealReply(ReplyModel):
    """The states of the rollouts, in the order of the request."""

    rollouts: list[RolloutState]


class SealRequest(StoreRequest):
    """Seal rollouts that ended: their agents can record no more rewards. The trainer seals rollouts before it reads
    them."""

    name = "seal"
    reply = SealReply
    has_long_reply = True
    rollouts: Ids

    async def execute(self, queue: RolloutQueue) -> SealReply:
        return SealReply(rollouts=await queue.seal(self.rollouts))


class WaitReply(ReplyModel):
    """The rollouts that ended, and the cursor of the next request."""

    cursor: int
    rollouts: list[RolloutState]


class WaitRequest(StoreRequest):
    """Wait for rollouts to end. The reply lists the rollouts that ended after a cursor, in order; it is empty if none
    ended in time."""

    name = "wait"
    reply = WaitReply
    wait_field = "timeout_s"
    has_long_reply = True
    max_bytes = INLINE_BYTES
    cursor: Id = Field(0, description="cursor of the last reply; 0 is the beginning")
    timeout_s: float = Field(0.0, ge=0, le=LONGEST_POLL)
    limit: int = Field(256, ge=1, le=1000)

    def empty_reply(self) -> WaitReply:
        return WaitReply(cursor=self.cursor, rollouts=[])

    async def execute(self, queue: RolloutQueue) -> WaitReply:
        cursor, states = await queue.wait(self.cursor, self.timeout_s, self.limit)
        return WaitReply(cursor=cursor, rollouts=states)


class FindReply(ReplyModel):
    """At most `limit` rollouts. If `more` is true, send the request again with `after` set to the last id."""

    rollouts: list[RolloutState]
    more: bool


class FindRequest(StoreRequest):
    """Find rollouts by status, task, id and use. An empty or null field matches every rollout."""

    name = "find"
    reply = FindReply
    has_long_reply = True
    max_bytes = SHORT_BYTES
    statuses: list[Status] = Field([], max_length=len(Status))
    tasks: list[Number] = Field([], max_length=1000)
    ids: Ids = Field([])
    use: RolloutPurpose | None = None
    sort: Literal["id", "-id"] = "id"
    after: Id | None = None
    limit: int = Field(100, ge=1, le=1000)

    async def execute(self, queue: RolloutQueue) -> FindReply:
        fields = self.model_dump() | {name: tuple(getattr(self, name)) for name in ("statuses", "tasks", "ids")}
        page = await queue.find(RolloutQuery(**fields))
        return FindReply(rollouts=list(page.rollouts), more=page.more)


class _AttemptRequest(StoreRequest):
    rollout: Id
    attempt: Id | None = Field(None, description="index of the attempt; null is the last one")


class TurnsReply(ReplyModel):
    """The turns, in order."""

    turns: list[TurnModel]


class TurnsRequest(_AttemptRequest):
    """Read the turns of an attempt in order, each with its reward."""

    name = "turns"
    reply = TurnsReply
    has_long_reply = True

    async def execute(self, queue: RolloutQueue) -> TurnsReply:
        turns = await queue.turns(self.rollout, self.attempt)
        return TurnsReply(turns=await map_documents(turns, lambda turn: TurnModel(**encode_turn(turn))))


class NotesReply(ReplyModel):
    """The notes, each with `name`, `data` and `attempt`."""

    notes: list[dict[str, Any]]


class NotesRequest(_AttemptRequest):
    """Read the notes and spans of an attempt, in order."""

    name = "notes"
    reply = NotesReply
    has_long_reply = True

    async def execute(self, queue: RolloutQueue) -> NotesReply:
        return NotesReply(notes=await queue.notes(self.rollout, self.attempt))


class HistoryReply(ReplyModel):
    """The events, in order."""

    events: list[EventModel]


class HistoryRequest(StoreRequest):
    """Read all events of a rollout, in the order of the journal."""

    name = "history"
    reply = HistoryReply
    has_long_reply = True
    rollout: Id

    async def execute(self, queue: RolloutQueue) -> HistoryReply:
        events = await queue.history(self.rollout)
        return HistoryReply(events=await map_documents(events, lambda event: EventModel(**encode_event(event))))


# -- for runners -------------------------------------------------------------------------------------------------------


class ClaimReply(ReplyModel):
    """The rollouts that the runner has claimed."""

    claims: list[ClaimModel]


class ClaimRequest(StoreRequest):
    """Claim up to `n` rollouts: those of use `val` first, and the longest queued first within a use. The request waits
    up to `wait_s` seconds for the first one."""

    name = "claim"
    reply = ClaimReply
    wait_field = "wait_s"
    caches_reply = True
    max_bytes = INLINE_BYTES
    scopes = frozenset({"admin", "runner"})
    runner: Name
    n: int = Field(1, ge=1, le=1000)
    wait_s: float = Field(0.0, ge=0, le=LONGEST_POLL)

    def empty_reply(self) -> ClaimReply:
        return ClaimReply(claims=[])

    async def execute(self, queue: RolloutQueue) -> ClaimReply:
        claims = await queue.claim(self.runner, self.n, self.wait_s)
        return ClaimReply(claims=await map_documents(claims, lambda claim: ClaimModel(**encode_claim(claim))))


class HeartbeatReply(ReplyModel):
    """The attempts that the runner must stop."""

    class Stop(ReplyModel):
        """An attempt that is over or belongs to another runner, and the reason."""

        rollout: int
        attempt: int
        why: str

    stop: list[Stop]


class HeartbeatRequest(StoreRequest):
    """Renew the leases of a runner's attempts. The reply lists the attempts that it must stop, with the reasons."""

    name = "heartbeat"
    reply = HeartbeatReply
    max_bytes = SHORT_BYTES
    scopes = frozenset({"admin", "runner"})
    runner: Name
    running: list[AttemptIdModel] = Field(max_length=1000)
    info: Annotated[dict[str, Json], AfterValidator(_check_info)] | None = Field(
        None, description="data of the runner about itself"
    )

    async def execute(self, queue: RolloutQueue) -> HeartbeatReply:
        stop = await queue.heartbeat(self.runner, [attempt.attempt_id for attempt in self.running], self.info)
        return HeartbeatReply(stop=[HeartbeatReply.Stop(**key._asdict(), why=why) for key, why in stop.items()])


# -- resources and statistics ------------------------------------------------------------------------------------------


class PutReply(ReplyModel):
    """The version number, from 1."""

    version: int


class PutResourceRequest(StoreRequest):
    """Write a new version of a resource; its value is any JSON."""

    name = "put_resource"
    reply = PutReply
    caches_reply = True
    resource: Name
    value: Json

    async def execute(self, queue: RolloutQueue) -> PutReply:
        return PutReply(version=await queue.put_resource(self.resource, self.value))


class ResourceReply(ReplyModel):
    """The version number and the value."""

    version: int
    value: Any


class GetResourceRequest(StoreRequest):
    """Read a resource, by default its newest version."""

    name = "get_resource"
    reply = ResourceReply
    has_long_reply = True
    scopes = frozenset({"admin", "runner"})
    resource: Name
    version: int | None = Field(None, ge=1, lt=2**31)

    async def execute(self, queue: RolloutQueue) -> ResourceReply:
        version, value = await queue.get_resource(self.resource, self.version)
        return ResourceReply(version=version, value=value)


class RunnersReply(ReplyModel):
    """The runners, each as of its last heartbeat or claim."""

    runners: list[Runner]


class RunnersRequest(StoreRequest):
    """List the runners that were active within the last minutes."""

    name = "runners"
    reply = RunnersReply
    has_long_reply = True

    async def execute(self, queue: RolloutQueue) -> RunnersReply:
        return RunnersReply(runners=[Runner(**encode_runner(runner)) for runner in await queue.runners()])


class StatisticsReply(ReplyModel):
    """The numbers, by name."""

    statistics: dict[str, float]


class StatisticsRequest(StoreRequest):
    """Count rollouts by status, retries and late results, and read the age of the oldest queued rollout."""

    name, reply = "statistics", StatisticsReply

    async def execute(self, queue: RolloutQueue) -> StatisticsReply:
        return StatisticsReply(statistics=await queue.statistics())


REQUESTS: tuple[type[StoreRequest], ...] = (
    EnqueueRequest,
    CancelRequest,
    WaitRequest,
    FindRequest,
    TurnsRequest,
    NotesRequest,
    ClaimRequest,
    HeartbeatRequest,
    MarkReadyRequest,
    FinishRequest,
    RecordRewardRequest,
    RecordNoteRequest,
    RecordTurnRequest,
    AcquireLeaseRequest,
    SealRequest,
    HistoryRequest,
    PutResourceRequest,
    GetResourceRequest,
    RunnersRequest,
    StatisticsRequest,
)
