"""What is written down, as token rows to learn from: texts, answers to prompts, whole conversations.

Conversations go the way that sampled ones go: each answer stands after the very ids that the model would have been
served, and is the ids that it would have had to write, with the one that ends its turn. Where a template drops earlier
thinking and the history is to follow it, a conversation is several rows, as it would have been for the sampler.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from etude.chat import Chat, message_of
from etude.chat.messages import text_of
from etude.data.adapt import samples
from etude.data.prompts import plain_prompt, without_nulls
from etude.errors import ChatError, DataError
from etude.records import Completion, Message, Turn

__all__ = [
    "Answer",
    "Example",
    "Form",
    "Row",
    "Told",
    "answered",
    "of_completion",
    "of_messages",
    "of_text",
    "told",
    "tools_of",
]

Form: TypeAlias = Mapping[str, Any]
"""A message as files write it."""
Told: TypeAlias = str | Sequence[Form]
"""What files hold where somebody speaks: text, or messages."""


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A token sequence, and which of its tokens are learned."""

    ids: NDArray[np.int32]  # [T]
    action: NDArray[np.bool_]  # [T]
    turn: NDArray[np.int16]  # [T] which answer of a conversation a learned token belongs to

    def cut(self, length: int) -> Row:
        """Its first tokens."""
        return Row(self.ids[:length], self.action[:length], self.turn[:length])

    @property
    def learned(self) -> int:
        """How many tokens are."""
        return int(self.action.sum())


Answer: TypeAlias = tuple[Row, ...]
"""The rows of one text or one conversation, in the order of time; none where nothing is to be learned."""
Example: TypeAlias = tuple[Answer, ...]
"""What is learned from at once: one answer, or the preferred one and the other."""


def of_text(chat: Chat, text: str) -> Answer:
    """A text to its end, every token of it learned but the first, which nothing predicts."""
    if not text:
        return ()
    ids = chat.tokenizer.encode(text, special=True)
    return _row(chat, ids[:1], ids[1:])


def of_completion(chat: Chat, prompt: str, completion: str) -> Answer:
    """What is written after a text, with the token that ends it."""
    if not completion:
        return ()
    asked = chat.tokenizer.encode(prompt, special=True)
    return _row(chat, asked, chat.tokenizer.encode_after(prompt, completion, special=True, known=asked))


def of_messages(
    chat: Chat, forms: Sequence[Form], tools: Sequence[Form] = (), *, first: int = 0, last_only: bool = False
) -> Answer:
    """The answers of a conversation, those from message `first` on learned, or the last of them alone.

    An answer that says nothing, or that its file gives the `weight` 0, is context.
    """
    messages = [message_of(form) for form in forms]
    conversation, turns, learned = chat.conversation(), list[Turn](), list[int]()
    for place, message in enumerate(messages):
        if message.role != "assistant" or place == 0:
            continue
        before = messages[:place]
        asked = conversation.render(before, tools)
        said = chat.completion_ids(before, message, tools, asked_ids=None if turns else asked)
        conversation.served(before, tools, asked, said, message)
        if place >= first and _says(message) and forms[place].get("weight", 1) != 0:
            learned.append(len(turns))
        nothing = np.zeros(len(said), np.int32)
        turns.append(Turn(asked, Completion(said, nothing.astype(np.float32), nothing, "stop"), len(turns)))
    kept = learned[-1:] if last_only else learned
    rows = (Row(s.ids, s.action & np.isin(s.turn, kept), s.turn.astype(np.int16)) for s in samples(turns, 0))
    return tuple(row for row in rows if row.learned)


def answered(chat: Chat, prompt: Told, said: Told, tools: Sequence[Form], where: str) -> Answer:
    """An answer to a prompt, each as text or as messages."""
    try:
        if not isinstance(prompt, str):
            more: Sequence[Form] = [{"role": "assistant", "content": said}] if isinstance(said, str) else said
            return of_messages(chat, [*prompt, *more], tools, first=len(prompt))
        if isinstance(said, str):
            return of_completion(chat, prompt, said)
    except ChatError as error:
        raise ChatError(f"{where}: {error}") from error
    raise DataError(f"{where} has a prompt of text and an answer of messages. Write both as messages, or both as text.")


def told(value: Any, where: str, what: str) -> Told:
    """What a file holds where somebody speaks, checked; nothing is an empty text."""
    return "" if value in (None, "", []) else plain_prompt(value, where, what)


def tools_of(value: Any, where: str) -> list[dict[str, Any]]:
    """The tools that a row offers: a list of their schemas, or that list as JSON."""
    if isinstance(value, str) and value:
        try:
            value = json.loads(value)
        except ValueError as error:
            raise DataError(f"{where} has tools that are not JSON: {error}. Write a list of their schemas.") from error
    if not value:
        return []
    if not isinstance(value, list) or not all(isinstance(each, Mapping) for each in value):
        raise DataError(
            f"{where} has a value of type {type(value).__name__} for its tools; they are a list of their schemas."
        )
    return [without_nulls(each) for each in value]


def _row(chat: Chat, asked: NDArray[np.int32], said: NDArray[np.int32]) -> Answer:
    """One row: what is asked, and what is learned of what is said after it, with the end."""
    ends = chat.tokenizer.eos_ids
    if not len(said) or int(said[-1]) not in ends:
        said = np.append(said, np.int32(ends[0]))
    ids = np.concatenate([asked, said]).astype(np.int32)
    action = np.arange(len(ids)) >= max(len(asked), 1)
    return (Row(ids, action, np.zeros(len(ids), np.int16)),)


def _says(message: Message) -> bool:
    text = text_of(message.content)
    return bool(text is None or text or message.tool_calls or message.reasoning)
