"""What a call to the model asks for, and what comes of it, in no dialect in particular."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol, TypeAlias

from etude.chat import MessageDelta
from etude.chat.tokenizer import Ids, Tokenizer
from etude.records import Completion, Message

__all__ = [
    "APIDialect",
    "APIError",
    "AnswerWriter",
    "ErrorKind",
    "JSONObject",
    "ModelAnswer",
    "ModelRequest",
    "ParseContext",
    "ReplyHeader",
    "count_characters",
]

JSONObject: TypeAlias = Mapping[str, Any]
"""JSON, as it came or goes."""
ErrorKind: TypeAlias = Literal[
    "invalid", "context", "unauthorized", "forbidden", "not_found", "too_large", "busy", "timeout", "failed"
]
STATUS: dict[ErrorKind, int] = {
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
MAX_CHOICES = 128
"""The most answers to one call."""
MESSAGE_OVERHEAD = 64
"""Characters that a message weighs beside what it says: also an empty one is read, compared and rendered."""


class APIError(Exception):
    """Why a call gets no answer; each dialect says it in its own words."""

    def __init__(
        self,
        message: str,
        kind: ErrorKind = "invalid",
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int = 0,
        status: int | None = None,
    ) -> None:
        """param: which field of the request it is about. code: a dialect's own word for it. wait: seconds to wait.
        status: as HTTP has it, by default that of its kind."""
        super().__init__(message)
        self.message, self.kind, self.param, self.code, self.retry_after = message, kind, param, code, retry_after
        self.status = status or STATUS[kind]


def _no_answer(_id: str) -> Message | None:
    return None


@dataclass(frozen=True, slots=True)
class ParseContext:
    """The rules of one call, beside its dialect's own."""

    strict: bool = False
    """Refuse the fields that an answer does not follow."""
    find_answer: Callable[[str], Message | None] = _no_answer
    """The answer of this name that the attempt was given before, where it is kept."""


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """What a call asks for."""

    model: str
    messages: tuple[Message, ...] = ()
    prefill: Message | None = None
    """The beginning of the answer, which the model goes on from; none of it is given again."""
    prompt: str | Ids | None = None
    """Instead of messages: a text that is continued as it stands, or its ids."""
    tools: tuple[JSONObject, ...] = ()
    tool_choice: Literal["auto", "none", "required"] = "auto"
    """Whether the model may, may not, or has to call a tool."""
    tool_name: str = ""
    """The tool that it has to call."""
    sampling: JSONObject = field(default_factory=dict)
    """The fields of `SamplingParams` that the agent set."""
    penalties: tuple[str, ...] = ()
    """Parameters it set to something, by which no engine here can sample."""
    n: int = 1
    stream: bool = False
    logprobs: bool = False
    include_usage: bool = False
    """Whether a stream is to end with its usage."""
    previous_id: str = ""
    """The answer that the messages go on from, after the first `lead` of them."""
    instruction_count: int = 0
    store: bool = False
    """Whether a later call may go on from this answer."""
    echo: JSONObject = field(default_factory=dict)
    """What the dialect repeats in its answer."""
    ignored: tuple[str, ...] = ()
    """The fields and parts of the request that the answer does not follow."""

    @cached_property
    def characters(self) -> int:
        """How many the model is to be shown, about; of ids, how many those are."""
        messages = (*self.messages, self.prefill) if self.prefill is not None else self.messages
        tool_characters = sum(MESSAGE_OVERHEAD + len(json.dumps(tool)) for tool in self.tools)
        return count_characters(messages) + tool_characters + len(self.prompt if self.prompt is not None else "")


def count_characters(messages: Sequence[Message]) -> int:
    """How many characters messages weigh: those of all that they say, and some for each message and each call."""
    text_characters = sum(MESSAGE_OVERHEAD + len(message.content) + len(message.reasoning) for message in messages)
    return text_characters + sum(
        MESSAGE_OVERHEAD + len(call.arguments) for message in messages for call in message.tool_calls
    )


@dataclass(frozen=True, slots=True, eq=False)
class ModelAnswer:
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
    def finish_reason(self) -> Literal["stop", "length", "tool_calls"]:
        """How it ended, in OpenAI's words."""
        if self.completion.finish_reason == "length":
            return "length"
        return "tool_calls" if self.message.tool_calls else "stop"


@dataclass(frozen=True, slots=True, eq=False)
class ReplyHeader:
    """What the answers to a call have in common."""

    id: str
    request: ModelRequest
    prompt_tokens: int
    tokenizer: Tokenizer
    """For what is told of single tokens."""


class AnswerWriter(Protocol):
    """Writes one streamed answer of a dialect, piece by piece: events as bytes, or nothing."""

    def begin(self) -> bytes:
        """Before all else."""
        ...

    def delta(self, index: int, delta: MessageDelta, /) -> bytes:
        """New text of one of the answers, or a call that it makes."""
        ...

    def end(self, index: int, answer: ModelAnswer, /) -> bytes:
        """One of the answers is whole, and recorded. All of its text and calls were written already."""
        ...

    def close(self, answers: Sequence[ModelAnswer]) -> bytes:
        """All of them are."""
        ...

    def fail(self, refusal: APIError) -> bytes:
        """Nothing more will come."""
        ...


class APIDialect(Protocol):
    """How the agents of one kind speak."""

    @property
    def prefix(self) -> str:
        """What the names of its answers begin with."""
        ...

    def parse(self, body: JSONObject, context: ParseContext) -> ModelRequest:
        """What a request asks for. Raises `APIError` where it asks for what cannot be had."""
        ...

    def format_response(self, reply: ReplyHeader, answers: Sequence[ModelAnswer]) -> JSONObject:
        """The answers in one piece."""
        ...

    def writer(self, reply: ReplyHeader) -> AnswerWriter:
        """The answers piece by piece."""
        ...

    def format_error(self, refusal: APIError) -> JSONObject:
        """Why there is none."""
        ...
