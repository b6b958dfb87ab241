"""Parsers of a streamed answer: they return its reasoning, its content and its tool calls as deltas.

A delta is never taken back, and the pieces in which the text arrives do not matter: parsed piece by piece or at once,
an answer is the same message. Therefore:

- A possible beginning of a mark is held back until it is clear if it is one; all other text is returned at once.
- A call is returned when it is complete, with all of its arguments. Up to its last character it may turn out to be
  text. Then it is returned as text, at the first character that makes this certain.
- White space is returned with the next words, because white space around calls is not content.

The id of a call is derived from the prompt and from all text up to the end of the call. So an answer that is parsed
twice has the same ids, and two answers with the same call after different reasoning have different ones.
"""

from __future__ import annotations

from base64 import b32encode
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby
from typing import TypeAlias

from etude.chat.parsing import ParseBuffer, ParsedCalls, ParseHandler, Parser
from etude.chat.reasoning import parse_reasoning
from etude.chat.stop_strings import StopStringFilter
from etude.chat.tokenizer import Tokenizer
from etude.chat.tool_parsers import ToolParser, Tools
from etude.records import Message, SamplingParams, ToolCall

_ID_LENGTH = 9
"""The number of letters of a call's id: Mistral's templates require it, and other templates accept it."""


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """A part of the answer's content."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A part of the reasoning before it."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """One complete call."""

    index: int
    call: ToolCall


MessageDelta: TypeAlias = ContentDelta | ReasoningDelta | ToolCallDelta


class TextStreamParser:
    """Parses a text as it comes."""

    def __init__(
        self,
        tool_parser: ToolParser | None,
        tools: Tools = (),
        *,
        supports_reasoning: bool = False,
        reasoning_opened: bool | None = None,
        seed: bytes = b"",
    ) -> None:
        """tool_parser: the parser of the model's tool format. supports_reasoning: the model reasons first.
        reasoning_opened: the prompt has opened the reasoning (see `reasoning`). seed: makes the calls' ids differ from
        those of other answers."""
        self._collector = _DeltaCollector(tool_parser is not None, seed)
        self._buffer = ParseBuffer(self._collector)
        self._parser = _parse_answer(self._buffer, tool_parser, tools, supports_reasoning, reasoning_opened)

    @property
    def message(self) -> Message:
        """The message so far."""
        return self._collector.message()

    def push(self, text: str) -> list[MessageDelta]:
        """Add text; return the deltas that it makes certain."""
        self._buffer.text += text
        next(self._parser)
        return self._collector.take_deltas()

    def finish(self) -> list[MessageDelta]:
        """End the text; return the deltas that were held back. No text may be added afterwards."""
        self._buffer.is_complete = True
        for _ in self._parser:
            raise AssertionError("the parser waits for more text after the end")
        self._collector.finish()
        return self._collector.take_deltas()


class TokenStreamParser:
    """Parses an answer from its sampled ids."""

    def __init__(
        self,
        text_parser: TextStreamParser,
        tokenizer: Tokenizer,
        is_text: Callable[[int], bool],
        sampling: SamplingParams | None = None,
    ) -> None:
        """is_text: returns whether an id is text. sampling: the sampling parameters, for their stop strings."""
        self._text_parser = text_parser
        self._tokenizer = tokenizer
        self._is_text = is_text
        self._stream = tokenizer.decode_stream(keep_special_tokens=True)
        self._stops = StopStringFilter(sampling.stop) if sampling is not None and sampling.stop else None
        self._min_tokens = sampling.min_tokens if sampling is not None else 0
        self._num_read = 0  # ids
        self._has_prefix = False

    @property
    def message(self) -> Message:
        """The message so far; after `finish`, the whole answer."""
        return self._text_parser.message

    def push_prefix(self, ids: Iterable[int]) -> list[MessageDelta]:
        """Add the ids of a prefill; return the deltas that they make certain. Stop strings do not apply to them."""
        self._has_prefix = True
        return self._text_parser.push(self._stream.push(filter(self._is_text, map(int, ids))))

    def push(self, ids: Iterable[int]) -> list[MessageDelta]:
        """Add sampled ids; return the deltas that they make certain."""
        if self._stops is None:
            return self._text_parser.push(self._stream.push(filter(self._is_text, map(int, ids))))
        text = ""
        for id in map(int, ids):
            self._num_read += 1
            new = self._stream.push([id]) if self._is_text(id) and not self._stops.stopped else ""
            text += self._stops.push(new, can_stop=self._num_read > self._min_tokens)
        return self._text_parser.push(text)

    def finish(self) -> list[MessageDelta]:
        """End the ids; return the deltas that were held back. No ids may be added afterwards."""
        text = self._stream.finish()
        if self._stops is not None:
            text = self._stops.push(text, can_stop=self._num_read > self._min_tokens) + self._stops.finish()
        return _merge_deltas(self._text_parser.push(text) + self._text_parser.finish())

    def parse_all(self, ids: Iterable[int]) -> Message:
        """Return the message of all ids at once."""
        if self._stops is None and not self._has_prefix:
            self._text_parser.push(
                self._tokenizer.decode(filter(self._is_text, map(int, ids)), keep_special_tokens=True)
            )
        else:
            self.push(ids)
        self.finish()
        return self.message


class _DeltaCollector(ParseHandler):
    """Collects the parsed parts, as new deltas and as a message."""

    def __init__(self, parses_calls: bool, seed: bytes) -> None:
        self._seed = blake2b(seed, digest_size=16)
        self._pending: list[MessageDelta] = []
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        self._held_space = ""  # white space that may only surround calls
        self._has_content = not parses_calls

    def content(self, text: str) -> None:
        if not self._has_content:
            self._held_space += text
            if self._held_space.isspace():
                return
            text = self._held_space
            self._held_space = ""
            self._has_content = True
        self._content.append(text)
        self._pending.append(ContentDelta(text))

    def reasoning(self, text: str) -> None:
        self._reasoning.append(text)
        self._pending.append(ReasoningDelta(text))

    def calls(self, calls: ParsedCalls, text: str) -> None:
        self._seed.update(text.encode(errors="surrogatepass"))
        for name, arguments in calls:
            digest = self._seed.copy()
            digest.update(b"%d" % len(self._calls))
            id = b32encode(digest.digest()).decode()[:_ID_LENGTH].lower()
            delta = ToolCallDelta(len(self._calls), ToolCall(id, name, arguments))
            self._calls.append(delta.call)
            self._pending.append(delta)

    def finish(self) -> None:
        """End the answer."""
        if self._held_space and not self._calls:
            self._content.append(self._held_space)
            self._pending.append(ContentDelta(self._held_space))

    def take_deltas(self) -> list[MessageDelta]:
        """Return the new deltas."""
        new = self._pending
        self._pending = []
        return _merge_deltas(new)

    def message(self) -> Message:
        """Return the message so far."""
        return Message(
            "assistant",
            "".join(self._content),
            reasoning="".join(self._reasoning),
            tool_calls=tuple(self._calls),
        )


def _merge_deltas(deltas: Sequence[MessageDelta]) -> list[MessageDelta]:
    """Join neighboring deltas of the same kind."""
    if len(deltas) < 2:
        return list(deltas)
    merged: list[MessageDelta] = []
    for kind, group in groupby(deltas, type):
        if kind is ToolCallDelta:
            merged += group
        else:
            text = "".join(delta.text for delta in group if not isinstance(delta, ToolCallDelta))
            merged.append(ContentDelta(text) if kind is ContentDelta else ReasoningDelta(text))
    return merged


def _parse_answer(
    buffer: ParseBuffer,
    tool_parser: ToolParser | None,
    tools: Tools,
    supports_reasoning: bool,
    reasoning_opened: bool | None,
) -> Parser[None]:
    """Parse an answer."""
    if supports_reasoning:
        yield from parse_reasoning(buffer, reasoning_opened)
    if tool_parser is not None:
        yield from tool_parser(buffer, tools)
    while not buffer.is_complete:
        buffer.emit_content(len(buffer.text))
        yield
    buffer.emit_content(len(buffer.text))
