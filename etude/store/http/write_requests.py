"""The requests that record something of an attempt, and the batch that sends many of them at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import Field

from etude.records import Outcome
from etude.store.http.json_records import decode_turn
from etude.store.http.request_models import (
    AttemptIdModel,
    EmptyReply,
    ErrorReply,
    Id,
    Json,
    Name,
    ReplyModel,
    RewardValue,
    StoreRequest,
    Text,
    TurnModel,
    map_documents,
)
from etude.store.journal.blobs import pack_turn
from etude.store.queue.records import AttemptReport

if TYPE_CHECKING:
    from etude.store.queue.rollout_queue import RolloutQueue


class WriteRequest(StoreRequest, AttemptIdModel):
    """A write of one attempt. A batch request may hold many."""

    scopes = frozenset({"admin", "runner"})


class MarkReadyRequest(WriteRequest):
    """Move an attempt from preparing to running. Its first turn, note or reward does the same."""

    name = "ready"
    verb: Literal["ready"] = "ready"

    async def execute(self, queue: RolloutQueue) -> EmptyReply:
        await queue.ready(self.attempt_id)
        return EmptyReply()


class FinishReply(ReplyModel):
    """`counted` is false if a timeout or a cancellation ended the attempt before; the report is then stored and
    changes nothing."""

    counted: bool


class FinishRequest(WriteRequest):
    """Report the end of an attempt. The reply is sent once the end is written."""

    name, reply = "finish", FinishReply
    verb: Literal["finish"] = "finish"
    outcome: Outcome
    error: Text = ""
    reward: RewardValue | None = Field(None, description="the final reward, unless recorded before")

    async def execute(self, queue: RolloutQueue) -> FinishReply:
        report = AttemptReport(self.outcome, self.error, self.reward)
        return FinishReply(counted=await queue.finish(self.attempt_id, report))


class RecordRewardRequest(WriteRequest):
    """Record the reward of an attempt, once; or the reward of one of its turns, any number of times. Rewards of a turn
    add up."""

    name, caches_reply = "record_reward", True
    scopes = frozenset({"admin", "runner", "reward"})
    verb: Literal["record_reward"] = "record_reward"
    reward: RewardValue
    turn: Id | None = None

    @property
    def must_run_once(self) -> bool:
        """True for the reward of a turn, since it adds up."""
        return self.turn is not None

    async def execute(self, queue: RolloutQueue) -> EmptyReply:
        await queue.record_reward(self.attempt_id, self.reward, self.turn)
        return EmptyReply()


class RecordNoteRequest(WriteRequest):
    """Record an event or a span of an attempt, for people to inspect. Training does not depend on it."""

    name, caches_reply = "record_note", True
    scopes = frozenset({"admin", "runner", "reward"})
    verb: Literal["record_note"] = "record_note"
    event: Name
    data: Json = None

    async def execute(self, queue: RolloutQueue) -> EmptyReply:
        await queue.record_note(self.attempt_id, self.event, self.data)
        return EmptyReply()


class TurnReply(ReplyModel):
    """The index of the turn in its attempt, from 0."""

    index: int


class RecordTurnRequest(WriteRequest):
    """Record one model call. The reply is its index, which the store assigns."""

    name = "record_turn"
    reply = TurnReply
    caches_reply = True
    scopes = frozenset({"admin"})
    verb: Literal["record_turn"] = "record_turn"
    turn: TurnModel
    began: float = Field(0.0, ge=0, description="time of the call in seconds since 1970; 0 is unknown")

    @property
    def must_run_once(self) -> bool:
        """True, since a turn that is written twice would be two turns."""
        return True

    async def execute(self, queue: RolloutQueue) -> TurnReply:
        (turn,) = await map_documents([self.turn.model_dump()], decode_turn, len(self.turn.arrays))
        return TurnReply(index=await queue.record_turn(self.attempt_id, turn, self.began))

    async def execute_after_restart(self, queue: RolloutQueue) -> TurnReply:
        """Find the turn by its tokens and log-probs, and write it if it is missing. Two turns with the same bits count
        as one."""
        sent = decode_turn(self.turn.model_dump())
        payload = pack_turn(sent)
        for turn in reversed(await queue.turns(self.rollout, self.attempt)):
            if turn.model == sent.model and pack_turn(turn) == payload:
                return TurnReply(index=turn.index)
        return await self.execute(queue)


AnyWriteRequest: TypeAlias = Annotated[
    MarkReadyRequest | FinishRequest | RecordRewardRequest | RecordNoteRequest | RecordTurnRequest,
    Field(discriminator="verb"),
]
"""A write that a batch request may hold."""


class BatchReply(ReplyModel):
    """The reply to each write, in order: its own reply, or its error status and message."""

    class Done(ReplyModel):
        """The reply to a write that succeeded."""

        done: dict[str, Any]

    class Failed(ErrorReply):
        """The status and the error of a write that failed."""

        status: int

    replies: list[Done | Failed]


class BatchRequest(StoreRequest):
    """Send many writes in one request. Writes of one attempt run in order, those of several attempts concurrently. Each
    succeeds or fails on its own."""

    name = "batch"
    reply = BatchReply
    caches_reply = True
    scopes = frozenset({"admin", "runner", "reward"})
    writings: list[AnyWriteRequest] = Field(max_length=1000)
