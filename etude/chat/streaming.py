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

from etude.chat.feed import Feed, Found, Reading
from etude.chat.reasoning import reasoning
from etude.chat.stops import StopScan
from etude.chat.tokenizer import Tokenizer
from etude.chat.tools import Form, Tools
from etude.records import Message, SamplingParams, ToolCall

__all__ = ["Called", "Content", "Piece", "Reader", "Reasoning", "Teller"]

_ID = 9
"""The letters of a call's id: as many as Mistral's templates ask for, which other templates do not mind."""


@dataclass(frozen=True, slots=True)
class Content:
    """Some of what is answered."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Some of the thinking before it."""

    text: str


@dataclass(frozen=True, slots=True)
class Called:
    """One call, whole."""

    index: int
    call: ToolCall


Piece: TypeAlias = Content | Reasoning | Called


class Teller:
    """Tells what a text is, as it comes."""

    def __init__(
        self,
        form: Form | None,
        tools: Tools = (),
        *,
        reasons: bool = False,
        opened: bool | None = None,
        seed: bytes = b"",
    ) -> None:
        """form: how the model calls tools. reasons: whether it thinks first, and `opened` whether its prompt has begun
        that (`reasoning`). seed: tells its calls apart from those of other answers."""
        self._ear = _Ear(form is not None, seed)
        self._feed = Feed(self._ear)
        self._reading = _read(self._feed, form, tools, reasons, opened)

    @property
    def message(self) -> Message:
        """What was told so far."""
        return self._ear.message()

    def push(self, text: str) -> list[Piece]:
        """What this makes certain."""
        self._feed.text += text
        next(self._reading)
        return self._ear.told()

    def finish(self) -> list[Piece]:
        """What was held back, when no more text comes. After this there is nothing to push."""
        self._feed.ended = True
        for _ in self._reading:
            raise AssertionError("it waits for a text that has ended")
        self._ear.end()
        return self._ear.told()


class Reader:
    """Tells what a model says from the ids that it samples."""

    def __init__(
        self,
        teller: Teller,
        tokenizer: Tokenizer,
        shown: Callable[[int], bool],
        sampling: SamplingParams | None = None,
    ) -> None:
        """shown: which ids are text. sampling: what the ids are drawn with, which may name words to stop before."""
        self._teller, self._tokenizer, self._shown = teller, tokenizer, shown
        self._stream = tokenizer.stream(special=True)
        self._stops = StopScan(sampling.stop) if sampling is not None and sampling.stop else None
        self._least = sampling.min_tokens if sampling is not None else 0
        self._read = 0  # how many ids
        self._began = False

    @property
    def message(self) -> Message:
        """What was told so far; after `finish`, the whole answer."""
        return self._teller.message

    def begin(self, ids: Iterable[int]) -> list[Piece]:
        """What the ids make certain that stand before those that are sampled: no stop word counts in them."""
        self._began = True
        return self._teller.push(self._stream.push(filter(self._shown, map(int, ids))))

    def push(self, ids: Iterable[int]) -> list[Piece]:
        """What these ids make certain."""
        if self._stops is None:
            return self._teller.push(self._stream.push(filter(self._shown, map(int, ids))))
        text = ""
        for id in map(int, ids):
            self._read += 1
            new = self._stream.push([id]) if self._shown(id) and not self._stops.stopped else ""
            text += self._stops.push(new, counts=self._read > self._least)
        return self._teller.push(text)

    def finish(self) -> list[Piece]:
        """What was held back, when no more ids come. After this there is nothing to push."""
        text = self._stream.finish()
        if self._stops is not None:
            text = self._stops.push(text, counts=self._read > self._least) + self._stops.finish()
        return _joined(self._teller.push(text) + self._teller.finish())

    def whole(self, ids: Iterable[int]) -> Message:
        """The message that all of the ids at once are."""
        if self._stops is None and not self._began:
            self._teller.push(self._tokenizer.decode(filter(self._shown, map(int, ids)), special=True))
        else:
            self.push(ids)
        self.finish()
        return self.message


class _Ear:
    """Who is told what a text is, and keeps it for those who ask."""

    def __init__(self, calls: bool, seed: bytes) -> None:
        self._seed = blake2b(seed, digest_size=16)
        self._new: list[Piece] = []
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        self._space = ""  # that may turn out to be all there is around calls
        self._spoke = not calls

    def content(self, text: str) -> None:
        """Some of what is answered."""
        if not self._spoke:
            self._space += text
            if self._space.isspace():
                return
            text, self._space, self._spoke = self._space, "", True
        self._content.append(text)
        self._new.append(Content(text))

    def reasoning(self, text: str) -> None:
        """Some of the thinking before it."""
        self._reasoning.append(text)
        self._new.append(Reasoning(text))

    def calls(self, found: Found, written: str) -> None:
        """Calls that are whole."""
        self._seed.update(written.encode(errors="surrogatepass"))
        for name, arguments in found:
            digest = self._seed.copy()
            digest.update(b"%d" % len(self._calls))
            id = b32encode(digest.digest()).decode()[:_ID].lower()
            called = Called(len(self._calls), ToolCall(id, name, arguments))
            self._calls.append(called.call)
            self._new.append(called)

    def end(self) -> None:
        """Nothing more comes."""
        if self._space and not self._calls:
            self._content.append(self._space)
            self._new.append(Content(self._space))

    def told(self) -> list[Piece]:
        """What is new."""
        new, self._new = self._new, []
        return _joined(new)

    def message(self) -> Message:
        """All of it."""
        return Message(
            "assistant",
            "".join(self._content),
            reasoning="".join(self._reasoning),
            tool_calls=tuple(self._calls),
        )


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """The same with what belongs together in one piece."""
    if len(pieces) < 2:
        return list(pieces)
    told: list[Piece] = []
    for kind, group in groupby(pieces, type):
        if kind is Called:
            told += group
        else:
            text = "".join(each.text for each in group if not isinstance(each, Called))
            told.append(Content(text) if kind is Content else Reasoning(text))
    return told


def _read(feed: Feed, form: Form | None, tools: Tools, reasons: bool, opened: bool | None) -> Reading[None]:
    """All of an answer."""
    if reasons:
        yield from reasoning(feed, opened)
    if form is not None:
        yield from form(feed, tools)
    while not feed.ended:
        feed.content(len(feed.text))
        yield
    feed.content(len(feed.text))
