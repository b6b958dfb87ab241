"""Primitives of incremental parsers: each piece of text is classified as soon as its kind is certain.

A parser is a generator. It reads as far as the text goes, yields when it needs more, and returns its result. So a
format is written once, as for a complete text, and also parses a text that is still growing. The boundaries between the
pieces of text cannot change the result.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from functools import cache
from typing import Protocol, TypeAlias, TypeVar

T = TypeVar("T")
Parser: TypeAlias = Generator[None, None, T]
"""A parser in progress, and the type of its result."""
ParsedCalls: TypeAlias = Sequence[tuple[str, str]]
"""The name and the arguments of each call, in order."""
SPACE = re.compile(r"\s*")


class ParseHandler(Protocol):
    """Receives the classified text."""

    def content(self, text: str) -> None:
        """Take a part of the answer."""

    def reasoning(self, text: str) -> None:
        """Take a part of the reasoning before the answer."""

    def calls(self, calls: ParsedCalls, text: str) -> None:
        """Take complete calls. `text` is all text since the previous calls, including these."""


class ParseBuffer:
    """The text that is not classified yet, and the position up to which it was read.

    All text leaves the buffer as one of four kinds: content, reasoning, markup, or calls.
    """

    def __init__(self, handler: ParseHandler) -> None:
        self._handler = handler
        self.text = ""
        self.position = 0
        """The position up to which the text was read."""
        self.is_complete = False
        """True once no more text will come."""
        self._consumed: list[str] = []

    def emit_content(self, end: int) -> None:
        """Emit the text up to `end` as content."""
        if end:
            self._handler.content(self._consume(end))

    def emit_reasoning(self, end: int) -> None:
        """Emit the text up to `end` as reasoning."""
        if end:
            self._handler.reasoning(self._consume(end))

    def skip_markup(self, end: int) -> None:
        """Drop the text up to `end`, which is markup."""
        self._consume(end)

    def emit_calls(self, calls: ParsedCalls) -> None:
        """Emit all text that was read as these calls."""
        self._consume(self.position)
        self._handler.calls(calls, "".join(self._consumed))
        self._consumed.clear()

    def _consume(self, end: int) -> str:
        consumed = self.text[:end]
        self.text = self.text[end:]
        self.position = 0
        self._consumed.append(consumed)
        return consumed


def has_more(buffer: ParseBuffer) -> Parser[bool]:
    """Return whether there is another character."""
    while buffer.position >= len(buffer.text):
        if buffer.is_complete:
            return False
        yield
    return True


def match_literal(buffer: ParseBuffer, word: str) -> Parser[bool]:
    """Read this word, or nothing. A mismatch is known at the first character that differs."""
    while not buffer.text.startswith(word, buffer.position):
        if buffer.is_complete or not word.startswith(buffer.text[buffer.position : buffer.position + len(word)]):
            return False
        yield
    buffer.position += len(word)
    return True


def match_pattern(buffer: ParseBuffer, pattern: re.Pattern[str]) -> Parser[str]:
    """Read as many characters of a kind as there are, possibly none."""
    start = buffer.position
    while True:
        match = pattern.match(buffer.text, buffer.position)
        assert match is not None  # the pattern also matches the empty string
        buffer.position = match.end()
        if buffer.position < len(buffer.text) or buffer.is_complete:
            return buffer.text[start : buffer.position]
        yield


def read_until(buffer: ParseBuffer, words: re.Pattern[str], max_length: int) -> Parser[str | None]:
    """Read up to and including the first of some words; return that word, or None if none comes. max_length: the length
    of the longest word."""
    start = search_from = buffer.position
    while (match := words.search(buffer.text, search_from)) is None:
        if buffer.is_complete:
            return None
        search_from = max(start, len(buffer.text) - max_length + 1)
        yield
    buffer.position = match.end()
    return match[0]


def find_literal(buffer: ParseBuffer, word: str, lead: str = "") -> Parser[bool]:
    """Read up to and including this word, which a `lead` may precede. The text before them is emitted as content as
    soon as it cannot be their beginning. Return False if the word never comes."""
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
    """Return the start of the longest suffix of a text that is a proper prefix of one of the words; the text's length
    if there is none."""
    search_from = max(0, len(text) - max(map(len, words)) + 1)
    match = _prefix_pattern(words).search(text, search_from)
    return match.start() if match else len(text)


@cache
def _prefix_pattern(words: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern of texts that end in a proper prefix of one of the words; the leftmost match is the longest."""
    prefixes = {word[:length] for word in words for length in range(1, len(word))}
    return re.compile(f"(?:{'|'.join(map(re.escape, sorted(prefixes, key=len, reverse=True)))})\\Z")
