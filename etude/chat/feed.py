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

__all__ = ["SPACE", "Feed", "Found", "Reading", "Sink", "literal", "ready", "run", "sought", "unfinished", "until"]

T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]
"""Something that is being read, and what it turns out to be."""
Found: TypeAlias = Sequence[tuple[str, str]]
"""The name and the arguments of each call, in their order."""
SPACE = re.compile(r"\s*")


class Sink(Protocol):
    """Who is told what a text is."""

    def content(self, text: str) -> None:
        """Some of what is answered."""

    def reasoning(self, text: str) -> None:
        """Some of the thinking before it."""

    def calls(self, found: Found, written: str) -> None:
        """Calls that are whole; `written` is all the text since those before them, theirs included."""


class Feed:
    """The text that nobody was told of yet, and how far it was read.

    Whatever was read leaves by one of four doors: it is content, it is reasoning, it is markup, it is calls.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.text = ""
        self.at = 0
        """How far it was read."""
        self.ended = False
        """Whether no more will come."""
        self._passed: list[str] = []

    def content(self, upto: int) -> None:
        """It is content, up to there."""
        if upto:
            self._sink.content(self._pass(upto))

    def reasoning(self, upto: int) -> None:
        """It is reasoning, up to there."""
        if upto:
            self._sink.reasoning(self._pass(upto))

    def markup(self, upto: int) -> None:
        """It is nothing to be told, up to there."""
        self._pass(upto)

    def calls(self, found: Found) -> None:
        """All that was read is these calls."""
        self._pass(self.at)
        self._sink.calls(found, "".join(self._passed))
        self._passed.clear()

    def _pass(self, upto: int) -> str:
        gone, self.text, self.at = self.text[:upto], self.text[upto:], 0
        self._passed.append(gone)
        return gone


def ready(feed: Feed) -> Reading[bool]:
    """Whether there is one more character."""
    while feed.at >= len(feed.text):
        if feed.ended:
            return False
        yield
    return True


def literal(feed: Feed, word: str) -> Reading[bool]:
    """This word, or nothing: it is known at the first character that differs."""
    while not feed.text.startswith(word, feed.at):
        if feed.ended or not word.startswith(feed.text[feed.at : feed.at + len(word)]):
            return False
        yield
    feed.at += len(word)
    return True


def run(feed: Feed, pattern: re.Pattern[str]) -> Reading[str]:
    """As many characters of a kind as there are, perhaps none."""
    start = feed.at
    while True:
        found = pattern.match(feed.text, feed.at)
        assert found is not None  # it matches nothing at all, too
        feed.at = found.end()
        if feed.at < len(feed.text) or feed.ended:
            return feed.text[start : feed.at]
        yield


def until(feed: Feed, words: re.Pattern[str], longest: int) -> Reading[str | None]:
    """The first of some words, and all that comes before it; None where none of them comes. longest: their length."""
    start = look = feed.at
    while (found := words.search(feed.text, look)) is None:
        if feed.ended:
            return None
        look = max(start, len(feed.text) - longest + 1)
        yield
    feed.at = found.end()
    return found[0]


def sought(feed: Feed, word: str, lead: str = "") -> Reading[bool]:
    """This word, with a `lead` that may stand before it. What comes before them is content, and told as such as soon as
    it cannot be their beginning; where the word never comes, that is all there is."""
    while (at := feed.text.find(word, feed.at)) < 0:
        feed.content(len(feed.text) if feed.ended else unfinished(feed.text, lead + word, word))
        if feed.ended:
            return False
        yield
    feed.content(at - len(lead) if lead and feed.text.endswith(lead, 0, at) else at)
    feed.at = feed.text.index(word) + len(word)
    return True


def unfinished(text: str, *words: str) -> int:
    """Where the longest beginning of one of the words starts at the end of a text; the text's length if there is
    none."""
    tail = max(0, len(text) - max(map(len, words)) + 1)
    found = _beginnings(words).search(text, tail)
    return found.start() if found else len(text)


@cache
def _beginnings(words: tuple[str, ...]) -> re.Pattern[str]:
    """What ends in the beginning of one of the words; the leftmost of these is the longest."""
    begun = {word[:length] for word in words for length in range(1, len(word))}
    return re.compile(f"(?:{'|'.join(map(re.escape, sorted(begun, key=len, reverse=True)))})\\Z")
