"""The parts that requests to a desk are made of, each held to its bounds; and what all such requests have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from etude.records import Outcome
from etude.store import wire
from etude.store.bounds import BODY_BYTES, FEW_BYTES
from etude.store.desk import Desk, Key, Wanted
from etude.store.keys import Scope
from etude.store.limits import Limits, Use

__all__ = [
    "LONGEST_POLL",
    "Earned",
    "Form",
    "Id",
    "Ids",
    "Json",
    "KeyForm",
    "Name",
    "Nothing",
    "Number",
    "Problem",
    "Text",
    "TurnRead",
    "Verb",
    "WantedForm",
    "documents",
]

T = TypeVar("T")
FEW = 16
"""Documents that are made at once."""
LONGEST_POLL = 30.0
"""Seconds that one request waits at most; who wants to wait longer asks again."""
_USUAL = Limits()


Id: TypeAlias = Annotated[int, Field(ge=0, lt=2**63)]
Number: TypeAlias = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Seconds: TypeAlias = Annotated[float, Field(gt=0, le=1e9)]
Name: TypeAlias = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]
Text: TypeAlias = Annotated[str, Field(max_length=1_000_000)]
Json: TypeAlias = JsonValue
"""Anything. A number that is none, which JSON does not have, travels as Python writes it: a task may have one."""
Earned: TypeAlias = float | Annotated[dict[Annotated[str, Field(max_length=200)], float], Field(max_length=100)]
Ids: TypeAlias = Annotated[list[Id], Field(max_length=1000)]
"""As many as one request speaks of; who has more asks more often."""


async def documents(of: Sequence[T], document: Callable[[T], Any], size: int = 0) -> list[Any]:
    """Each as it goes over HTTP, or as it came that way; of many, or of many bytes, made beside the event loop."""
    if len(of) <= FEW and size <= FEW_BYTES:
        return [document(each) for each in of]
    return await asyncio.to_thread(lambda: [document(each) for each in of])


class Form(BaseModel):
    """What is said in a request: nothing unknown, no number that is none, no text for a number."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)


class KeyForm(Form):
    """An attempt at a rollout."""

    rollout: Id
    attempt: Id

    @property
    def key(self) -> Key:
        """The attempt that is meant."""
        return Key(self.rollout, self.attempt)


class TaskForm(Form):
    """What is asked."""

    ordinal: Number
    fields: dict[str, Json]
    source: str = ""


class LimitsForm(Form):
    """How long a rollout may take, and how often it is tried; null is without a limit."""

    timeout_s: Seconds | None = _USUAL.timeout_s
    unresponsive_s: Seconds = _USUAL.unresponsive_s
    queue_timeout_s: Seconds | None = _USUAL.queue_timeout_s
    max_attempts: int = Field(_USUAL.max_attempts, ge=1, le=1_000_000)
    retry_on: list[Outcome] = Field(list(_USUAL.retry_on), max_length=len(Outcome))


class WantedForm(Form):
    """A rollout that somebody wants."""

    task: TaskForm
    sample: Number = 0
    id: Number | None = Field(None, description="its name, 0 or more; null has the store give one")
    use: Use = "train"
    limits: LimitsForm = Field(LimitsForm.model_validate({}))

    def made(self) -> Wanted:
        """As a desk takes it."""
        limits = Limits.restored(self.limits.model_dump())
        return Wanted(wire.task_of(self.task.model_dump()), self.sample, self.id, self.use, limits)


class Nothing(BaseModel):
    """Done."""


class Problem(BaseModel):
    """Why something was refused, or did not succeed."""

    class Trouble(BaseModel):
        """Of which kind it is, in words, and which request it was."""

        kind: str
        message: str
        request: str = ""

    error: Trouble


class Verb(Form):
    """One request to a desk."""

    name: ClassVar[str]
    reply: ClassVar[type[BaseModel]] = Nothing
    opens: ClassVar[frozenset[Scope]] = frozenset({"admin"})
    """Which keys may say it; a reward key only of its own attempt."""
    waits: ClassVar[bool] = False
    """Whether it may take long because nothing happens, so that nobody may be there any more when it is done."""
    most: ClassVar[int] = BODY_BYTES
    """Bytes of a request."""
    long: ClassVar[bool] = False
    """True where the answer may be long and is written beside the event loop."""
    once: ClassVar[bool] = False
    """Whether doing it twice differs from doing it once, so that the answer is kept for those who ask again."""

    @property
    def kept(self) -> bool:
        """Whether this one's answer is kept so."""
        return self.once

    @property
    def adds(self) -> bool:
        """Whether it must on no account be done twice, not even where the server was restarted in between."""
        return False

    async def again(self, desk: Desk) -> dict[str, Any] | None:  # noqa: ARG002
        """What came of one that must not be done twice, where an earlier life of the server may have done it: its
        answer, if the desk tells what was done, and it is done now if it was not. None where nobody can tell."""
        return None

    def nothing(self) -> dict[str, Any]:
        """What is answered to one who waited for what did not happen."""
        raise NotImplementedError(f"{type(self).__name__} waits, and does not say what for.")

    async def at(self, desk: Desk) -> dict[str, Any]:
        """Do it, and say what came of it."""
        raise NotImplementedError(f"{type(self).__name__} says what it does at a desk.")


class TurnRead(BaseModel):
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
