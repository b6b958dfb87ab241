"""Preferences: rows with two answers to one prompt, and which of them was preferred.

`chosen_tokens` and `rejected_tokens` are tokens as they were drawn (`exact`), prompt and all. Else `chosen` and
`rejected` are text or messages. Where there is a `prompt`, they follow it; where there is none, or where
they are conversations that begin with it, what both begin with is the prompt, as in the datasets of Anthropic and TRL.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from etude.chat import ChatRenderer
from etude.data.examples import SupervisedColumns, SupervisedDataConfig
from etude.data.files import column_paths, lookup
from etude.data.pretokenized import check_vocabulary, load_token_rows
from etude.data.prompts import check_prompt
from etude.data.tokenization import (
    Example,
    MessageDict,
    TextOrMessages,
    check_text_or_messages,
    tokenize_answer,
    tools_of,
)
from etude.errors import DataError

__all__ = ["CHOSEN_TOKENS", "REJECTED_TOKENS", "PreferenceColumns", "PreferenceDataConfig", "shared_prefix"]

CHOSEN_TOKENS, REJECTED_TOKENS = "chosen_tokens", "rejected_tokens"
"""The columns of answers that are tokens already."""

WORDS = re.compile(r"\s*\S+|\s+")
"""A word, with the space before it, as most tokenizers have it."""


class PreferenceColumns(SupervisedColumns):
    """Which columns hold what is compared. A dotted path leads into a column that holds mappings."""

    prompt: str = Field(
        "prompt", min_length=1, description="the column with what is asked; where there is none, what both begin with"
    )
    chosen: str = Field("chosen", min_length=1, description="the column with the answer that was preferred")
    rejected: str = Field("rejected", min_length=1, description="the column with the other answer")


class PreferenceDataConfig(SupervisedDataConfig):
    """Pairs of answers."""

    columns: PreferenceColumns = Field(PreferenceColumns(), description="which columns of the files mean what")

    def tokenize_row(self, row: Mapping[str, Any], chat: ChatRenderer, where: str) -> Example:
        """What is learned from a row; `where` is its place, for what is wrong with it."""
        if row.get(CHOSEN_TOKENS) is not None and row.get(REJECTED_TOKENS) is not None:
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
            raise _missing_column(where, columns.prompt, row)
        prompt = None if value is None else check_prompt(value, where)
        shared_prompt, chosen, rejected = _split_prompt(prompt, both[0], both[1], where)
        tools = tools_of(lookup(row, columns.tools), where)
        return tuple(tokenize_answer(chat, shared_prompt, answer, tools, where) for answer in (chosen, rejected))

    def _read_answer(self, row: Mapping[str, Any], name: str, where: str) -> TextOrMessages:
        value = lookup(row, name)
        if value is None and name not in set(column_paths(row)):
            raise _missing_column(where, name, row)
        return check_text_or_messages(value, where, f"`{name}`")


def shared_prefix(one: str, other: str) -> str:
    """What two texts begin with, in whole words; each is left something to say after it."""
    words, other_words = (WORDS.findall(text) for text in (one, other))
    return "".join(words[: _common_length(words, other_words)])


def _split_prompt(
    prompt: TextOrMessages | None, chosen: TextOrMessages, rejected: TextOrMessages, where: str
) -> tuple[TextOrMessages, TextOrMessages, TextOrMessages]:
    """The prompt, and what each answer says after it."""
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise DataError(f"{where} has a text and messages to choose between. Write both alike.")
    if isinstance(chosen, str) and isinstance(rejected, str):
        if prompt is not None:
            return prompt, chosen, rejected
        words = shared_prefix(chosen, rejected)
        if not words:
            raise DataError(
                f"{where} has no prompt, and its two answers begin with nothing in common that could be one. Name the "
                f"column with prompts: `data.columns.prompt=question`."
            )
        return words, chosen[len(words) :], rejected[len(words) :]
    assert not isinstance(chosen, str) and not isinstance(rejected, str)
    if prompt is not None and not isinstance(prompt, str) and not _starts_with(chosen, prompt):
        return prompt, chosen, rejected
    num_shared = _common_length(chosen, rejected) if prompt is None or isinstance(prompt, str) else len(prompt)
    if not num_shared:
        raise DataError(
            f"{where} has answers of messages that begin with no message in common, and no messages for a prompt. Give "
            f"the prompt as messages, in `prompt` or before both answers."
        )
    return chosen[:num_shared], chosen[num_shared:], rejected[num_shared:]


def _starts_with(messages: Sequence[MessageDict], prefix: Sequence[MessageDict]) -> bool:
    return len(messages) > len(prefix) and all(a == b for a, b in zip(messages, prefix, strict=False))


def _common_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many words, or messages, two begin with alike, their last ones left aside."""
    limit = min(len(one), len(other)) - 1
    return next((index for index in range(limit) if one[index] != other[index]), max(limit, 0))


def _missing_column(where: str, name: str, row: Mapping[str, Any]) -> DataError:
    return DataError(
        f"{where} has no column `{name}`; it has {', '.join(column_paths(row))}. Say which is meant with "
        f"`data.columns`, such as `data.columns.chosen=better`."
    )
