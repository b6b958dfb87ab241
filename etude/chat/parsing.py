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

    def calls(self, found: ParsedCalls, written: str) -> None:
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

    def emit_content(self, upto: int) -> None:
        """It is content, up to there."""
        if upto:
            self._handler.content(self._consume(upto))

    def emit_reasoning(self, upto: int) -> None:
        """It is reasoning, up to there."""
        if upto:
            self._handler.reasoning(self._consume(upto))

    def skip_markup(self, upto: int) -> None:
        """It is nothing to be told, up to there."""
        self._consume(upto)

    def emit_calls(self, found: ParsedCalls) -> None:
        """All that was read is these calls."""
        self._consume(self.position)
        self._handler.calls(found, "".join(self._consumed))
        self._consumed.clear()

    def _consume(self, upto: int) -> str:
        gone, self.text, self.position = self.text[:upto], self.text[upto:], 0
        self._consumed.append(gone)
        return gone


def has_more(feed: ParseBuffer) -> Parser[bool]:
    """Whether there is one more character."""
    while feed.position >= len(feed.text):
        if feed.is_complete:
            return False
        yield
    return True


def match_literal(feed: ParseBuffer, word: str) -> Parser[bool]:
    """This word, or nothing: it is known at the first character that differs."""
    while not feed.text.startswith(word, feed.position):
        if feed.is_complete or not word.startswith(feed.text[feed.position : feed.position + len(word)]):
            return False
        yield
    feed.position += len(word)
    return True


def match_pattern(feed: ParseBuffer, pattern: re.Pattern[str]) -> Parser[str]:
    """As many characters of a kind as there are, perhaps none."""
    start = feed.position
    while True:
        found = pattern.match(feed.text, feed.position)
        assert found is not None  # it matches nothing at all, too
        feed.position = found.end()
        if feed.position < len(feed.text) or feed.is_complete:
            return feed.text[start : feed.position]
        yield


def read_until(feed: ParseBuffer, words: re.Pattern[str], longest: int) -> Parser[str | None]:
    """The first of some words, and all that comes before it; None where none of them comes. longest: their length."""
    start = look = feed.position
    while (found := words.search(feed.text, look)) is None:
        if feed.is_complete:
            return None
        look = max(start, len(feed.text) - longest + 1)
        yield
    feed.position = found.end()
    return found[0]


def find_literal(feed: ParseBuffer, word: str, lead: str = "") -> Parser[bool]:
    """This word, with a `lead` that may stand before it. What comes before them is content, and told as such as soon as
    it cannot be their beginning; where the word never comes, that is all there is."""
    while (at := feed.text.find(word, feed.position)) < 0:
        feed.emit_content(len(feed.text) if feed.is_complete else partial_match_start(feed.text, lead + word, word))
        if feed.is_complete:
            return False
        yield
    feed.emit_content(at - len(lead) if lead and feed.text.endswith(lead, 0, at) else at)
    feed.position = feed.text.index(word) + len(word)
    return True


def partial_match_start(text: str, *words: str) -> int:
    """Where the longest beginning of one of the words starts at the end of a text; the text's length if there is
    none."""
    tail = max(0, len(text) - max(map(len, words)) + 1)
    found = _prefix_pattern(words).search(text, tail)
    return found.start() if found else len(text)


@cache
def _prefix_pattern(words: tuple[str, ...]) -> re.Pattern[str]:
    """What ends in the beginning of one of the words; the leftmost of these is the longest."""
    begun = {word[:length] for word in words for length in range(1, len(word))}
    return re.compile(f"(?:{'|'.join(map(re.escape, sorted(begun, key=len, reverse=True)))})\\Z")
