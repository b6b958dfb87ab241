"""The base class of all requests, the field types that they share, and the model of each record.

The server validates by them. A client sends and reads the same fields as plain JSON values (`json_records`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from etude.records import Outcome, Task
from etude.store.http.request_limits import BODY_BYTES, INLINE_BYTES
from etude.store.queue.keys import Scope
from etude.store.queue.records import AttemptId, RolloutRequest
from etude.store.queue.rollout_limits import RolloutLimits, RolloutPurpose

if TYPE_CHECKING:
    from etude.store.queue.rollout_queue import RolloutQueue

T = TypeVar("T")
MAX_INLINE_DOCUMENTS = 16
"""Documents that are converted on the event loop. A longer list is converted in a thread."""
LONGEST_POLL = 30.0
"""Longest wait of one request, in seconds. For a longer wait, repeat the request."""
_DEFAULT_LIMITS = RolloutLimits()


Id: TypeAlias = Annotated[int, Field(ge=0, lt=2**63)]
Number: TypeAlias = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Seconds: TypeAlias = Annotated[float, Field(gt=0, le=1e9)]
Name: TypeAlias = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]
Text: TypeAlias = Annotated[str, Field(max_length=1_000_000)]
Json: TypeAlias = JsonValue
"""Any JSON value. NaN and infinities, which JSON does not have, travel as Python writes them; a task may hold one."""
RewardValue: TypeAlias = float | Annotated[dict[Annotated[str, Field(max_length=200)], float], Field(max_length=100)]
Ids: TypeAlias = Annotated[list[Id], Field(max_length=1000)]
"""Ids of one request. For more, send several requests."""


async def map_documents(items: Sequence[T], convert: Callable[[T], Any], size: int = 0) -> list[Any]:
    """Convert each item to or from its form in a message. Many items, or many bytes, are converted in a thread."""
    if len(items) <= MAX_INLINE_DOCUMENTS and size <= INLINE_BYTES:
        return [convert(item) for item in items]
    return await asyncio.to_thread(lambda: [convert(item) for item in items])


def validation_message(error: ValidationError) -> str:
    """Return the first problems of a request that is not valid, as a sentence."""
    problems = error.errors(include_url=False, include_input=False, include_context=False)
    message = "; ".join(
        f"{'.'.join(map(str, problem['loc'])) or 'the body'}: {problem['msg']}" for problem in problems[:5]
    )
    more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
    return f"The body is not valid: {message}{more}."


class StrictModel(BaseModel):
    """Base of all parts of a request: no unknown fields, no NaN or infinities, no text in place of a number."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)


class ReplyModel(BaseModel):
    """Base of all parts of a reply. A client ignores the fields that it does not know."""


class EmptyReply(ReplyModel):
    """An empty object: the request succeeded."""


class ErrorReply(ReplyModel):
    """The error of a request that was refused or failed."""

    class ErrorDetail(ReplyModel):
        """The kind of the error, its message, and the id of the request."""

        kind: str
        message: str
        request: str = ""

    error: ErrorDetail


# -- attempts, rollouts and claims -------------------------------------------------------------------------------------


class AttemptIdModel(StrictModel):
    """The id of an attempt."""

    rollout: Id
    attempt: Id

    @property
    def attempt_id(self) -> AttemptId:
        """The attempt that the request names."""
        return AttemptId(self.rollout, self.attempt)


class TaskModel(StrictModel):
    """A task: its ordinal, the fields of its prompt, and the name of its source."""

    ordinal: Number
    fields: dict[str, Json]
    source: str = ""


class RolloutLimitsModel(StrictModel):
    """Time limits and retries of a rollout. A null limit is no limit."""

    timeout_s: Seconds | None = _DEFAULT_LIMITS.timeout_s
    unresponsive_s: Seconds = _DEFAULT_LIMITS.unresponsive_s
    queue_timeout_s: Seconds | None = _DEFAULT_LIMITS.queue_timeout_s
    max_attempts: int = Field(_DEFAULT_LIMITS.max_attempts, ge=1, le=1_000_000)
    retry_on: list[Outcome] = Field(list(_DEFAULT_LIMITS.retry_on), max_length=len(Outcome))


class RolloutRequestModel(StrictModel):
    """A rollout to enqueue."""

    task: TaskModel
    sample: Number = 0
    id: Number | None = Field(None, description="id of the rollout, 0 or more; with null the store assigns one")
    use: RolloutPurpose = "train"
    limits: RolloutLimitsModel = RolloutLimitsModel.model_construct()

    def to_request(self) -> RolloutRequest:
        """Return the record that a rollout queue takes."""
        limits = RolloutLimits.from_dict(self.limits.model_dump())
        return RolloutRequest(Task(**self.task.model_dump()), self.sample, self.id, self.use, limits)


class ClaimModel(ReplyModel):
    """A rollout for the runner to execute, with the keys of this attempt."""

    rollout: int
    attempt: int
    task: dict[str, Any]
    use: RolloutPurpose
    limits: RolloutLimits
    resources: dict[str, Any]
    model_key: str
    reward_key: str


class Runner(ReplyModel):
    """The attempts of a runner, the seconds since it was last active, and its own data."""

    name: str
    running: list[dict[str, int]]
    silent_s: float
    info: dict[str, Any]


# -- turns and events --------------------------------------------------------------------------------------------------


class TurnModel(StrictModel):
    """A model call. Its arrays are packed as the journal stores them."""

    index: Id = 0
    model: str = "policy"
    tags: list[str] = Field([])
    reward: float | None = None
    anchor: Number | None = None
    observed: Id | None = None
    opened: Id = 0
    finish_reason: Literal["stop", "length", "abort"]
    text: str = ""
    arrays: str = Field(
        json_schema_extra={"contentEncoding": "base64"}, description="packed arrays, see `etude.store.journal.blobs`"
    )


class EventModel(ReplyModel):
    """An event: its kind, its rollout, its fields, and its payload in base64."""

    kind: str
    rollout: int | None
    body: dict[str, Any]
    payload: str = Field(json_schema_extra={"contentEncoding": "base64"})


# -- requests ----------------------------------------------------------------------------------------------------------


class StoreRequest(StrictModel):
    """A request to a rollout queue."""

    name: ClassVar[str]
    reply: ClassVar[type[BaseModel]] = EmptyReply
    scopes: ClassVar[frozenset[Scope]] = frozenset({"admin"})
    """Scopes of the keys that may send the request. A reward key may write its own attempt only."""
    wait_field: ClassVar[str] = ""
    """The field with the seconds that the request may wait for a result; empty if it does not wait."""
    max_bytes: ClassVar[int] = BODY_BYTES
    """Largest size of the body, in bytes."""
    has_long_reply: ClassVar[bool] = False
    """True if the reply may be long, and is therefore encoded in a thread."""
    caches_reply: ClassVar[bool] = False
    """True if a second execution has another effect than one. The reply is then cached for repeated requests."""

    @property
    def is_reply_cached(self) -> bool:
        """True if the reply to this one is cached."""
        return self.caches_reply

    @property
    def must_run_once(self) -> bool:
        """True if the request must never run twice, even if the server was restarted in between."""
        return False

    async def execute_after_restart(self, queue: RolloutQueue) -> BaseModel | None:  # noqa: ARG002
        """Execute a request that must run once, and that another instance of the server may have executed.

        Return its reply if the queue shows the effect of the first execution. If it shows that there was none, execute
        the request now. Return None if that cannot be known.
        """
        return None

    def empty_reply(self) -> BaseModel:
        """Return the reply to a wait that ended without a result."""
        raise NotImplementedError(f"{type(self).__name__} may wait, so it must define its empty reply.")

    async def execute(self, queue: RolloutQueue) -> BaseModel:
        """Execute the request on a queue, and return its reply."""
        raise NotImplementedError(f"{type(self).__name__} must define its execution on a rollout queue.")
