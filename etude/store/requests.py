"""The verbs of a desk as requests: what each must say, who may say it, what it does, and what is answered.

Each is a form whose fields are the body of `POST /v1/store/NAME`. The routes, the check of every body, who may do what,
and the OpenAPI description all follow from the one list `REQUESTS` at the end, so they cannot disagree.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, Field

from etude.records import Outcome
from etude.store import messages
from etude.store.admin_requests import (
    AcquireLeaseRequest,
    GetResourceRequest,
    HistoryRequest,
    PutResourceRequest,
    RunnersRequest,
    SealRequest,
    StatisticsRequest,
)
from etude.store.blobs import pack_turn
from etude.store.request_limits import INLINE_BYTES, RUNNER_INFO, SHORT_BYTES, check_size
from etude.store.request_models import (
    LONGEST_POLL,
    AttemptIdModel,
    ErrorReply,
    Id,
    Ids,
    Json,
    Name,
    Number,
    RewardValue,
    RolloutRequestModel,
    StoreRequest,
    StrictModel,
    Text,
    TurnOutput,
    map_documents,
)
from etude.store.rollout_queue import AttemptReport, RolloutLimits, RolloutPurpose, RolloutQuery, RolloutQueue
from etude.store.states import RolloutState, Status

__all__ = [
    "REQUESTS",
    "AnyWriteRequest",
    "BatchRequest",
    "ClaimRequest",
    "RecordNoteRequest",
    "RecordRewardRequest",
    "WriteRequest",
]


def _check_info(info: dict[str, Any]) -> dict[str, Any]:
    check_size(info, "What a runner says of itself", *RUNNER_INFO)
    return info


# -- who wants rollouts ------------------------------------------------------------------------------------------------


class EnqueueRequest(StoreRequest):
    """Queue rollouts, all or none. One asked for before in the same words is not queued again."""

    class EnqueueReply(BaseModel):
        """Their ids, in the order asked for."""

        ids: list[int]

    name, reply, caches_reply = "enqueue", EnqueueReply, True
    wanted: list[RolloutRequestModel]

    @property
    def must_run_once(self) -> bool:
        """What has no id of its own is queued each time."""
        return any(wanted.id is None for wanted in self.wanted)

    async def execute(self, queue: RolloutQueue) -> dict[str, Any]:
        """Queue them."""
        return {"ids": await queue.enqueue(await map_documents(self.wanted, RolloutRequestModel.to_request))}


class CancelRequest(StoreRequest):
    """Nobody wants these any more, for this reason; what runs is told to stop at its next heartbeat. Those that ended
    stay so."""

    name = "cancel"
    rollouts: Ids
    why: Annotated[Text, Field(min_length=1)]

    async def execute(self, queue: RolloutQueue) -> dict[str, Any]:
        """Cancel them."""
        await queue.cancel(self.rollouts, self.why)
        return {}


class WaitRequest(StoreRequest):
    """Rollouts that came to their end after a cursor, in the order they did; none after some seconds."""

    class WaitReply(BaseModel):
        """What ended, and the cursor to ask on with."""

        cursor: int
        rollouts: list[RolloutState]

    name, reply, may_wait, has_long_reply = "wait", WaitReply, True, True
    max_bytes = INLINE_BYTES
    cursor: Id = Field(0, description="0 is the beginning")
    timeout_s: float = Field(0.0, ge=0, le=LONGEST_POLL)
    limit: int = Field(256, ge=1, le=1000)

    def empty_reply(self) -> dict[str, Any]:
        """Nothing ended."""
        return {"cursor": self.cursor, "rollouts": []}

    async def execute(self, queue: RolloutQueue) -> dict[str, Any]:
        """Wait."""
        cursor, states = await queue.wait(self.cursor, self.timeout_s, self.limit)
        return {"cursor": cursor, "rollouts": await map_documents(states, RolloutState.to_dict)}


class FindRequest(StoreRequest):
    """The rollouts that are looked for; what is empty or null does not matter."""

    class FindReply(BaseModel):
        """At most as many as asked for; `more` says whether to ask on with `after` the last id."""

        rollouts: list[RolloutState]
        more: bool

    name, reply, has_long_reply, max_bytes = "find", FindReply, True, SHORT_BYTES
    statuses: list[Status] = Field([], max_length=len(Status))
    tasks: list[Number] = Field([], max_length=1000)
    ids: Ids = Field([])
    use: RolloutPurpose | None = None
    sort: Literal["id", "-id"] = "id"
    after: Id | None = None
    limit: int = Field(100, ge=1, le=1000)

    async def execute(self, queue: RolloutQueue) -> dict[str, Any]:
        """Look for them."""
        fields = self.model_dump() | {name: tuple(getattr(self, name)) for name in ("statuses", "tasks", "ids")}
        page = await queue.find(RolloutQuery(**fields))
        return {"rollouts": await map_documents(page.rollouts, RolloutState.to_dict), "more": page.more}


class _AttemptRequest(StoreRequest):
    rollout: Id
    attempt: Id | None = Field(None, description="null is the last one")


class TurnsRequest(_AttemptRequest):
    """The turns of an attempt in order, each with what it was paid."""

    class TurnsReply(BaseModel):
        """In order."""

        turns: list[TurnOutput]

    name, reply, has_long_reply = "turns", TurnsReply, True

    async def execute(self, queue: RolloutQueue) -> dict[str, Any]:
        """Read them."""
        return {"turns": await map_documents(await queue.turns(self.rollout, self.attempt), messages.encode_turn)}


class EventsRequest(_AttemptRequest):
    """What was noted during an attempt, in order."""

    class EventsReply(BaseModel):
        """Each with `name`, `data` and `attempt`."""

        events: list[dict[str, Any]]

    name, reply, has_long_reply = "events", EventsReply, True

    async def execute(self, queue: RolloutQueue) -> dict[str, Any]:
        """Read them."""
        return {"events": await queue.notes(self.rollout, self.attempt)}


# -- who plays them ----------------------------------------------------------------------------------------------------


class ClaimRequest(StoreRequest):
    """Up to `n` rollouts that waited longest, as soon as there is one; none after `wait_s`."""

    class ClaimModel(BaseModel):
        """A rollout to be played, with the keys of this attempt."""

        rollout: int
        attempt: int
        task: dict[str, Any]
        use: RolloutPurpose
        limits: RolloutLimits
        resources: dict[str, Any]
        model_key: str
        reward_key: str

    class ClaimReply(BaseModel):
        """What the runner is to play."""

        claims: list[ClaimRequest.ClaimModel]

    name, reply, may_wait, caches_reply, max_bytes = "claim", ClaimReply, True, True, INLINE_BYTES
    scopes = frozenset({"admin", "runner"})
    runner: Name
    n: int = Field(1, ge=1, le=1000)
    wait_s: float = Field(0.0, ge=0, le=LONGEST_POLL)

    def empty_reply(self) -> dict[str, Any]:
        """Nothing was claimed."""
        return {"claims": []}

    async def execute(self, queue: RolloutQueue) -> dict[str, Any]:
        """Claim them."""
        return {
            "claims": await map_documents(await queue.claim(self.runner, self.n, self.wait_s), messages.encode_claim)
        }


class HeartbeatRequest(StoreRequest):
    """A runner is alive and has these attempts under way; the answer says which it is to stop, and why."""

    class HeartbeatReply(BaseModel):
        """What is to be stopped."""

        class Stop(BaseModel):
            """An attempt nobody waits for any more."""

            rollout: int
            attempt: int
            why: str

        stop: list[Stop]

    name, reply, max_bytes = "heartbeat", HeartbeatReply, SHORT_BYTES
    scopes = frozenset({"admin", "runner"})
    runner: Name
    running: list[AttemptIdModel] = Field(max_length=1000)
    told: Annotated[dict[str, Json], AfterValidator(_check_info)] | None = Field(
        None, description="what it says of itself"
    )

    async def execute(self, queue: RolloutQueue) -> dict[str, Any]:
        """Hear it."""
        stop = await queue.heartbeat(self.runner, [attempt.attempt_id for attempt in self.running], self.told)
        return {"stop": [messages.encode_attempt_id(key) | {"why": why} for key, why in stop.items()]}


# -- what is written of an attempt -------------------------------------------------------------------------------------


class WriteRequest(StoreRequest, AttemptIdModel):
    """What is written of one attempt; many of these may come in one request."""

    scopes = frozenset({"admin", "runner"})


class MarkReadyRequest(WriteRequest):
    """An attempt that was prepared runs now."""

    name = "ready"
    verb: Literal["ready"] = "ready"

    async def execute(self, queue: RolloutQueue) -> dict[str, Any]:
        """Write it."""
        await queue.mark_ready(self.attempt_id)
        return {}


class FinishRequest(WriteRequest):
    """An attempt is over. Acknowledged once it is written."""

    class FinishReply(BaseModel):
        """False where it was over before, by a timeout or a cancellation: it is kept and changes nothing."""

        counted: bool

    name, reply = "finish", FinishReply
    verb: Literal["finish"] = "finish"
    outcome: Outcome
    error: Text = ""
    reward: RewardValue | None = Field(None, description="the final one, where it was not given before")

    async def execute(self, queue: RolloutQueue) -> dict[str, Any]:
        """Write it."""
        return {"counted": await queue.finish(self.attempt_id, AttemptReport(self.outcome, self.error, self.reward))}


class RecordRewardRequest(WriteRequest):
    """What an attempt earned in all, said once; or one of its turns, any number of times, which adds up."""

    name, caches_reply = "reward", True
    scopes = frozenset({"admin", "runner", "reward"})
    verb: Literal["reward"] = "reward"
    reward: RewardValue
    turn: Id | None = None

    @property
    def must_run_once(self) -> bool:
        """What a turn is paid adds up."""
        return self.turn is not None

    async def execute(self, queue: RolloutQueue) -> dict[str, Any]:
        """Write it."""
        await queue.record_reward(self.attempt_id, self.reward, self.turn)
        return {}


class RecordNoteRequest(WriteRequest):
    """An event, or a span, that somebody will want to look at."""

    name, caches_reply = "note", True
    scopes = frozenset({"admin", "runner", "reward"})
    verb: Literal["note"] = "note"
    event: Name
    data: Json = None

    async def execute(self, queue: RolloutQueue) -> dict[str, Any]:
        """Write it."""
        await queue.record_note(self.attempt_id, self.event, self.data)
        return {}


class RecordTurnRequest(WriteRequest):
    """One call to the model; the answer is its index, which the store gives."""

    class TurnReply(BaseModel):
        """Its place in the attempt, from 0."""

        index: int

    class TurnInput(StrictModel):
        """The turn, its arrays packed as the journal keeps them."""

        index: Id = 0
        model: str = "policy"
        tags: list[str] = Field([])
        reward: float | None = None
        anchor: Number | None = None
        observed: Id | None = None
        opened: Id = 0
        finish: Literal["stop", "length", "abort"]
        text: str = ""
        arrays: str = Field(json_schema_extra={"contentEncoding": "base64"}, description="see `etude.store.blobs`")

    name, reply, caches_reply = "turn", TurnReply, True
    scopes = frozenset({"admin"})
    verb: Literal["turn"] = "turn"
    turn: TurnInput

    @property
    def must_run_once(self) -> bool:
        """A turn that is written twice is two turns."""
        return True

    async def execute(self, queue: RolloutQueue) -> dict[str, Any]:
        """Write it."""
        (turn,) = await map_documents(
            [self.turn], lambda model: messages.decode_turn(model.model_dump()), len(self.turn.arrays)
        )
        return {"index": await queue.record_turn(self.attempt_id, turn)}

    async def execute_after_restart(self, queue: RolloutQueue) -> dict[str, Any] | None:
        """A turn is known by its tokens and log-probs: two that are alike to the last bit are taken for one."""
        sent = messages.decode_turn(self.turn.model_dump())
        payload = pack_turn(sent)
        for turn in reversed(await queue.turns(self.rollout, self.attempt)):
            if turn.model == sent.model and pack_turn(turn) == payload:
                return {"index": turn.index}
        return await self.execute(queue)


# -- many at once ------------------------------------------------------------------------------------------------------


AnyWriteRequest: TypeAlias = Annotated[
    MarkReadyRequest | FinishRequest | RecordRewardRequest | RecordNoteRequest | RecordTurnRequest,
    Field(discriminator="verb"),
]
"""What may come many at a time."""


class BatchRequest(StrictModel):
    """Many writings in one request: those of one attempt are done in order, those of several beside each other. Each
    succeeds or fails by itself."""

    class BatchReply(BaseModel):
        """To each writing, in order: what it answers alone, or the status it fails with and why."""

        class Done(BaseModel):
            """What was answered."""

            done: dict[str, Any]

        class Failed(ErrorReply):
            """Why one was refused."""

            status: int

        replies: list[Done | Failed]

    writings: list[AnyWriteRequest] = Field(max_length=1000)


REQUESTS: tuple[type[StoreRequest], ...] = (
    *(
        AcquireLeaseRequest,
        EnqueueRequest,
        CancelRequest,
        SealRequest,
        WaitRequest,
        FindRequest,
        TurnsRequest,
        EventsRequest,
        HistoryRequest,
    ),
    *(
        ClaimRequest,
        HeartbeatRequest,
        MarkReadyRequest,
        FinishRequest,
        RecordRewardRequest,
        RecordNoteRequest,
        RecordTurnRequest,
    ),
    *(PutResourceRequest, GetResourceRequest, RunnersRequest, StatisticsRequest),
)
