"""What a model says, told while it is being written: its thinking, its words, its calls.

What was told is never taken back, and nothing of it depends on the bits in which the text came: told piece by piece or
read at once, an answer is the same message. For that,

- what may begin a mark is held back until it is known whether it does; all else is told at once;
- a call is told when it is whole, with all of its arguments. Up to its last character it may turn out to be text, and
  then it is told as text, at the first character by which that is certain;
- white space is told with the words that come after it, for alone around calls it is no text.

A call's id is made of the prompt and of all that was written up to the end of the call: an answer that was told twice
has the same ids, and two answers that call the same after other thoughts have different ones.
"""

from __future__ import annotations

from base64 import b32encode
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby
from typing import TypeAlias

from etude.chat.parsing import ParseBuffer, ParsedCalls, Parser
from etude.chat.reasoning import parse_reasoning
from etude.chat.stop_strings import StopStringFilter
from etude.chat.tokenizer import Tokenizer
from etude.chat.tool_parsers import ToolParser, Tools
from etude.records import Message, SamplingParams, ToolCall

__all__ = ["ContentDelta", "MessageDelta", "ReasoningDelta", "TextStreamParser", "TokenStreamParser", "ToolCallDelta"]

_ID_LENGTH = 9
"""The letters of a call's id: as many as Mistral's templates ask for, which other templates do not mind."""


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """Some of what is answered."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Some of the thinking before it."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """One call, whole."""

    index: int
    call: ToolCall


MessageDelta: TypeAlias = ContentDelta | ReasoningDelta | ToolCallDelta


class TextStreamParser:
    """Tells what a text is, as it comes."""

    def __init__(
        self,
        tool_parser: ToolParser | None,
        tools: Tools = (),
        *,
        supports_reasoning: bool = False,
        reasoning_opened: bool | None = None,
        seed: bytes = b"",
    ) -> None:
        """form: how the model calls tools. reasons: whether it thinks first, and `opened` whether its prompt has begun
        that (`reasoning`). seed: tells its calls apart from those of other answers."""
        self._collector = _DeltaCollector(tool_parser is not None, seed)
        self._buffer = ParseBuffer(self._collector)
        self._parser = _parse_answer(self._buffer, tool_parser, tools, supports_reasoning, reasoning_opened)

    @property
    def message(self) -> Message:
        """What was told so far."""
        return self._collector.message()

    def push(self, text: str) -> list[MessageDelta]:
        """What this makes certain."""
        self._buffer.text += text
        next(self._parser)
        return self._collector.take_deltas()

    def finish(self) -> list[MessageDelta]:
        """What was held back, when no more text comes. After this there is nothing to push."""
        self._buffer.is_complete = True
        for _ in self._parser:
            raise AssertionError("it waits for a text that has ended")
        self._collector.finish()
        return self._collector.take_deltas()


class TokenStreamParser:
    """Tells what a model says from the ids that it samples."""

    def __init__(
        self,
        text_parser: TextStreamParser,
        tokenizer: Tokenizer,
        is_text: Callable[[int], bool],
        sampling: SamplingParams | None = None,
    ) -> None:
        """shown: which ids are text. sampling: what the ids are drawn with, which may name words to stop before."""
        self._text_parser, self._tokenizer, self._is_text = text_parser, tokenizer, is_text
        self._stream = tokenizer.decode_stream(keep_special_tokens=True)
        self._stops = StopStringFilter(sampling.stop) if sampling is not None and sampling.stop else None
        self._min_tokens = sampling.min_tokens if sampling is not None else 0
        self._num_read = 0  # how many ids
        self._has_prefix = False

    @property
    def message(self) -> Message:
        """What was told so far; after `finish`, the whole answer."""
        return self._text_parser.message

    def push_prefix(self, ids: Iterable[int]) -> list[MessageDelta]:
        """What the ids make certain that stand before those that are sampled: no stop word counts in them."""
        self._has_prefix = True
        return self._text_parser.push(self._stream.push(filter(self._is_text, map(int, ids))))

    def push(self, ids: Iterable[int]) -> list[MessageDelta]:
        """What these ids make certain."""
        if self._stops is None:
            return self._text_parser.push(self._stream.push(filter(self._is_text, map(int, ids))))
        text = ""
        for id in map(int, ids):
            self._num_read += 1
            new = self._stream.push([id]) if self._is_text(id) and not self._stops.stopped else ""
            text += self._stops.push(new, can_stop=self._num_read > self._min_tokens)
        return self._text_parser.push(text)

    def finish(self) -> list[MessageDelta]:
        """What was held back, when no more ids come. After this there is nothing to push."""
        text = self._stream.finish()
        if self._stops is not None:
            text = self._stops.push(text, can_stop=self._num_read > self._min_tokens) + self._stops.finish()
        return _merge_deltas(self._text_parser.push(text) + self._text_parser.finish())

    def parse_all(self, ids: Iterable[int]) -> Message:
        """The message that all of the ids at once are."""
        if self._stops is None and not self._has_prefix:
            self._text_parser.push(
                self._tokenizer.decode(filter(self._is_text, map(int, ids)), keep_special_tokens=True)
            )
        else:
            self.push(ids)
        self.finish()
        return self.message


class _DeltaCollector:
    """Who is told what a text is, and keeps it for those who ask."""

    def __init__(self, parses_calls: bool, seed: bytes) -> None:
        self._seed = blake2b(seed, digest_size=16)
        self._pending: list[MessageDelta] = []
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        self._held_space = ""  # that may turn out to be all there is around calls
        self._has_content = not parses_calls

    def content(self, text: str) -> None:
        """Some of what is answered."""
        if not self._has_content:
            self._held_space += text
            if self._held_space.isspace():
                return
            text, self._held_space, self._has_content = self._held_space, "", True
        self._content.append(text)
        self._pending.append(ContentDelta(text))

    def reasoning(self, text: str) -> None:
        """Some of the thinking before it."""
        self._reasoning.append(text)
        self._pending.append(ReasoningDelta(text))

    def calls(self, calls: ParsedCalls, text: str) -> None:
        """Calls that are whole."""
        self._seed.update(text.encode(errors="surrogatepass"))
        for name, arguments in calls:
            digest = self._seed.copy()
            digest.update(b"%d" % len(self._calls))
            id = b32encode(digest.digest()).decode()[:_ID_LENGTH].lower()
            delta = ToolCallDelta(len(self._calls), ToolCall(id, name, arguments))
            self._calls.append(delta.call)
            self._pending.append(delta)

    def finish(self) -> None:
        """Nothing more comes."""
        if self._held_space and not self._calls:
            self._content.append(self._held_space)
            self._pending.append(ContentDelta(self._held_space))

    def take_deltas(self) -> list[MessageDelta]:
        """What is new."""
        new, self._pending = self._pending, []
        return _merge_deltas(new)

    def message(self) -> Message:
        """All of it."""
        return Message(
            "assistant",
            "".join(self._content),
            reasoning="".join(self._reasoning),
            tool_calls=tuple(self._calls),
        )


def _merge_deltas(deltas: Sequence[MessageDelta]) -> list[MessageDelta]:
    """The same with what belongs together in one piece."""
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
    """All of an answer."""
    if supports_reasoning:
        yield from parse_reasoning(buffer, reasoning_opened)
    if tool_parser is not None:
        yield from tool_parser(buffer, tools)
    while not buffer.is_complete:
        buffer.emit_content(len(buffer.text))
        yield
    buffer.emit_content(len(buffer.text))
