"""Text that comes bit by bit, and how it is read: what a thing is becomes known as soon as it is certain.

A reading is a generator. It goes on as far as the text reaches, yields where it needs more, and returns what it found.
So a form of markup is written down once, as one would read it from a whole text, and reads a text that is still being
written in the same way: where the bits begin and end cannot matter.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from functools import cache
from typing import Protocol, TypeAlias, TypeVar

__all__ = [
    "SPACE",
    "ParseBuffer",
    "ParseHandler",
    "ParsedCalls",
    "Parser",
    "find_literal",
    "has_more",
    "match_literal",
    "match_pattern",
    "partial_match_start",
    "read_until",
]

T = TypeVar("T")
Parser: TypeAlias = Generator[None, None, T]
"""Something that is being read, and what it turns out to be."""
ParsedCalls: TypeAlias = Sequence[tuple[str, str]]
"""The name and the arguments of each call, in their order."""
SPACE = re.compile(r"\s*")


class ParseHandler(Protocol):
    """Who is told what a text is."""

    def content(self, text: str) -> None:
        """Some of what is answered."""

    def reasoning(self, text: str) -> None:
        """Some of the thinking before it."""

    def calls(self, calls: ParsedCalls, text: str) -> None:
        """Calls that are whole; `written` is all the text since those before them, theirs included."""


class ParseBuffer:
    """The text that nobody was told of yet, and how far it was read.

    Whatever was read leaves by one of four doors: it is content, it is reasoning, it is markup, it is calls.
    """

    def __init__(self, handler: ParseHandler) -> None:
        self._handler = handler
        self.text = ""
        self.position = 0
        """How far it was read."""
        self.is_complete = False
        """Whether no more will come."""
        self._consumed: list[str] = []

    def emit_content(self, end: int) -> None:
        """It is content, up to there."""
        if end:
            self._handler.content(self._consume(end))

    def emit_reasoning(self, end: int) -> None:
        """It is reasoning, up to there."""
        if end:
            self._handler.reasoning(self._consume(end))

    def skip_markup(self, end: int) -> None:
        """It is nothing to be told, up to there."""
        self._consume(end)

    def emit_calls(self, calls: ParsedCalls) -> None:
        """All that was read is these calls."""
        self._consume(self.position)
        self._handler.calls(calls, "".join(self._consumed))
        self._consumed.clear()

    def _consume(self, end: int) -> str:
        consumed, self.text, self.position = self.text[:end], self.text[end:], 0
        self._consumed.append(consumed)
        return consumed


def has_more(buffer: ParseBuffer) -> Parser[bool]:
    """Whether there is one more character."""
    while buffer.position >= len(buffer.text):
        if buffer.is_complete:
            return False
        yield
    return True


def match_literal(buffer: ParseBuffer, word: str) -> Parser[bool]:
    """This word, or nothing: it is known at the first character that differs."""
    while not buffer.text.startswith(word, buffer.position):
        if buffer.is_complete or not word.startswith(buffer.text[buffer.position : buffer.position + len(word)]):
            return False
        yield
    buffer.position += len(word)
    return True


def match_pattern(buffer: ParseBuffer, pattern: re.Pattern[str]) -> Parser[str]:
    """As many characters of a kind as there are, perhaps none."""
    start = buffer.position
    while True:
        match = pattern.match(buffer.text, buffer.position)
        assert match is not None  # it matches nothing at all, too
        buffer.position = match.end()
        if buffer.position < len(buffer.text) or buffer.is_complete:
            return buffer.text[start : buffer.position]
        yield


def read_until(buffer: ParseBuffer, words: re.Pattern[str], max_length: int) -> Parser[str | None]:
    """The first of some words, and all that comes before it; None where none of them comes. longest: their length."""
    start = search_from = buffer.position
    while (match := words.search(buffer.text, search_from)) is None:
        if buffer.is_complete:
            return None
        search_from = max(start, len(buffer.text) - max_length + 1)
        yield
    buffer.position = match.end()
    return match[0]


def find_literal(buffer: ParseBuffer, word: str, lead: str = "") -> Parser[bool]:
    """This word, with a `lead` that may stand before it. What comes before them is content, and told as such as soon as
    it cannot be their beginning; where the word never comes, that is all there is."""
    while (start := buffer.text.find(word, buffer.position)) < 0:
        buffer.emit_content(
            len(buffer.text) if buffer.is_complete else partial_match_start(buffer.text, lead + word, word)
        )
        if buffer.is_complete:
            return False
        yield
    buffer.emit_content(start - len(lead) if lead and buffer.text.endswith(lead, 0, start) else start)
    buffer.position = buffer.text.index(word) + len(word)
    return True


def partial_match_start(text: str, *words: str) -> int:
    """Where the longest beginning of one of the words starts at the end of a text; the text's length if there is
    none."""
    search_from = max(0, len(text) - max(map(len, words)) + 1)
    match = _prefix_pattern(words).search(text, search_from)
    return match.start() if match else len(text)


@cache
def _prefix_pattern(words: tuple[str, ...]) -> re.Pattern[str]:
    """What ends in the beginning of one of the words; the leftmost of these is the longest."""
    prefixes = {word[:length] for word in words for length in range(1, len(word))}
    return re.compile(f"(?:{'|'.join(map(re.escape, sorted(prefixes, key=len, reverse=True)))})\\Z")
