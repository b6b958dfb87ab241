"""The parts that requests to a desk are made of, each held to its bounds; and what all such requests have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from etude.records import Outcome
from etude.store import messages
from etude.store.keys import Scope
from etude.store.request_limits import BODY_BYTES, INLINE_BYTES
from etude.store.rollout_limits import RolloutLimits, RolloutPurpose
from etude.store.rollout_queue import AttemptId, RolloutQueue, RolloutRequest

__all__ = [
    "LONGEST_POLL",
    "AttemptIdModel",
    "EmptyReply",
    "ErrorReply",
    "Id",
    "Ids",
    "Json",
    "Name",
    "Number",
    "RewardValue",
    "RolloutRequestModel",
    "StoreRequest",
    "StrictModel",
    "Text",
    "TurnOutput",
    "map_documents",
]

T = TypeVar("T")
MAX_INLINE_DOCUMENTS = 16
"""Documents that are made at once."""
LONGEST_POLL = 30.0
"""Seconds that one request waits at most; who wants to wait longer asks again."""
_DEFAULT_LIMITS = RolloutLimits()


Id: TypeAlias = Annotated[int, Field(ge=0, lt=2**63)]
Number: TypeAlias = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Seconds: TypeAlias = Annotated[float, Field(gt=0, le=1e9)]
Name: TypeAlias = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]
Text: TypeAlias = Annotated[str, Field(max_length=1_000_000)]
Json: TypeAlias = JsonValue
"""Anything. A number that is none, which JSON does not have, travels as Python writes it: a task may have one."""
RewardValue: TypeAlias = float | Annotated[dict[Annotated[str, Field(max_length=200)], float], Field(max_length=100)]
Ids: TypeAlias = Annotated[list[Id], Field(max_length=1000)]
"""As many as one request speaks of; who has more asks more often."""


async def map_documents(items: Sequence[T], convert: Callable[[T], Any], size: int = 0) -> list[Any]:
    """Each as it goes over HTTP, or as it came that way; of many, or of many bytes, made beside the event loop."""
    if len(items) <= MAX_INLINE_DOCUMENTS and size <= INLINE_BYTES:
        return [convert(item) for item in items]
    return await asyncio.to_thread(lambda: [convert(item) for item in items])


class StrictModel(BaseModel):
    """What is said in a request: nothing unknown, no number that is none, no text for a number."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)


class AttemptIdModel(StrictModel):
    """An attempt at a rollout."""

    rollout: Id
    attempt: Id

    @property
    def attempt_id(self) -> AttemptId:
        """The attempt that is meant."""
        return AttemptId(self.rollout, self.attempt)


class TaskModel(StrictModel):
    """What is asked."""

    ordinal: Number
    fields: dict[str, Json]
    source: str = ""


class RolloutLimitsModel(StrictModel):
    """How long a rollout may take, and how often it is tried; null is without a limit."""

    timeout_s: Seconds | None = _DEFAULT_LIMITS.timeout_s
    unresponsive_s: Seconds = _DEFAULT_LIMITS.unresponsive_s
    queue_timeout_s: Seconds | None = _DEFAULT_LIMITS.queue_timeout_s
    max_attempts: int = Field(_DEFAULT_LIMITS.max_attempts, ge=1, le=1_000_000)
    retry_on: list[Outcome] = Field(list(_DEFAULT_LIMITS.retry_on), max_length=len(Outcome))


class RolloutRequestModel(StrictModel):
    """A rollout that somebody wants."""

    task: TaskModel
    sample: Number = 0
    id: Number | None = Field(None, description="its name, 0 or more; null has the store give one")
    use: RolloutPurpose = "train"
    limits: RolloutLimitsModel = Field(RolloutLimitsModel.model_validate({}))

    def to_request(self) -> RolloutRequest:
        """As a desk takes it."""
        limits = RolloutLimits.from_dict(self.limits.model_dump())
        return RolloutRequest(messages.decode_task(self.task.model_dump()), self.sample, self.id, self.use, limits)


class EmptyReply(BaseModel):
    """Done."""


class ErrorReply(BaseModel):
    """Why something was refused, or did not succeed."""

    class ErrorDetail(BaseModel):
        """Of which kind it is, in words, and which request it was."""

        kind: str
        message: str
        request: str = ""

    error: ErrorDetail


class StoreRequest(StrictModel):
    """One request to a desk."""

    name: ClassVar[str]
    reply: ClassVar[type[BaseModel]] = EmptyReply
    scopes: ClassVar[frozenset[Scope]] = frozenset({"admin"})
    """Which keys may say it; a reward key only of its own attempt."""
    may_wait: ClassVar[bool] = False
    """Whether it may take long because nothing happens, so that nobody may be there any more when it is done."""
    max_bytes: ClassVar[int] = BODY_BYTES
    """Bytes of a request."""
    has_long_reply: ClassVar[bool] = False
    """True where the answer may be long and is written beside the event loop."""
    caches_reply: ClassVar[bool] = False
    """Whether doing it twice differs from doing it once, so that the answer is kept for those who ask again."""

    @property
    def is_reply_cached(self) -> bool:
        """Whether this one's answer is kept so."""
        return self.caches_reply

    @property
    def must_run_once(self) -> bool:
        """Whether it must on no account be done twice, not even where the server was restarted in between."""
        return False

    async def execute_after_restart(self, queue: RolloutQueue) -> dict[str, Any] | None:  # noqa: ARG002
        """What came of one that must not be done twice, where an earlier life of the server may have done it: its
        answer, if the desk tells what was done, and it is done now if it was not. None where nobody can tell."""
        return None

    def empty_reply(self) -> dict[str, Any]:
        """What is answered to one who waited for what did not happen."""
        raise NotImplementedError(f"{type(self).__name__} waits, and does not say what for.")

    async def execute(self, queue: RolloutQueue) -> dict[str, Any]:
        """Do it, and say what came of it."""
        raise NotImplementedError(f"{type(self).__name__} says what it does at a desk.")


class TurnOutput(BaseModel):
    """A call to the model."""

    index: int
    model: str
    tags: list[str]
    reward: float | None
    anchor: int | None
    observed: int | None
    opened: int
    finish: str
    text: str
    arrays: str = Field(json_schema_extra={"contentEncoding": "base64"}, description="the packed arrays")
