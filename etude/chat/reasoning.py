"""A parser of the reasoning before an answer: `<think>…</think>`."""

from __future__ import annotations

import re

from etude.chat.parsing import (
    SPACE,
    ParseBuffer,
    ParsedCalls,
    ParseHandler,
    Parser,
    match_literal,
    match_pattern,
    partial_match_start,
)

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
_LINES = re.compile(r"\n*")


def parse_reasoning(buffer: ParseBuffer, opened: bool | None) -> Parser[None]:
    """Read the reasoning at the start of a text, and the line breaks between it and the answer.

    `opened` is True if the prompt already ends with `<think>`. Then all text before `</think>` is reasoning, also if
    the text was cut off before it. None means that this is unknown. Then a `</think>` without its `<think>` belongs to
    one in the prompt, which is only certain once it comes. Tags in the middle of an answer are part of the answer.
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
    """Return the reasoning at the start of a complete text, whose prompt is unknown, and the answer after it."""
    splitter = _ReasoningSplitter()
    buffer = ParseBuffer(splitter)
    buffer.text = text
    buffer.is_complete = True
    for _ in parse_reasoning(buffer, None):
        raise AssertionError("the text is complete")
    return splitter.reasoning_text, buffer.text


def _parse_reasoning_text(buffer: ParseBuffer) -> Parser[None]:
    """Emit the reasoning up to its close, without the line breaks at its end."""
    while (close := buffer.text.find(THINK_CLOSE)) < 0 and not buffer.is_complete:
        buffer.emit_reasoning(len(buffer.text[: partial_match_start(buffer.text, THINK_CLOSE)].rstrip("\n")))
        yield
    buffer.emit_reasoning(len(buffer.text[: close if close >= 0 else len(buffer.text)].rstrip("\n")))
    buffer.skip_markup(buffer.text.find(THINK_CLOSE) + len(THINK_CLOSE) if close >= 0 else len(buffer.text))


def _has_close(buffer: ParseBuffer) -> Parser[bool]:
    """Return whether a `</think>` comes without a `<think>` before it."""
    while THINK_CLOSE not in buffer.text and not buffer.is_complete:
        yield
    before, close, _ = buffer.text.partition(THINK_CLOSE)
    return bool(close) and THINK_OPEN not in before


class _ReasoningSplitter(ParseHandler):
    """Collects the reasoning."""

    def __init__(self) -> None:
        self.reasoning_text = ""

    def reasoning(self, text: str) -> None:
        self.reasoning_text += text

    def content(self, text: str) -> None:
        """Ignore content: the answer stays in the buffer."""

    def calls(self, calls: ParsedCalls, text: str) -> None:
        """Ignore calls: they stay in the buffer too."""
