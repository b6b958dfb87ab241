"""The requests of the HTTP API: the body of each, its required key, its effect, and its reply.

Each is a model whose fields are the body of `POST /v1/store/NAME`. The list `REQUESTS` at the end defines the routes,
the validation of bodies, the access check and the OpenAPI document. So they cannot disagree.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, Field

from etude.records import Outcome
from etude.store import messages
from etude.store.admin_requests import ADMIN_REQUESTS
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


def _check_info(info: dict[str, Any]) -> dict[str, Any]:
    check_size(info, "The runner's `told`", *RUNNER_INFO)
    return info


# -- for the trainer ---------------------------------------------------------------------------------------------------


class EnqueueRequest(StoreRequest):
    """Queue rollouts, all or none. A rollout that was enqueued before with the same id and content is not queued
    again."""

    class EnqueueReply(BaseModel):
        """The ids of the rollouts, in the order of the request."""

        ids: list[int]

    name, reply, caches_reply = "enqueue", EnqueueReply, True
    wanted: list[RolloutRequestModel]

    @property
    def must_run_once(self) -> bool:
        """True if a rollout has no id, since it would be queued again."""
        return any(wanted.id is None for wanted in self.wanted)

    async def execute(self, queue: RolloutQueue) -> dict[str, Any]:
        return {"ids": await queue.enqueue(await map_documents(self.wanted, RolloutRequestModel.to_request))}


class CancelRequest(StoreRequest):
    """Cancel rollouts, queued or running, and record the reason. Runners learn of it at their next heartbeat. Rollouts
    that have ended stay as they are."""

    name = "cancel"
    rollouts: Ids
    why: Annotated[Text, Field(min_length=1)]

    async def execute(self, queue: RolloutQueue) -> dict[str, Any]:
        await queue.cancel(self.rollouts, self.why)
        return {}


class WaitRequest(StoreRequest):
    """Wait for rollouts to end. The reply lists the rollouts that ended after a cursor, in order; it is empty if none
    ended in time."""

    class WaitReply(BaseModel):
        """The rollouts that ended, and the cursor of the next request."""

        cursor: int
        rollouts: list[RolloutState]

    name, reply, may_wait, has_long_reply = "wait", WaitReply, True, True
    max_bytes = INLINE_BYTES
    cursor: Id = Field(0, description="cursor of the last reply; 0 is the beginning")
    timeout_s: float = Field(0.0, ge=0, le=LONGEST_POLL)
    limit: int = Field(256, ge=1, le=1000)

    def empty_reply(self) -> dict[str, Any]:
        return {"cursor": self.cursor, "rollouts": []}

    async def execute(self, queue: RolloutQueue) -> dict[str, Any]:
        cursor, states = await queue.wait(self.cursor, self.timeout_s, self.limit)
        return {"cursor": cursor, "rollouts": await map_documents(states, RolloutState.to_dict)}


class FindRequest(StoreRequest):
    """Find rollouts by status, task, id and use. An empty or null field matches every rollout."""

    class FindReply(BaseModel):
        """At most `limit` rollouts. If `more` is true, send the request again with `after` set to the last id."""

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
        fields = self.model_dump() | {name: tuple(getattr(self, name)) for name in ("statuses", "tasks", "ids")}
        page = await queue.find(RolloutQuery(**fields))
        return {"rollouts": await map_documents(page.rollouts, RolloutState.to_dict), "more": page.more}


class _AttemptRequest(StoreRequest):
    rollout: Id
    attempt: Id | None = Field(None, description="index of the attempt; null is the last one")


class TurnsRequest(_AttemptRequest):
    """Read the turns of an attempt in order, each with its reward."""

    class TurnsReply(BaseModel):
        """The turns, in order."""

        turns: list[TurnOutput]

    name, reply, has_long_reply = "turns", TurnsReply, True

    async def execute(self, queue: RolloutQueue) -> dict[str, Any]:
        return {"turns": await map_documents(await queue.turns(self.rollout, self.attempt), messages.encode_turn)}


class EventsRequest(_AttemptRequest):
    """Read the notes and spans of an attempt, in order."""

    class EventsReply(BaseModel):
        """The notes, each with `name`, `data` and `attempt`."""

        events: list[dict[str, Any]]

    name, reply, has_long_reply = "events", EventsReply, True

    async def execute(self, queue: RolloutQueue) -> dict[str, Any]:
        return {"events": await queue.notes(self.rollout, self.attempt)}


# -- for runners -------------------------------------------------------------------------------------------------------


class ClaimRequest(StoreRequest):
    """Claim up to `n` rollouts: those of use `val` first, and the longest queued first within a use. The request waits
    up to `wait_s` seconds for the first one."""

    class ClaimModel(BaseModel):
        """A rollout for the runner to execute, with the keys of this attempt."""

        rollout: int
        attempt: int
        task: dict[str, Any]
        use: RolloutPurpose
        limits: RolloutLimits
        resources: dict[str, Any]
        model_key: str
        reward_key: str

    class ClaimReply(BaseModel):
        """The rollouts that the runner has claimed."""

        claims: list[ClaimRequest.ClaimModel]

    name, reply, may_wait, caches_reply, max_bytes = "claim", ClaimReply, True, True, INLINE_BYTES
    scopes = frozenset({"admin", "runner"})
    runner: Name
    n: int = Field(1, ge=1, le=1000)
    wait_s: float = Field(0.0, ge=0, le=LONGEST_POLL)

    def empty_reply(self) -> dict[str, Any]:
        return {"claims": []}

    async def execute(self, queue: RolloutQueue) -> dict[str, Any]:
        return {
            "claims": await map_documents(await queue.claim(self.runner, self.n, self.wait_s), messages.encode_claim)
        }


class HeartbeatRequest(StoreRequest):
    """Renew the leases of a runner's attempts. The reply lists the attempts that it must stop, with the reasons."""

    class HeartbeatReply(BaseModel):
        """The attempts that the runner must stop."""

        class Stop(BaseModel):
            """An attempt that is over or belongs to another runner, and the reason."""

            rollout: int
            attempt: int
            why: str

        stop: list[Stop]

    name, reply, max_bytes = "heartbeat", HeartbeatReply, SHORT_BYTES
    scopes = frozenset({"admin", "runner"})
    runner: Name
    running: list[AttemptIdModel] = Field(max_length=1000)
    told: Annotated[dict[str, Json], AfterValidator(_check_info)] | None = Field(
        None, description="data of the runner about itself"
    )

    async def execute(self, queue: RolloutQueue) -> dict[str, Any]:
        stop = await queue.heartbeat(self.runner, [attempt.attempt_id for attempt in self.running], self.told)
        return {"stop": [messages.encode_attempt_id(key) | {"why": why} for key, why in stop.items()]}


# -- records of an attempt ---------------------------------------------------------------------------------------------


class WriteRequest(StoreRequest, AttemptIdModel):
    """A write of one attempt. A batch request may hold many."""

    scopes = frozenset({"admin", "runner"})


class MarkReadyRequest(WriteRequest):
    """Move an attempt from preparing to running. Its first turn, note or reward does the same."""

    name = "ready"
    verb: Literal["ready"] = "ready"

    async def execute(self, queue: RolloutQueue) -> dict[str, Any]:
        await queue.mark_ready(self.attempt_id)
        return {}


class FinishRequest(WriteRequest):
    """Report the end of an attempt. The reply is sent once the end is written."""

    class FinishReply(BaseModel):
        """`counted` is false if a timeout or a cancellation ended the attempt before; the report is then stored and
        changes nothing."""

        counted: bool

    name, reply = "finish", FinishReply
    verb: Literal["finish"] = "finish"
    outcome: Outcome
    error: Text = ""
    reward: RewardValue | None = Field(None, description="the final reward, unless recorded before")

    async def execute(self, queue: RolloutQueue) -> dict[str, Any]:
        return {"counted": await queue.finish(self.attempt_id, AttemptReport(self.outcome, self.error, self.reward))}


class RecordRewardRequest(WriteRequest):
    """Record the reward of an attempt, once; or the reward of one of its turns, any number of times. Rewards of a turn
    add up."""

    name, caches_reply = "reward", True
    scopes = frozenset({"admin", "runner", "reward"})
    verb: Literal["reward"] = "reward"
    reward: RewardValue
    turn: Id | None = None

    @property
    def must_run_once(self) -> bool:
        """True for the reward of a turn, since it adds up."""
        return self.turn is not None

    async def execute(self, queue: RolloutQueue) -> dict[str, Any]:
        await queue.record_reward(self.attempt_id, self.reward, self.turn)
        return {}


class RecordNoteRequest(WriteRequest):
    """Record an event or a span of an attempt, for people to inspect. Training does not depend on it."""

    name, caches_reply = "note", True
    scopes = frozenset({"admin", "runner", "reward"})
    verb: Literal["note"] = "note"
    event: Name
    data: Json = None

    async def execute(self, queue: RolloutQueue) -> dict[str, Any]:
        await queue.record_note(self.attempt_id, self.event, self.data)
        return {}


class RecordTurnRequest(WriteRequest):
    """Record one model call. The reply is its index, which the store assigns."""

    class TurnReply(BaseModel):
        """The index of the turn in its attempt, from 0."""

        index: int

    class TurnInput(StrictModel):
        """A model call. Its arrays are packed as the journal stores them."""

        index: Id = 0
        model: str = "policy"
        tags: list[str] = Field([])
        reward: float | None = None
        anchor: Number | None = None
        observed: Id | None = None
        opened: Id = 0
        finish: Literal["stop", "length", "abort"]
        text: str = ""
        arrays: str = Field(
            json_schema_extra={"contentEncoding": "base64"}, description="packed arrays, see `etude.store.blobs`"
        )

    name, reply, caches_reply = "turn", TurnReply, True
    scopes = frozenset({"admin"})
    verb: Literal["turn"] = "turn"
    turn: TurnInput
    began: float = Field(0.0, ge=0, description="time of the call in seconds since 1970; 0 is unknown")

    @property
    def must_run_once(self) -> bool:
        """True, since a turn that is written twice would be two turns."""
        return True

    async def execute(self, queue: RolloutQueue) -> dict[str, Any]:
        (turn,) = await map_documents(
            [self.turn], lambda model: messages.decode_turn(model.model_dump()), len(self.turn.arrays)
        )
        return {"index": await queue.record_turn(self.attempt_id, turn, self.began)}

    async def execute_after_restart(self, queue: RolloutQueue) -> dict[str, Any] | None:
        """Find the turn by its tokens and log-probs, and write it if it is missing. Two turns with the same bits count
        as one."""
        sent = messages.decode_turn(self.turn.model_dump())
        payload = pack_turn(sent)
        for turn in reversed(await queue.turns(self.rollout, self.attempt)):
            if turn.model == sent.model and pack_turn(turn) == payload:
                return {"index": turn.index}
        return await self.execute(queue)


# -- batches -----------------------------------------------------------------------------------------------------------


AnyWriteRequest: TypeAlias = Annotated[
    MarkReadyRequest | FinishRequest | RecordRewardRequest | RecordNoteRequest | RecordTurnRequest,
    Field(discriminator="verb"),
]
"""A write that a batch request may hold."""


class BatchRequest(StrictModel):
    """Send many writes in one request. Writes of one attempt run in order, those of several attempts concurrently. Each
    succeeds or fails on its own."""

    class BatchReply(BaseModel):
        """The reply to each write, in order: its own reply, or its error status and message."""

        class Done(BaseModel):
            """The reply to a write that succeeded."""

            done: dict[str, Any]

        class Failed(ErrorReply):
            """The status and the error of a write that failed."""

            status: int

        replies: list[Done | Failed]

    writings: list[AnyWriteRequest] = Field(max_length=1000)


REQUESTS: tuple[type[StoreRequest], ...] = (
    *(EnqueueRequest, CancelRequest, WaitRequest, FindRequest, TurnsRequest, EventsRequest),
    *(ClaimRequest, HeartbeatRequest, MarkReadyRequest, FinishRequest),
    *(RecordRewardRequest, RecordNoteRequest, RecordTurnRequest),
    *ADMIN_REQUESTS,
)
