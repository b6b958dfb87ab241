"""The verbs of a desk as requests: what each must say, who may say it, what it does, and what is answered.

Each is a form whose fields are the body of `POST /v1/store/NAME`. The routes, the check of every body, who may do what,
and the OpenAPI description all follow from the one list `VERBS` at the end, so they cannot disagree.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, Field

from etude.records import Outcome
from etude.store import wire
from etude.store.blobs import pack_turn
from etude.store.bounds import FEW_BYTES, OF_ITSELF, SHORT_BYTES, small
from etude.store.desk import Desk, Ended, Find, Limits, Use
from etude.store.forms import (
    LONGEST_POLL,
    Earned,
    Form,
    Id,
    Ids,
    Json,
    KeyForm,
    Name,
    Number,
    Problem,
    Text,
    TurnRead,
    Verb,
    WantedForm,
    documents,
)
from etude.store.run_verbs import History, Keep, Put, ResourceForm, Runners, Seal, Statistics
from etude.store.states import RolloutState, Status

__all__ = ["VERBS", "AnyWriting", "Batch", "ClaimForm", "Note", "RewardForm", "Writing"]


def _short(told: dict[str, Any]) -> dict[str, Any]:
    small(told, "What a runner says of itself", *OF_ITSELF)
    return told


# -- who wants rollouts ------------------------------------------------------------------------------------------------


class Enqueue(Verb):
    """Queue rollouts, all or none. One asked for before in the same words is not queued again."""

    class EnqueueReply(BaseModel):
        """Their ids, in the order asked for."""

        ids: list[int]

    name, reply, once = "enqueue", EnqueueReply, True
    wanted: list[WantedForm]

    @property
    def adds(self) -> bool:
        """What has no id of its own is queued each time."""
        return any(wanted.id is None for wanted in self.wanted)

    async def at(self, desk: Desk) -> dict[str, Any]:
        """Queue them."""
        return {"ids": await desk.enqueue(await documents(self.wanted, WantedForm.made))}


class Cancel(Verb):
    """Nobody wants these any more, for this reason; what runs is told to stop at its next heartbeat. Those that ended
    stay so."""

    name = "cancel"
    rollouts: Ids
    why: Annotated[Text, Field(min_length=1)]

    async def at(self, desk: Desk) -> dict[str, Any]:
        """Cancel them."""
        await desk.cancel(self.rollouts, self.why)
        return {}


class Wait(Verb):
    """Rollouts that came to their end after a cursor, in the order they did; none after some seconds."""

    class WaitReply(BaseModel):
        """What ended, and the cursor to ask on with."""

        cursor: int
        rollouts: list[RolloutState]

    name, reply, waits, long = "wait", WaitReply, True, True
    most = FEW_BYTES
    cursor: Id = Field(0, description="0 is the beginning")
    timeout_s: float = Field(0.0, ge=0, le=LONGEST_POLL)
    limit: int = Field(256, ge=1, le=1000)

    def nothing(self) -> dict[str, Any]:
        """Nothing ended."""
        return {"cursor": self.cursor, "rollouts": []}

    async def at(self, desk: Desk) -> dict[str, Any]:
        """Wait."""
        cursor, states = await desk.wait(self.cursor, self.timeout_s, self.limit)
        return {"cursor": cursor, "rollouts": await documents(states, RolloutState.document)}


class FindForm(Verb):
    """The rollouts that are looked for; what is empty or null does not matter."""

    class FindReply(BaseModel):
        """At most as many as asked for; `more` says whether to ask on with `after` the last id."""

        rollouts: list[RolloutState]
        more: bool

    name, reply, long, most = "find", FindReply, True, SHORT_BYTES
    statuses: list[Status] = Field([], max_length=len(Status))
    tasks: list[Number] = Field([], max_length=1000)
    ids: Ids = Field([])
    use: Use | None = None
    sort: Literal["id", "-id"] = "id"
    after: Id | None = None
    limit: int = Field(100, ge=1, le=1000)

    async def at(self, desk: Desk) -> dict[str, Any]:
        """Look for them."""
        told = self.model_dump() | {name: tuple(getattr(self, name)) for name in ("statuses", "tasks", "ids")}
        page = await desk.find(Find(**told))
        return {"rollouts": await documents(page.rollouts, RolloutState.document), "more": page.more}


class _Past(Verb):
    rollout: Id
    attempt: Id | None = Field(None, description="null is the last one")


class Turns(_Past):
    """The turns of an attempt in order, each with what it was paid."""

    class TurnsReply(BaseModel):
        """In order."""

        turns: list[TurnRead]

    name, reply, long = "turns", TurnsReply, True

    async def at(self, desk: Desk) -> dict[str, Any]:
        """Read them."""
        return {"turns": await documents(await desk.turns(self.rollout, self.attempt), wire.turn_document)}


class Events(_Past):
    """What was noted during an attempt, in order."""

    class EventsReply(BaseModel):
        """Each with `name`, `data` and `attempt`."""

        events: list[dict[str, Any]]

    name, reply, long = "events", EventsReply, True

    async def at(self, desk: Desk) -> dict[str, Any]:
        """Read them."""
        return {"events": await desk.events(self.rollout, self.attempt)}


# -- who plays them ----------------------------------------------------------------------------------------------------


class ClaimForm(Verb):
    """Up to `n` rollouts that waited longest, as soon as there is one; none after `wait_s`."""

    class Claimed(BaseModel):
        """A rollout to be played, with the keys of this attempt."""

        rollout: int
        attempt: int
        task: dict[str, Any]
        use: Use
        limits: Limits
        resources: dict[str, Any]
        model_key: str
        reward_key: str

    class ClaimReply(BaseModel):
        """What the runner is to play."""

        claims: list[ClaimForm.Claimed]

    name, reply, waits, once, most = "claim", ClaimReply, True, True, FEW_BYTES
    opens = frozenset({"admin", "runner"})
    runner: Name
    n: int = Field(1, ge=1, le=1000)
    wait_s: float = Field(0.0, ge=0, le=LONGEST_POLL)

    def nothing(self) -> dict[str, Any]:
        """Nothing was claimed."""
        return {"claims": []}

    async def at(self, desk: Desk) -> dict[str, Any]:
        """Claim them."""
        return {"claims": await documents(await desk.claim(self.runner, self.n, self.wait_s), wire.claim_document)}


class Heartbeat(Verb):
    """A runner is alive and has these attempts under way; the answer says which it is to stop, and why."""

    class HeartbeatReply(BaseModel):
        """What is to be stopped."""

        class Stop(BaseModel):
            """An attempt nobody waits for any more."""

            rollout: int
            attempt: int
            why: str

        stop: list[Stop]

    name, reply, most = "heartbeat", HeartbeatReply, SHORT_BYTES
    opens = frozenset({"admin", "runner"})
    runner: Name
    running: list[KeyForm] = Field(max_length=1000)
    told: Annotated[dict[str, Json], AfterValidator(_short)] | None = Field(None, description="what it says of itself")

    async def at(self, desk: Desk) -> dict[str, Any]:
        """Hear it."""
        stop = await desk.heartbeat(self.runner, [one.key for one in self.running], self.told)
        return {"stop": [wire.key_document(key) | {"why": why} for key, why in stop.items()]}


# -- what is written of an attempt -------------------------------------------------------------------------------------


class Writing(Verb, KeyForm):
    """What is written of one attempt; many of these may come in one request."""

    opens = frozenset({"admin", "runner"})


class Ready(Writing):
    """An attempt that was prepared runs now."""

    name = "ready"
    verb: Literal["ready"] = "ready"

    async def at(self, desk: Desk) -> dict[str, Any]:
        """Write it."""
        await desk.ready(self.key)
        return {}


class Finish(Writing):
    """An attempt is over. Acknowledged once it is written."""

    class FinishReply(BaseModel):
        """False where it was over before, by a timeout or a cancellation: it is kept and changes nothing."""

        counted: bool

    name, reply = "finish", FinishReply
    verb: Literal["finish"] = "finish"
    outcome: Outcome
    error: Text = ""
    reward: Earned | None = Field(None, description="the final one, where it was not given before")

    async def at(self, desk: Desk) -> dict[str, Any]:
        """Write it."""
        return {"counted": await desk.finish(self.key, Ended(self.outcome, self.error, self.reward))}


class RewardForm(Writing):
    """What an attempt earned in all, said once; or one of its turns, any number of times, which adds up."""

    name, once = "reward", True
    opens = frozenset({"admin", "runner", "reward"})
    verb: Literal["reward"] = "reward"
    reward: Earned
    turn: Id | None = None

    @property
    def adds(self) -> bool:
        """What a turn is paid adds up."""
        return self.turn is not None

    async def at(self, desk: Desk) -> dict[str, Any]:
        """Write it."""
        await desk.reward(self.key, self.reward, self.turn)
        return {}


class Note(Writing):
    """An event, or a span, that somebody will want to look at."""

    name, once = "note", True
    opens = frozenset({"admin", "runner", "reward"})
    verb: Literal["note"] = "note"
    event: Name
    data: Json = None

    async def at(self, desk: Desk) -> dict[str, Any]:
        """Write it."""
        await desk.note(self.key, self.event, self.data)
        return {}


class TurnForm(Writing):
    """One call to the model; the answer is its index, which the store gives."""

    class TurnReply(BaseModel):
        """Its place in the attempt, from 0."""

        index: int

    class TurnSaid(Form):
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

    name, reply, once = "turn", TurnReply, True
    opens = frozenset({"admin"})
    verb: Literal["turn"] = "turn"
    turn: TurnSaid

    @property
    def adds(self) -> bool:
        """A turn that is written twice is two turns."""
        return True

    async def at(self, desk: Desk) -> dict[str, Any]:
        """Write it."""
        (turn,) = await documents([self.turn], lambda said: wire.turn_of(said.model_dump()), len(self.turn.arrays))
        return {"index": await desk.turn(self.key, turn)}

    async def again(self, desk: Desk) -> dict[str, Any] | None:
        """A turn is known by its tokens and log-probs: two that are alike to the last bit are taken for one."""
        sent = wire.turn_of(self.turn.model_dump())
        payload = pack_turn(sent)
        for turn in reversed(await desk.turns(self.rollout, self.attempt)):
            if turn.model == sent.model and pack_turn(turn) == payload:
                return {"index": turn.index}
        return await self.at(desk)


# -- many at once ------------------------------------------------------------------------------------------------------


AnyWriting: TypeAlias = Annotated[Ready | Finish | RewardForm | Note | TurnForm, Field(discriminator="verb")]
"""What may come many at a time."""


class Batch(Form):
    """Many writings in one request: those of one attempt are done in order, those of several beside each other. Each
    succeeds or fails by itself."""

    class BatchReply(BaseModel):
        """To each writing, in order: what it answers alone, or the status it fails with and why."""

        class Done(BaseModel):
            """What was answered."""

            done: dict[str, Any]

        class Failed(Problem):
            """Why one was refused."""

            status: int

        replies: list[Done | Failed]

    writings: list[AnyWriting] = Field(max_length=1000)


VERBS: tuple[type[Verb], ...] = (
    *(Keep, Enqueue, Cancel, Seal, Wait, FindForm, Turns, Events, History),
    *(ClaimForm, Heartbeat, Ready, Finish, RewardForm, Note, TurnForm),
    *(Put, ResourceForm, Runners, Statistics),
)
