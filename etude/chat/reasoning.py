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


def parse_reasoning(buffer: ParseBuffer, opened: bool | None) -> Parser[None]:
    """Read the reasoning at the start of a text, and the line breaks that set it apart from the answer.

    `opened` says that the prompt has already written `<think>`: then all that comes before `</think>` is reasoning, and
    a text that was cut off before it is nothing else. None says that nobody knows: then a `</think>` that nobody opened
    is taken to have been opened by the prompt, which is not certain before it comes. Tags in the middle of an answer
    are part of the answer.
    """
    yield from match_pattern(buffer, SPACE)
    if (yield from match_literal(buffer, THINK_OPEN)):
        buffer.skip_markup(buffer.position)
    else:
        buffer.position = 0
        if not opened and (opened is False or not (yield from _has_close(buffer))):
            return
    yield from match_pattern(buffer, _LINES)
    buffer.skip_markup(buffer.position)
    yield from _parse_reasoning_text(buffer)
    yield from match_pattern(buffer, _LINES)
    buffer.skip_markup(buffer.position)


def split_reasoning(text: str) -> tuple[str, str]:
    """The reasoning at the start of a whole text, whose prompt is not known, and the answer after it."""
    splitter = _ReasoningSplitter()
    buffer = ParseBuffer(splitter)
    buffer.text, buffer.is_complete = text, True
    for _ in parse_reasoning(buffer, None):
        raise AssertionError("it is whole")
    return splitter.reasoning_text, buffer.text


def _parse_reasoning_text(buffer: ParseBuffer) -> Parser[None]:
    """What is thought, up to its close; without the line breaks at its end."""
    while (close := buffer.text.find(THINK_CLOSE)) < 0 and not buffer.is_complete:
        buffer.emit_reasoning(len(buffer.text[: partial_match_start(buffer.text, THINK_CLOSE)].rstrip("\n")))
        yield
    buffer.emit_reasoning(len(buffer.text[: close if close >= 0 else len(buffer.text)].rstrip("\n")))
    buffer.skip_markup(buffer.text.find(THINK_CLOSE) + len(THINK_CLOSE) if close >= 0 else len(buffer.text))


def _has_close(buffer: ParseBuffer) -> Parser[bool]:
    """Whether the reasoning ends that nobody opened."""
    while THINK_CLOSE not in buffer.text and not buffer.is_complete:
        yield
    before, close, _ = buffer.text.partition(THINK_CLOSE)
    return bool(close) and THINK_OPEN not in before


class _ReasoningSplitter:
    """Who is told what was thought."""

    def __init__(self) -> None:
        self.reasoning_text = ""

    def reasoning(self, text: str) -> None:
        """Some of it."""
        self.reasoning_text += text

    def content(self, text: str) -> None:
        """The answer is left where it is."""

    def calls(self, calls: ParsedCalls, text: str) -> None:
        """And so are its calls."""
