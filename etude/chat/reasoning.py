"""The thinking aloud before an answer: `<think>…</think>`, told apart from what is answered."""

from __future__ import annotations

import re

from etude.chat.parsing import (
    SPACE,
    ParseBuffer,
    ParsedCalls,
    Parser,
    match_literal,
    match_pattern,
    partial_match_start,
)

__all__ = ["THINK_CLOSE", "THINK_OPEN", "parse_reasoning", "split_reasoning"]

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
_LINES = re.compile(r"\n*")


def parse_reasoning(feed: ParseBuffer, opened: bool | None) -> Parser[None]:
    """Read the reasoning at the start of a text, and the line breaks that set it apart from the answer.

    `opened` says that the prompt has already written `<think>`: then all that comes before `</think>` is reasoning, and
    a text that was cut off before it is nothing else. None says that nobody knows: then a `</think>` that nobody opened
    is taken to have been opened by the prompt, which is not certain before it comes. Tags in the middle of an answer
    are part of the answer.
    """
    yield from match_pattern(feed, SPACE)
    if (yield from match_literal(feed, THINK_OPEN)):
        feed.skip_markup(feed.position)
    else:
        feed.position = 0
        if not opened and (opened is False or not (yield from _finds_close(feed))):
            return
    yield from match_pattern(feed, _LINES)
    feed.skip_markup(feed.position)
    yield from _parse_thought(feed)
    yield from match_pattern(feed, _LINES)
    feed.skip_markup(feed.position)


def split_reasoning(text: str) -> tuple[str, str]:
    """The reasoning at the start of a whole text, whose prompt is not known, and the answer after it."""
    split = _ReasoningSplitter()
    feed = ParseBuffer(split)
    feed.text, feed.is_complete = text, True
    for _ in parse_reasoning(feed, None):
        raise AssertionError("it is whole")
    return split.thought, feed.text


def _parse_thought(feed: ParseBuffer) -> Parser[None]:
    """What is thought, up to its close; without the line breaks at its end."""
    while (close := feed.text.find(THINK_CLOSE)) < 0 and not feed.is_complete:
        feed.emit_reasoning(len(feed.text[: partial_match_start(feed.text, THINK_CLOSE)].rstrip("\n")))
        yield
    feed.emit_reasoning(len(feed.text[: close if close >= 0 else len(feed.text)].rstrip("\n")))
    feed.skip_markup(feed.text.find(THINK_CLOSE) + len(THINK_CLOSE) if close >= 0 else len(feed.text))


def _finds_close(feed: ParseBuffer) -> Parser[bool]:
    """Whether the reasoning ends that nobody opened."""
    while THINK_CLOSE not in feed.text and not feed.is_complete:
        yield
    before, close, _ = feed.text.partition(THINK_CLOSE)
    return bool(close) and THINK_OPEN not in before


class _ReasoningSplitter:
    """Who is told what was thought."""

    def __init__(self) -> None:
        self.thought = ""

    def reasoning(self, text: str) -> None:
        """Some of it."""
        self.thought += text

    def content(self, text: str) -> None:
        """The answer is left where it is."""

    def calls(self, found: ParsedCalls, written: str) -> None:
        """And so are its calls."""
