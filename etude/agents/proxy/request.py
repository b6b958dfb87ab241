"""A call to the model, its answers, and the sampler that makes them, independent of any API dialect."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from etude.chat import MessageDelta
from etude.chat.answer_grammar import AnswerForm
from etude.chat.tokenizer import Ids, Tokenizer
from etude.images import PromptImages
from etude.records import Completion, ContentPart, Message, PromptScores, SamplingParams
from etude.support import Support

if TYPE_CHECKING:
    from etude.agents.proxy.request_fields import FieldRules, RequestFields

JSONObject: TypeAlias = Mapping[str, Any]
"""A JSON object, as it was received or will be sent."""
FindAnswer: TypeAlias = Callable[[str], Message | None]
"""Returns an earlier answer of the attempt by its id, if it is kept."""
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
"""Characters that each message counts in addition to its text: an empty message costs time too."""

MAX_TOOL_VALUES = 20_000
"""The most values in the tools of a call, in lists and objects: templates go through them one by one."""


class APIError(Exception):
    """The reason that a call gets no answer; each dialect formats it in its own way."""

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
        """param: the field of the request at fault. code: the dialect's error code. retry_after: seconds to wait.
        status: the HTTP status, by default that of the kind."""
        super().__init__(message)
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self.status = status or STATUS[kind]


@dataclass(frozen=True, kw_only=True)
class AnswerLimits:
    """The limits of the answer to a call; see `answer_limits`."""

    form: AnswerForm | None = None
    """The form of its text."""
    strict: frozenset[str] = frozenset()
    """The tools whose arguments have to have their schema."""
    single: str = ""
    """The field that allows one call at most."""
    allowed: tuple[str, ...] = ()
    """The only tools that may be called; none stands for all."""

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of the request that say so."""
        named = (
            self.form.field if self.form is not None else "",
            "tools.strict" if self.strict else "",
            self.single,
            "tool_choice.allowed_tools" if self.allowed else "",
        )
        return tuple(name for name in named if name)


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """The contents of a call."""

    model: str
    messages: tuple[Message, ...] = ()
    prefill: Message | None = None
    """The beginning of the answer, which the model continues; the answer does not repeat it."""
    prompt: str | Ids | None = None
    """Used instead of messages: a text that is continued as it is, or its ids."""
    tools: tuple[JSONObject, ...] = ()
    tool_choice: Literal["auto", "none", "required"] = "auto"
    """Says if the model may, must not, or has to call a tool."""
    tool_name: str = ""
    """The tool that the model has to call."""
    limits: AnswerLimits = field(default_factory=AnswerLimits)
    sampling: JSONObject = field(default_factory=dict)
    """The fields of `SamplingParams` that the agent set."""
    penalties: tuple[str, ...] = ()
    """Penalties that the agent set to a value other than 0; no engine here supports them."""
    n: int = 1
    stream: bool = False
    logprobs: bool = False
    include_usage: bool = False
    """True if a stream ends with its usage."""
    previous_id: str = ""
    """The answer that the messages continue, after the first `instruction_count` of them."""
    instruction_count: int = 0
    store: bool = False
    """True if a later call may continue this answer."""
    echo: JSONObject = field(default_factory=dict)
    """The fields that the dialect repeats in its response."""
    with_prompt: bool = False
    """True if answers begin with the prompt, and their log-probs with those of the prompt's tokens."""
    prompt_only: bool = False
    """True if nothing is sampled: the prompt is returned alone."""
    ignored: tuple[str, ...] = ()
    """The fields and parts of the request that the answer does not follow."""

    def check_tools(self) -> None:
        """Refuse tools that would take long to render."""
        count, left = 0, list[Any](self.tools)
        while left and count <= MAX_TOOL_VALUES:
            value = left.pop()
            inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
            count += len(inner)
            left += inner
        if count > MAX_TOOL_VALUES:
            raise APIError(
                f"'tools' has more than {MAX_TOOL_VALUES} values, in lists and objects. Offer the model fewer tools, "
                "or tools with fewer parameters.",
                param="tools",
            )

    @cached_property
    def has_images(self) -> bool:
        """True if a message has an image."""
        parts = (part for message in self.messages if not isinstance(message.content, str) for part in message.content)
        return any(part.kind == "image" for part in parts)

    @cached_property
    def characters(self) -> int:
        """The approximate number of characters that the model gets; for token ids, their number."""
        messages = (*self.messages, self.prefill) if self.prefill is not None else self.messages
        tool_characters = sum(MESSAGE_OVERHEAD + len(json.dumps(tool)) for tool in self.tools)
        return count_characters(messages) + tool_characters + len(self.prompt if self.prompt is not None else "")


def count_characters(messages: Sequence[Message]) -> int:
    """Return the number of characters that messages count: all of their text, and some for each message and each
    call."""
    text_characters = sum(
        MESSAGE_OVERHEAD + _count_content(message.content) + len(message.reasoning) for message in messages
    )
    return text_characters + sum(
        MESSAGE_OVERHEAD + len(call.arguments) for message in messages for call in message.tool_calls
    )


def _count_content(content: str | tuple[ContentPart, ...]) -> int:
    """Return the characters of a content. Its images count by themselves, once their tokens are known."""
    if isinstance(content, str):
        return len(content)
    return sum(len(part.text) if part.kind == "text" else MESSAGE_OVERHEAD for part in content)


@dataclass(frozen=True, slots=True, eq=False)
class ModelAnswer:
    """One answer to a call."""

    message: Message
    completion: Completion
    stop: str | None = None
    """The stop string that ended it."""
    sampled: float = 0.0
    """The time at which its last token was sampled."""

    @property
    def finish_reason(self) -> Literal["stop", "length", "tool_calls"]:
        """The finish reason, in OpenAI's terms."""
        if self.completion.finish_reason == "length":
            return "length"
        return "tool_calls" if self.message.tool_calls else "stop"


@dataclass(frozen=True, slots=True, eq=False)
class ReturnedPrompt:
    """A prompt that is returned before the answers to it."""

    ids: Ids
    scores: PromptScores | None
    """The log-probs of its tokens, if they were requested."""


@dataclass(frozen=True, slots=True, eq=False)
class ReplyHeader:
    """The fields that all answers to a call share."""

    id: str
    request: ModelRequest
    prompt_tokens: int
    tokenizer: Tokenizer
    """Decodes single tokens for log-probs."""
    prompt: ReturnedPrompt | None = None
    """The prompt, if it is returned before each answer."""


class AnswerWriter(Protocol):
    """Formats a streamed reply of one dialect. Each method returns events as bytes, possibly none."""

    def begin(self) -> bytes:
        """Begin the stream."""
        ...

    def delta(self, index: int, delta: MessageDelta, /) -> bytes:
        """Write new text of one answer, or a tool call."""
        ...

    def end(self, index: int, answer: ModelAnswer, /) -> bytes:
        """End one answer, which is recorded. All of its text and calls were written before."""
        ...

    def close(self, answers: Sequence[ModelAnswer]) -> bytes:
        """End the stream after all answers."""
        ...

    def fail(self, refusal: APIError) -> bytes:
        """End the stream by an error."""
        ...


class APIDialect(Protocol):
    """The format of one API's requests and responses."""

    @property
    def prefix(self) -> str:
        """The prefix of its response ids."""
        ...

    @property
    def rules(self) -> FieldRules:
        """The fields of a request, and the treatment of each."""
        ...

    def parse(self, fields: RequestFields, find_answer: FindAnswer) -> ModelRequest:
        """Parse a request. Raise `APIError` if it asks for something that is not supported."""
        ...

    def format_response(self, reply: ReplyHeader, answers: Sequence[ModelAnswer]) -> JSONObject:
        """Format the answers as one response."""
        ...

    def writer(self, reply: ReplyHeader) -> AnswerWriter:
        """Return a writer for a streamed response."""
        ...

    def format_error(self, refusal: APIError) -> JSONObject:
        """Format an error."""
        ...


class CompletionChunk(Protocol):
    """The tokens that a streamed answer has gained."""

    @property
    def ids(self) -> Ids:
        """[t] new tokens."""
        ...

    @property
    def logp(self) -> NDArray[np.float32]:
        """[t]"""
        ...

    @property
    def version(self) -> Ids:
        """[t] the version of the weights that sampled each token."""
        ...

    @property
    def completion(self) -> Completion | None:
        """The whole completion; only in the last chunk."""
        ...

    @property
    def support(self) -> Support | None:
        """The sets of tokens that could be drawn, if some were not the whole vocabulary."""
        ...

    @property
    def alternative_ids(self) -> Ids | None:
        """[t, k] the tokens that were likeliest to be drawn, if the request asked for them."""
        ...

    @property
    def alternative_logp(self) -> NDArray[np.float32] | None:
        """[t, k] their log-probs."""
        ...


class Upstream(Protocol):
    """Any sampler with these methods; the embedded engine is one. Any number of calls may be active. Cancelling a call
    at any await ends its sampling."""

    async def generate(
        self, prompt: Ids, sampling: SamplingParams, *, images: PromptImages | None = None
    ) -> Completion:
        """Sample one continuation. Raise `DataError` or `ConfigError` if the request cannot be sampled, and
        `EngineError` if it cannot be sampled now."""
        ...

    def stream(
        self, prompt: Ids, sampling: SamplingParams, *, images: PromptImages | None = None
    ) -> AsyncGenerator[CompletionChunk, None]:
        """Stream one continuation. Closing the stream ends the sampling."""
        ...


class PromptScorer(Protocol):
    """Computes the log-probs of prompts, for evaluations. Engines do both: they are an `Upstream` too."""

    async def score(self, prompt: Ids, top: int) -> PromptScores:
        """Return the log-probs of a prompt's tokens, and the `top` likeliest tokens at each place. Raise as `Upstream`
        does."""
        ...
