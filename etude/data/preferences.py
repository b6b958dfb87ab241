"""Preferences: rows with two answers to one prompt, of which one is preferred.

`chosen_tokens` and `rejected_tokens` are the exact tokens (`pretokenized`), with the prompt. Otherwise `chosen` and
`rejected` are text or messages, and follow `prompt`. Without a `prompt`, their common beginning is the prompt, as in
the datasets of Anthropic and TRL. Conversations may also begin with the `prompt`, which is then not repeated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from etude.chat import ChatRenderer
from etude.data.examples import SupervisedColumns, SupervisedDataConfig
from etude.data.files import column_paths, lookup, missing_column
from etude.data.pretokenized import check_vocabulary, load_token_rows
from etude.data.prompts import check_prompt
from etude.data.task_images import TaskImages
from etude.data.tokenization import (
    Example,
    MessageDict,
    TextOrMessages,
    check_text_or_messages,
    tokenize_answer,
    tools_of,
)
from etude.errors import DataError

CHOSEN_TOKENS, REJECTED_TOKENS = "chosen_tokens", "rejected_tokens"
"""The columns of answers that are token ids already."""

WORDS = re.compile(r"\s*\S+|\s+")
"""A word with the space before it, as in most tokenizers."""


class PreferenceColumns(SupervisedColumns):
    """The columns of preferences. A dotted path leads into a column of mappings."""

    prompt: str = Field(
        "prompt", min_length=1, description="column of the prompt; without it, the common beginning of both answers"
    )
    chosen: str = Field("chosen", min_length=1, description="column of the preferred answer")
    rejected: str = Field("rejected", min_length=1, description="column of the other answer")


class PreferenceDataConfig(SupervisedDataConfig):
    """The source of pairs of answers."""

    columns: PreferenceColumns = Field(PreferenceColumns(), description="columns of the files with the pairs")

    def tokenize_row(self, row: Mapping[str, Any], chat: ChatRenderer, where: str, images: TaskImages) -> Example:
        """Tokenize a row as a pair, the preferred answer first. The images of the row are those of its prompt."""
        if row.get(CHOSEN_TOKENS) is not None and row.get(REJECTED_TOKENS) is not None:
            images.refuse_in(row, f"`{CHOSEN_TOKENS}`")
            check_vocabulary(row, chat.tokenizer, where)
            return tuple(
                load_token_rows(row[name], chat.tokenizer, f"{where}, `{name}`,")
                for name in (CHOSEN_TOKENS, REJECTED_TOKENS)
            )
        columns = self.columns
        both = [self._read_answer(row, name, where) for name in (columns.chosen, columns.rejected)]
        if not all(both):
            return ((), ())
        value = lookup(row, columns.prompt)
        if value is None and columns.prompt != "prompt":
            raise missing_column(where, columns.prompt, row, "data.columns.chosen=better")
        prompt = None if value is None else check_prompt(value, where)
        shared_prompt, chosen, rejected = _split_prompt(prompt, both[0], both[1], where)
        tools = tools_of(lookup(row, columns.tools), where)
        shown = images.place_in(row, shared_prompt)
        return tuple(tokenize_answer(chat, shown, answer, tools, where) for answer in (chosen, rejected))

    def _read_answer(self, row: Mapping[str, Any], name: str, where: str) -> TextOrMessages:
        value = lookup(row, name)
        if value is None and name not in set(column_paths(row)):
            raise missing_column(where, name, row, "data.columns.chosen=better")
        return check_text_or_messages(value, where, f"`{name}`")


def shared_prefix(one: str, other: str) -> str:
    """Return the common beginning of two texts, in whole words. At least one word of each text is left after it."""
    words, other_words = (WORDS.findall(text) for text in (one, other))
    return "".join(words[: _common_length(words, other_words)])


def _split_prompt(
    prompt: TextOrMessages | None, chosen: TextOrMessages, rejected: TextOrMessages, where: str
) -> tuple[TextOrMessages, TextOrMessages, TextOrMessages]:
    """Split two answers into their prompt and the rest of each answer."""
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise DataError(f"{where} has one answer as text and one as messages. Write both in the same form.")
    if isinstance(chosen, str) and isinstance(rejected, str):
        if prompt is not None:
            return prompt, chosen, rejected
        words = shared_prefix(chosen, rejected)
        if not words:
            raise DataError(
                f"{where} has no prompt, and its two answers have no common beginning. Name the column with prompts: "
                f"`data.columns.prompt=question`."
            )
        return words, chosen[len(words) :], rejected[len(words) :]
    assert not isinstance(chosen, str) and not isinstance(rejected, str)
    if prompt is not None and not isinstance(prompt, str) and not _starts_with(chosen, prompt):
        return prompt, chosen, rejected
    num_shared = _common_length(chosen, rejected) if prompt is None or isinstance(prompt, str) else len(prompt)
    if not num_shared:
        raise DataError(
            f"{where} has answers of messages without a common first message, and no messages for a prompt. Give the "
            f"prompt as messages, in `prompt` or before both answers."
        )
    return chosen[:num_shared], chosen[num_shared:], rejected[num_shared:]


def _starts_with(messages: Sequence[MessageDict], prefix: Sequence[MessageDict]) -> bool:
    return len(messages) > len(prefix) and all(a == b for a, b in zip(messages, prefix, strict=False))


def _common_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Count the equal words or messages at the start of two lists, without the last item of the shorter one."""
    limit = min(len(one), len(other)) - 1
    return next((index for index in range(limit) if one[index] != other[index]), max(limit, 0))
