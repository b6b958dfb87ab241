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

from etude.chat import ChatRenderer, message_from_dict
from etude.chat.messages import content_text
from etude.data.prompts import check_prompt, drop_nulls
from etude.data.samples import build_samples
from etude.errors import ChatError, DataError
from etude.records import Completion, Message, Turn

__all__ = [
    "AnswerRows",
    "Example",
    "MessageDict",
    "TextOrMessages",
    "TokenRow",
    "check_text_or_messages",
    "tokenize_answer",
    "tokenize_completion",
    "tokenize_messages",
    "tokenize_text",
    "tools_of",
]

MessageDict: TypeAlias = Mapping[str, Any]
"""A message as files write it."""
TextOrMessages: TypeAlias = str | Sequence[MessageDict]
"""What files hold where somebody speaks: text, or messages."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenRow:
    """A token sequence, and which of its tokens are learned."""

    ids: NDArray[np.int32]  # [T]
    action: NDArray[np.bool_]  # [T]
    turn: NDArray[np.int16]  # [T] which answer of a conversation a learned token belongs to

    def truncate(self, length: int) -> TokenRow:
        """Its first tokens."""
        return TokenRow(self.ids[:length], self.action[:length], self.turn[:length])

    @property
    def num_trained_tokens(self) -> int:
        """How many tokens are."""
        return int(self.action.sum())


AnswerRows: TypeAlias = tuple[TokenRow, ...]
"""The rows of one text or one conversation, in the order of time; none where nothing is to be learned."""
Example: TypeAlias = tuple[AnswerRows, ...]
"""What is learned from at once: one answer, or the preferred one and the other."""


def tokenize_text(chat: ChatRenderer, text: str) -> AnswerRows:
    """A text to its end, every token of it learned but the first, which nothing predicts."""
    if not text:
        return ()
    ids = chat.tokenizer.encode(text, add_special_tokens=True)
    return _build_row(chat, ids[:1], ids[1:])


def tokenize_completion(chat: ChatRenderer, prompt: str, completion: str) -> AnswerRows:
    """What is written after a text, with the token that ends it."""
    if not completion:
        return ()
    prompt_ids = chat.tokenizer.encode(prompt, add_special_tokens=True)
    return _build_row(
        chat,
        prompt_ids,
        chat.tokenizer.encode_after_text(prompt, completion, add_special_tokens=True, before_ids=prompt_ids),
    )


def tokenize_messages(
    chat: ChatRenderer,
    message_dicts: Sequence[MessageDict],
    tools: Sequence[MessageDict] = (),
    *,
    first: int = 0,
    last_only: bool = False,
) -> AnswerRows:
    """The answers of a conversation, those from message `first` on learned, or the last of them alone.

    An answer that says nothing, or that its file gives the `weight` 0, is context.
    """
    messages = [message_from_dict(message_dict) for message_dict in message_dicts]
    conversation, turns, eligible_turns = chat.start_conversation(), list[Turn](), list[int]()
    for index, message in enumerate(messages):
        if message.role != "assistant" or index == 0:
            continue
        before = messages[:index]
        prompt_ids = conversation.render(before, tools)
        answer_ids = chat.encode_answer(before, message, tools, prompt_ids=None if turns else prompt_ids)
        conversation.remember_answer(before, tools, prompt_ids, answer_ids, message)
        if index >= first and _has_content(message) and message_dicts[index].get("weight", 1) != 0:
            eligible_turns.append(len(turns))
        zeros = np.zeros(len(answer_ids), np.int32)
        turns.append(Turn(prompt_ids, Completion(answer_ids, zeros.astype(np.float32), zeros, "stop"), len(turns)))
    trained_turns = eligible_turns[-1:] if last_only else eligible_turns
    rows = (
        TokenRow(sample.ids, sample.action & np.isin(sample.turn, trained_turns), sample.turn.astype(np.int16))
        for sample in build_samples(turns, 0)
    )
    return tuple(row for row in rows if row.num_trained_tokens)


def tokenize_answer(
    chat: ChatRenderer, prompt: TextOrMessages, answer: TextOrMessages, tools: Sequence[MessageDict], where: str
) -> AnswerRows:
    """An answer to a prompt, each as text or as messages."""
    try:
        if not isinstance(prompt, str):
            answer_messages: Sequence[MessageDict] = (
                [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
            )
            return tokenize_messages(chat, [*prompt, *answer_messages], tools, first=len(prompt))
        if isinstance(answer, str):
            return tokenize_completion(chat, prompt, answer)
    except ChatError as error:
        raise ChatError(f"{where}: {error}") from error
    raise DataError(f"{where} has a prompt of text and an answer of messages. Write both as messages, or both as text.")


def check_text_or_messages(value: Any, where: str, what: str) -> TextOrMessages:
    """What a file holds where somebody speaks, checked; nothing is an empty text."""
    return "" if value in (None, "", []) else check_prompt(value, where, what)


def tools_of(value: Any, where: str) -> list[dict[str, Any]]:
    """The tools that a row offers: a list of their schemas, or that list as JSON."""
    if isinstance(value, str) and value:
        try:
            value = json.loads(value)
        except ValueError as error:
            raise DataError(f"{where} has tools that are not JSON: {error}. Write a list of their schemas.") from error
    if not value:
        return []
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise DataError(
            f"{where} has a value of type {type(value).__name__} for its tools; they are a list of their schemas."
        )
    return [drop_nulls(tool) for tool in value]


def _build_row(chat: ChatRenderer, prompt_ids: NDArray[np.int32], answer_ids: NDArray[np.int32]) -> AnswerRows:
    """One row: what is asked, and what is learned of what is said after it, with the end."""
    eos_ids = chat.tokenizer.eos_ids
    if not len(answer_ids) or int(answer_ids[-1]) not in eos_ids:
        answer_ids = np.append(answer_ids, np.int32(eos_ids[0]))
    ids = np.concatenate([prompt_ids, answer_ids]).astype(np.int32)
    action = np.arange(len(ids)) >= max(len(prompt_ids), 1)
    return (TokenRow(ids, action, np.zeros(len(ids), np.int16)),)


def _has_content(message: Message) -> bool:
    text = content_text(message.content)
    return bool(text is None or text or message.tool_calls or message.reasoning)
