"""The thinking aloud before an answer: `<think>…</think>`, told apart from what is answered."""

from __future__ import annotations

__all__ = ["CLOSE", "OPEN", "split_reasoning"]

OPEN, CLOSE = "<think>", "</think>"


def split_reasoning(text: str, opened: bool = False) -> tuple[str, str]:
    """The reasoning at the start of a text, and the answer after it, without the line breaks that set them apart.

    `opened` says that the prompt has already written `<think>`: then all that comes before `</think>` is reasoning, and
    a text that was cut off before it is nothing else. A `</think>` that nobody opened is taken to have been opened by
    the prompt. Tags in the middle of an answer are part of the answer.
    """
    begun = text.lstrip()
    if begun.startswith(OPEN):
        opened, text = True, begun.removeprefix(OPEN)
    before, close, after = text.partition(CLOSE)
    if not close:
        return (text.strip("\n"), "") if opened else ("", text)
    if not opened and OPEN in before:
        return "", text
    return before.strip("\n"), after.lstrip("\n")
