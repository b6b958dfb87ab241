"""What a call to the model asks for, and what comes of it, in no dialect in particular."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol, TypeAlias

from etude.chat import Piece
from etude.chat.tokenizer import Ids, Tokenizer
from etude.records import Completion, Message

__all__ = ["Asked", "Body", "Dialect", "Kind", "Refusal", "Reply", "Said", "Terms", "Writer", "characters_of"]

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
MESSAGE = 64
"""Characters that a message weighs beside what it says: also an empty one is read, compared and rendered."""


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


def _no_answer(_id: str) -> Message | None:
    return None


@dataclass(frozen=True, slots=True)
class Terms:
    """The rules of one call, beside its dialect's own."""

    strict: bool = False
    """Refuse the fields that an answer does not follow."""
    answer: Callable[[str], Message | None] = _no_answer
    """The answer of this name that the attempt was given before, where it is kept."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a call asks for."""

    model: str
    messages: tuple[Message, ...] = ()
    begun: Message | None = None
    """The beginning of the answer, which the model goes on from; none of it is given again."""
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
    keep: bool = False
    """Whether a later call may go on from this answer."""
    echo: Body = field(default_factory=dict)
    """What the dialect repeats in its answer."""
    ignored: tuple[str, ...] = ()
    """The fields and parts of the request that the answer does not follow."""

    @cached_property
    def characters(self) -> int:
        """How many the model is to be shown, about; of ids, how many those are."""
        messages = (*self.messages, self.begun) if self.begun is not None else self.messages
        described = sum(MESSAGE + len(json.dumps(tool)) for tool in self.tools)
        return characters_of(messages) + described + len(self.prompt if self.prompt is not None else "")


def characters_of(messages: Sequence[Message]) -> int:
    """How many characters messages weigh: those of all that they say, and some for each message and each call."""
    said = sum(MESSAGE + len(each.content) + len(each.reasoning) for each in messages)
    return said + sum(MESSAGE + len(call.arguments) for each in messages for call in each.tool_calls)


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
    sampled: float = 0.0
    """When its last token was there."""

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

    def parse(self, body: Body, terms: Terms) -> Asked:
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
