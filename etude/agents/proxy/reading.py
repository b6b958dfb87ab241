"""An answer while it is being sampled: ids in; reasoning and text out, as soon as it is certain that they are those.

What is held back: what may become part of a stop string, of a mark that sets reasoning apart, or of a call; and white
space of which it is not known whether it only sets these apart. A call is told when the answer is whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from etude.chat import Chat
from etude.chat.messages import text_of
from etude.chat.reasoning import CLOSE, OPEN
from etude.chat.tokenizer import Ids
from etude.records import Message

__all__ = ["Piece", "Reading"]

CALLS = {
    "hermes": ("<tool_call>",),
    "qwen_xml": ("<tool_call>",),
}
"""The words with which a call begins, by the form of calls; in any other form, it may begin with any word."""


class Piece(NamedTuple):
    """New text."""

    reasoning: str = ""
    content: str = ""


class Reading:
    """Reads one answer. What was given out, joined, is what `whole` then says that the answer is."""

    def __init__(
        self, chat: Chat, prompt: Ids, *, stops: Sequence[str] = (), calls: bool = False, plain: bool = False
    ) -> None:
        """calls: whether the answer may call tools. plain: it is a text that goes on, and nothing else."""
        self._chat, self._stops = chat, [stop for stop in stops if stop]
        self._stream = chat.tokenizer.stream(special=True)
        self._text = ""
        self._calls: Sequence[str] | None = CALLS.get(chat.calls) if calls and chat.calls else ()
        self._undecided = chat.reasons and not plain  # whether there may be more reasoning
        self._thinks = chat.reasons and chat.opens(prompt)
        self._opened = False  # whether the answer's own opening of the reasoning is behind
        self._at = 0  # up to where the text is given out, or passed over
        self._begun = False  # whether anything is given out of the present kind
        self._after_thought = False
        self._given = Piece()
        self.rest = Piece()
        """What the agent has not been given, once it is `whole`."""

    def hold(self) -> None:
        """Give nothing out before the answer is whole: it has to be a call."""
        self._undecided, self._calls = False, None

    def push(self, ids: Sequence[int] | Ids) -> Piece:
        """What these make certain."""
        self._text += self._stream.push(self._chat.shown(ids))
        sure = len(self._text) - _overlap(self._text, self._stops)
        reasoning = self._reasoning(sure) if self._undecided else ""
        content = "" if self._undecided else self._content(sure)
        self._given = Piece(self._given.reasoning + reasoning, self._given.content + content)
        return Piece(reasoning, content)

    def whole(self, answer: Message, text: str) -> Message:
        """The answer as the agent has it.

        That is the `answer` as it is read when it is whole, unless what was given out says otherwise, as where
        reasoning ends that nobody began: then all of the `text` is the content.
        """
        given, content = self._given, text_of(answer.content) or ""
        if not (answer.reasoning.startswith(given.reasoning) and content.startswith(given.content)):
            answer, content = replace(answer, reasoning="", content=text, tool_calls=()), text
        self.rest = Piece(answer.reasoning[len(given.reasoning) :], content[len(given.content) :])
        return answer

    def _reasoning(self, sure: int) -> str:
        """What is certain of the reasoning; it is over once it is decided that there is no more of it."""
        text = self._text[:sure]
        if not self._opened and not self._begun:
            start = len(text) - len(text[self._at :].lstrip())
            if text.startswith(OPEN, start):
                self._thinks = self._opened = True
                self._at = start + len(OPEN)
            elif OPEN.startswith(text[start:]):
                return ""
            elif not self._thinks:
                self._undecided = False
                return ""
        close = text.find(CLOSE, self._at)
        stop = close if close >= 0 else len(text) - _overlap(text, [CLOSE])
        found = self._trimmed(text, stop)
        if close >= 0:
            self._undecided, self._at = False, close + len(CLOSE)
            self._begun, self._after_thought = False, True
        return found

    def _content(self, sure: int) -> str:
        text = self._text[:sure]
        if self._calls is None:
            return ""
        if self._after_thought and not self._begun:
            self._at = len(text) - len(text[self._at :].lstrip("\n"))
        found = [at for word in self._calls if (at := text.find(word, self._at)) >= 0]
        stop = min(found, default=len(text) - _overlap(text, self._calls))
        if not self._calls:
            given = text[self._at : stop]
            self._at, self._begun = stop, self._begun or bool(given)
            return given
        if not self._begun and not text[self._at : stop].strip():
            return ""
        stop = self._at + len(text[self._at : stop].removesuffix("\n"))
        given = text[self._at : stop]
        self._at, self._begun = stop, True
        if found:
            self._calls = None  # the rest is told when it is whole
        return given

    def _trimmed(self, text: str, stop: int) -> str:
        """What is new of the reasoning, without the line breaks around it."""
        if not self._begun:
            self._at = min(stop, len(text) - len(text[self._at :].lstrip("\n")))
        given = text[self._at : stop].rstrip("\n")
        self._at += len(given)
        self._begun = self._begun or bool(given)
        return given


def _overlap(text: str, words: Sequence[str]) -> int:
    """How much of the end of a text may be the beginning of one of the words."""
    longest = max((len(word) for word in words), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        tail = text[-length:]
        if any(word.startswith(tail) for word in words):
            return length
    return 0
