"""The thinking aloud before an answer: `<think>…</think>`, told apart from what is answered."""

from __future__ import annotations

import re

from etude.chat.feed import SPACE, Feed, Found, Reading, literal, run, unfinished

__all__ = ["CLOSE", "OPEN", "reasoning", "split_reasoning"]

OPEN, CLOSE = "<think>", "</think>"
_LINES = re.compile(r"\n*")


def reasoning(feed: Feed, opened: bool | None) -> Reading[None]:
    """Read the reasoning at the start of a text, and the line breaks that set it apart from the answer.

    `opened` says that the prompt has already written `<think>`: then all that comes before `</think>` is reasoning, and
    a text that was cut off before it is nothing else. None says that nobody knows: then a `</think>` that nobody opened
    is taken to have been opened by the prompt, which is not certain before it comes. Tags in the middle of an answer
    are part of the answer.
    """
    yield from run(feed, SPACE)
    if (yield from literal(feed, OPEN)):
        feed.markup(feed.at)
    else:
        feed.at = 0
        if not opened and (opened is False or not (yield from _closes(feed))):
            return
    yield from run(feed, _LINES)
    feed.markup(feed.at)
    yield from _thought(feed)
    yield from run(feed, _LINES)
    feed.markup(feed.at)


def split_reasoning(text: str) -> tuple[str, str]:
    """The reasoning at the start of a whole text, whose prompt is not known, and the answer after it."""
    split = _Split()
    feed = Feed(split)
    feed.text, feed.ended = text, True
    for _ in reasoning(feed, None):
        raise AssertionError("it is whole")
    return split.thought, feed.text


def _thought(feed: Feed) -> Reading[None]:
    """What is thought, up to its close; without the line breaks at its end."""
    while (close := feed.text.find(CLOSE)) < 0 and not feed.ended:
        feed.reasoning(len(feed.text[: unfinished(feed.text, CLOSE)].rstrip("\n")))
        yield
    feed.reasoning(len(feed.text[: close if close >= 0 else len(feed.text)].rstrip("\n")))
    feed.markup(feed.text.find(CLOSE) + len(CLOSE) if close >= 0 else len(feed.text))


def _closes(feed: Feed) -> Reading[bool]:
    """Whether the reasoning ends that nobody opened."""
    while CLOSE not in feed.text and not feed.ended:
        yield
    before, close, _ = feed.text.partition(CLOSE)
    return bool(close) and OPEN not in before


class _Split:
    """Who is told what was thought."""

    def __init__(self) -> None:
        self.thought = ""

    def reasoning(self, text: str) -> None:
        """Some of it."""
        self.thought += text

    def content(self, text: str) -> None:
        """The answer is left where it is."""

    def calls(self, found: Found, written: str) -> None:
        """And so are its calls."""
