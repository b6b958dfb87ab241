"""The conversion of supervised data to token rows: texts, answers to prompts, whole conversations.

A conversation is tokenized like a sampled one. Each answer follows the exact ids that a server would have given the
model. The answer is the ids that the model would have had to write, with the end of its turn. If a template drops
earlier reasoning, and the history follows the template, a conversation becomes several rows, as in sampling.
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
from etude.images import ImageSpan, cut_spans
from etude.records import Completion, Message, Turn

MessageDict: TypeAlias = Mapping[str, Any]
"""A message in a data file."""
TextOrMessages: TypeAlias = str | Sequence[MessageDict]
"""A prompt or an answer in a data file."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenRow:
    """A token sequence and the mask of its trained tokens."""

    ids: NDArray[np.int32]  # [T]
    action: NDArray[np.bool_]  # [T] True for a trained token
    turn: NDArray[np.int16]  # [T] the answer of a conversation that a trained token belongs to
    images: tuple[ImageSpan, ...] = ()
    """The images among its context."""

    def truncate(self, length: int) -> TokenRow:
        """Return the first `length` tokens, or fewer: no image is cut."""
        length, images = cut_spans(self.images, length)
        return TokenRow(self.ids[:length], self.action[:length], self.turn[:length], images)

    @property
    def num_trained_tokens(self) -> int:
        """The number of trained tokens."""
        return int(self.action.sum())


AnswerRows: TypeAlias = tuple[TokenRow, ...]
"""The rows of one text or one conversation, in order of time; empty if there is nothing to train on."""
Example: TypeAlias = tuple[AnswerRows, ...]
"""One training example: one answer, or the preferred answer and the other one."""


def tokenize_text(chat: ChatRenderer, text: str) -> AnswerRows:
    """Tokenize a text with its end. Every token is trained except the first, which no token predicts."""
    if not text:
        return ()
    ids = chat.tokenizer.encode(text, add_special_tokens=True)
    return _build_row(chat, ids[:1], ids[1:])


def tokenize_completion(chat: ChatRenderer, prompt: str, completion: str) -> AnswerRows:
    """Tokenize a completion after a prompt, both as text. The completion is trained, with its end token."""
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
    """Tokenize a conversation. Its answers from message `first` on are trained, or only the last of them.

    An empty answer, or one with `weight` 0 in its file, is context.
    """
    messages = [message_from_dict(message_dict) for message_dict in message_dicts]
    if any(message.role == "assistant" and content_text(message.content) is None for message in messages):
        raise ChatError(
            "An answer of the conversation has an image or another part that is no text, and a model writes text. "
            "Leave such rows out, or move the image into the message before it."
        )
    conversation = chat.start_conversation()
    turns = list[Turn]()
    eligible_turns = list[int]()
    for index, message in enumerate(messages):
        if message.role != "assistant" or index == 0:
            continue
        before = messages[:index]
        prompt = conversation.render(before, tools)
        answer_ids = chat.encode_answer(before, message, tools, prompt_ids=None if turns else prompt.ids)
        conversation.remember_answer(before, tools, prompt.ids, answer_ids, message, images=prompt.images)
        if index >= first and _has_content(message) and message_dicts[index].get("weight", 1) != 0:
            eligible_turns.append(len(turns))
        zeros = np.zeros(len(answer_ids), np.int32)
        answer = Completion(answer_ids, zeros.astype(np.float32), zeros, "stop")
        turns.append(Turn(prompt.ids, answer, len(turns), images=prompt.images))
    trained_turns = eligible_turns[-1:] if last_only else eligible_turns
    rows = (
        TokenRow(
            sample.ids, sample.action & np.isin(sample.turn, trained_turns), sample.turn.astype(np.int16), sample.images
        )
        for sample in build_samples(turns, 0)
    )
    return tuple(row for row in rows if row.num_trained_tokens)


def tokenize_answer(
    chat: ChatRenderer,
    prompt: TextOrMessages,
    answer: TextOrMessages,
    tools: Sequence[MessageDict],
    where: str,
    *,
    last_only: bool = False,
) -> AnswerRows:
    """Tokenize an answer to a prompt, both as text or as messages. where: the row's name in errors. last_only: train
    only the last of several answers."""
    try:
        if not isinstance(prompt, str):
            answer_messages: Sequence[MessageDict] = (
                [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
            )
            messages = [*prompt, *answer_messages]
            return tokenize_messages(chat, messages, tools, first=len(prompt), last_only=last_only)
        if isinstance(answer, str):
            return tokenize_completion(chat, prompt, answer)
    except ChatError as error:
        raise ChatError(f"{where}: {error}") from error
    raise DataError(f"{where} has a prompt of text and an answer of messages. Write both as messages, or both as text.")


def check_text_or_messages(value: Any, where: str, what: str) -> TextOrMessages:
    """Check a prompt or an answer of a file and return it; a missing value becomes an empty text."""
    return "" if value in (None, "", []) else check_prompt(value, where, what)


def tools_of(value: Any, where: str) -> list[dict[str, Any]]:
    """Return the tools of a row, from a list of schemas or from that list as JSON."""
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
    """Build one row of prompt and answer. The answer is trained, and gets an end token if it has none."""
    eos_ids = chat.tokenizer.eos_ids
    if not len(answer_ids) or int(answer_ids[-1]) not in eos_ids:
        answer_ids = np.append(answer_ids, np.int32(eos_ids[0]))
    ids = np.concatenate([prompt_ids, answer_ids]).astype(np.int32)
    action = np.arange(len(ids)) >= max(len(prompt_ids), 1)
    return (TokenRow(ids, action, np.zeros(len(ids), np.int16)),)


def _has_content(message: Message) -> bool:
    text = content_text(message.content)
    return bool(text is None or text or message.tool_calls or message.reasoning)
