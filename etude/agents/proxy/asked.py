"""What a call to the model asks for, and what comes of it, in no dialect in particular."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from etude.chat import Piece
from etude.chat.tokenizer import Ids, Tokenizer
from etude.records import Completion, Message

__all__ = ["Asked", "Body", "Dialect", "Fields", "Kind", "Refusal", "Reply", "Said", "Writer", "neutral"]

Body: TypeAlias = Mapping[str, Any]
"""JSON, as it came or goes."""
Kind: TypeAlias = Literal[
    "invalid", "context", "unauthorized", "forbidden", "not_found", "too_large", "busy", "timeout", "failed"
]
STATUS: dict[Kind, int] = {
    "invalid": 400,
    "context": 400,
    "unauthorized": 401,
    "forbidden": 403,
    "not_found": 404,
    "too_large": 413,
    "busy": 429,
    "failed": 500,
    "timeout": 504,
}
MOST = 128
"""The most answers to one call."""


class Refusal(Exception):
    """Why a call gets no answer; each dialect says it in its own words."""

    def __init__(
        self,
        message: str,
        kind: Kind = "invalid",
        *,
        param: str | None = None,
        code: str | None = None,
        wait: int = 0,
        status: int | None = None,
    ) -> None:
        """param: which field of the request it is about. code: a dialect's own word for it. wait: seconds to wait.
        status: as HTTP has it, by default that of its kind."""
        super().__init__(message)
        self.message, self.kind, self.param, self.code, self.wait = message, kind, param, code, wait
        self.status = status or STATUS[kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a call asks for."""

    model: str
    messages: tuple[Message, ...] = ()
    prompt: str | Ids | None = None
    """Instead of messages: a text that is continued as it stands, or its ids."""
    tools: tuple[Body, ...] = ()
    choice: Literal["auto", "none", "required"] = "auto"
    """Whether the model may, may not, or has to call a tool."""
    named: str = ""
    """The tool that it has to call."""
    sampling: Body = field(default_factory=dict)
    """The fields of `SamplingParams` that the agent set."""
    penalties: tuple[str, ...] = ()
    """Parameters it set to something, by which no engine here can sample."""
    n: int = 1
    stream: bool = False
    logprobs: bool = False
    usage: bool = False
    """Whether a stream is to end with its usage."""
    previous: str = ""
    """The answer that the messages go on from, after the first `lead` of them."""
    lead: int = 0
    keep: bool = True
    """Whether a later call may go on from this answer."""
    echo: Body = field(default_factory=dict)
    """What the dialect repeats in its answer."""


@dataclass(frozen=True, slots=True, eq=False)
class Said:
    """One answer to a call."""

    message: Message
    completion: Completion
    prompt_tokens: int
    stop: str | None = None
    """The stop string that ended it."""
    turn: int = 0
    """Its place in the attempt."""

    @property
    def finish(self) -> Literal["stop", "length", "tool_calls"]:
        """How it ended, in OpenAI's words."""
        if self.completion.finish == "length":
            return "length"
        return "tool_calls" if self.message.tool_calls else "stop"


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """What the answers to a call have in common."""

    id: str
    asked: Asked
    prompt_tokens: int
    tokenizer: Tokenizer
    """For what is told of single tokens."""


class Writer(Protocol):
    """Writes one streamed answer of a dialect, piece by piece: events as bytes, or nothing."""

    def begin(self) -> bytes:
        """Before all else."""
        ...

    def piece(self, index: int, piece: Piece, /) -> bytes:
        """New text of one of the answers, or a call that it makes."""
        ...

    def end(self, index: int, said: Said, /) -> bytes:
        """One of the answers is whole, and recorded. All of its text and calls were written already."""
        ...

    def close(self, said: Sequence[Said]) -> bytes:
        """All of them are."""
        ...

    def failed(self, refusal: Refusal) -> bytes:
        """Nothing more will come."""
        ...


class Dialect(Protocol):
    """How the agents of one kind speak."""

    @property
    def prefix(self) -> str:
        """What the names of its answers begin with."""
        ...

    def parse(self, body: Body) -> Asked:
        """What a request asks for. Raises `Refusal` where it asks for what cannot be had."""
        ...

    def whole(self, reply: Reply, said: Sequence[Said]) -> Body:
        """The answers in one piece."""
        ...

    def writer(self, reply: Reply) -> Writer:
        """The answers piece by piece."""
        ...

    def error(self, refusal: Refusal) -> Body:
        """Why there is none."""
        ...


class Fields:
    """The fields of a request, taken one by one. A null is as good as nothing; what nobody took is refused."""

    def __init__(self, body: Any, where: str = "") -> None:
        if not isinstance(body, Mapping):
            raise Refusal(f"{where or 'The body'} must be a JSON object; it is a {_kind(body)}.", param=where or None)
        self._body = {name: value for name, value in body.items() if value is not None}
        self._where = f"{where}." if where else ""

    def __contains__(self, name: str) -> bool:
        return name in self._body

    def refuse(self, name: str, why: str, code: str | None = None) -> Refusal:
        """The refusal that names this field."""
        return Refusal(f"'{self._where}{name}' {why}", param=f"{self._where}{name}", code=code)

    def any(self, name: str) -> Any:
        """Its value, whatever it is; None if it is not there."""
        return self._body.pop(name, None)

    def text(self, name: str, default: str | None = None) -> str:
        """A text. Without a default it has to be there."""
        return str(self._typed(name, str, "a text", default))

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        return bool(self._typed(name, bool, "true or false", default))

    def many(self, name: str, *, needed: bool = False) -> list[Any]:
        """A list; empty if it need not be there and is not."""
        return list(self._typed(name, list, "a list", None if needed else []))

    def whole(self, name: str, low: int, high: int) -> int | None:
        """A whole number within bounds; None if it is not there."""
        value = self.any(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.refuse(name, f"must be a whole number from {low} to {high}; it is {_brief(value)}.")
        return value

    def number(self, name: str, low: float, high: float) -> float | None:
        """A number within bounds; None if it is not there."""
        value = self.any(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self.refuse(name, f"must be a number from {low:g} to {high:g}; it is {_brief(value)}.")
        return float(value)

    def texts(self, name: str, most: int) -> tuple[str, ...]:
        """One text or a list of them."""
        value = self.any(name)
        found = [value] if isinstance(value, str) else [] if value is None else value
        if not isinstance(found, list) or len(found) > most or not all(isinstance(each, str) for each in found):
            raise self.refuse(name, f"must be a text or a list of at most {most} texts; it is {_brief(value)}.")
        return tuple(each for each in found if each)

    def ignore(self, *names: str) -> None:
        """Take what changes nothing of an answer."""
        for name in names:
            self._body.pop(name, None)

    def only(self, name: str, *values: Any, why: str) -> None:
        """Take a field that may have these values alone."""
        value = self.any(name)
        if value is not None and value not in values:
            raise self.refuse(name, why)

    def nothing_else(self) -> None:
        """Refuse what is left: it would change the answer, or means nothing here."""
        for name in self._body:
            raise self.refuse(name, "is not supported by this endpoint; leave it out.", "unsupported_parameter")

    def _typed(self, name: str, kind: type, word: str, default: Any) -> Any:
        value = self.any(name)
        if value is None:
            if default is None:
                raise self.refuse(name, "is missing.", "missing_required_parameter")
            return default
        if not isinstance(value, kind):
            raise self.refuse(name, f"must be {word}; it is {_brief(value)}.")
        return value


def neutral(fields: Fields, *names: str) -> tuple[str, ...]:
    """Those of these penalties that are set to something."""
    return tuple(name for name in names if fields.number(name, -2, 2))


def drawing(fields: Fields) -> dict[str, Any]:
    """The parameters that all of OpenAI's dialects have, and those that servers of open models have beside them."""
    numbers: dict[str, Callable[[str], Any]] = {
        "temperature": lambda name: fields.number(name, 0, 2),
        "top_p": lambda name: fields.number(name, 1e-9, 1),
        "min_p": lambda name: fields.number(name, 0, 1),
        "repetition_penalty": lambda name: fields.number(name, 1e-3, 1e3),
        "min_tokens": lambda name: fields.whole(name, 0, 2**31 - 1),
        "seed": lambda name: fields.whole(name, -(2**63), 2**63 - 1),
    }
    found = {name: value for name, take in numbers.items() if (value := take(name)) is not None}
    top_k = fields.whole("top_k", -1, 2**31 - 1)
    if top_k is not None:
        found["top_k"] = max(top_k, 0)
    stop_ids = fields.many("stop_token_ids")
    if any(isinstance(id, bool) or not isinstance(id, int) or not 0 <= id < 2**31 for id in stop_ids):
        raise fields.refuse("stop_token_ids", "must be a list of token ids.")
    bias = _bias(fields)
    return found | ({"stop_ids": tuple(stop_ids)} if stop_ids else {}) | ({"logit_bias": bias} if bias else {})


def _bias(fields: Fields) -> dict[int, float]:
    given = fields.any("logit_bias") or {}
    try:
        bias = {int(id): float(amount) for id, amount in given.items()}
    except (AttributeError, TypeError, ValueError, OverflowError):
        bias = {-1: 0.0}
    if not all(0 <= id < 2**31 and math.isfinite(amount) for id, amount in bias.items()):
        raise fields.refuse("logit_bias", "must be an object of numbers by token id.")
    return bias


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"a {_kind(value)}"


def _kind(value: Any) -> str:
    kinds = {dict: "object", list: "list", str: "text", bool: "boolean", int: "number", float: "number"}
    return kinds.get(type(value), "null")
