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

from etude.chat import Chat
from etude.data.exact import exact, same_vocabulary
from etude.data.examples import Shown, ShownColumns
from etude.data.files import lookup, names
from etude.data.lessons import Example, Form, Told, answered, told, tools_of
from etude.data.prompts import plain_prompt
from etude.errors import DataError

__all__ = ["CHOSEN", "REJECTED", "PreferenceColumns", "Preferences", "shared"]

CHOSEN, REJECTED = "chosen_tokens", "rejected_tokens"
"""The columns of answers that are tokens already."""

WORDS = re.compile(r"\s*\S+|\s+")
"""A word, with the space before it, as most tokenizers have it."""


class PreferenceColumns(ShownColumns):
    """Which columns hold what is compared. A dotted path leads into a column that holds mappings."""

    prompt: str = Field(
        "prompt", min_length=1, description="the column with what is asked; where there is none, what both begin with"
    )
    chosen: str = Field("chosen", min_length=1, description="the column with the answer that was preferred")
    rejected: str = Field("rejected", min_length=1, description="the column with the other answer")


class Preferences(Shown):
    """Pairs of answers."""

    columns: PreferenceColumns = Field(PreferenceColumns(), description="which columns of the files mean what")

    def example(self, row: Mapping[str, Any], chat: Chat, where: str) -> Example:
        """What is learned from a row; `where` is its place, for what is wrong with it."""
        if row.get(CHOSEN) is not None and row.get(REJECTED) is not None:
            same_vocabulary(row, chat.tokenizer, where)
            return tuple(exact(row[name], chat.tokenizer, f"{where}, `{name}`,") for name in (CHOSEN, REJECTED))
        columns = self.columns
        both = [self._side(row, name, where) for name in (columns.chosen, columns.rejected)]
        if not all(both):
            return ((), ())
        given = lookup(row, columns.prompt)
        if given is None and columns.prompt != "prompt":
            raise _absent(where, columns.prompt, row)
        prompt = None if given is None else plain_prompt(given, where)
        asked, chosen, rejected = _parted(prompt, both[0], both[1], where)
        tools = tools_of(lookup(row, columns.tools), where)
        return tuple(answered(chat, asked, said, tools, where) for said in (chosen, rejected))

    def _side(self, row: Mapping[str, Any], name: str, where: str) -> Told:
        found = lookup(row, name)
        if found is None and name not in set(names(row)):
            raise _absent(where, name, row)
        return told(found, where, f"`{name}`")


def shared(one: str, other: str) -> str:
    """What two texts begin with, in whole words; each is left something to say after it."""
    words, others = (WORDS.findall(text) for text in (one, other))
    return "".join(words[: _common(words, others)])


def _parted(prompt: Told | None, chosen: Told, rejected: Told, where: str) -> tuple[Told, Told, Told]:
    """The prompt, and what each answer says after it."""
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise DataError(f"{where} has a text and messages to choose between. Write both alike.")
    if isinstance(chosen, str) and isinstance(rejected, str):
        if prompt is not None:
            return prompt, chosen, rejected
        words = shared(chosen, rejected)
        if not words:
            raise DataError(
                f"{where} has no prompt, and its two answers begin with nothing in common that could be one. Name the "
                f"column with prompts: `data.columns.prompt=question`."
            )
        return words, chosen[len(words) :], rejected[len(words) :]
    assert not isinstance(chosen, str) and not isinstance(rejected, str)
    if prompt is not None and not isinstance(prompt, str) and not _begins(chosen, prompt):
        return prompt, chosen, rejected
    begun = _common(chosen, rejected) if prompt is None or isinstance(prompt, str) else len(prompt)
    if not begun:
        raise DataError(
            f"{where} has answers of messages that begin with no message in common, and no messages for a prompt. Give "
            f"the prompt as messages, in `prompt` or before both answers."
        )
    return chosen[:begun], chosen[begun:], rejected[begun:]


def _begins(messages: Sequence[Form], with_: Sequence[Form]) -> bool:
    return len(messages) > len(with_) and all(a == b for a, b in zip(messages, with_, strict=False))


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many words, or messages, two begin with alike, their last ones left aside."""
    most = min(len(one), len(other)) - 1
    return next((at for at in range(most) if one[at] != other[at]), max(most, 0))


def _absent(where: str, name: str, row: Mapping[str, Any]) -> DataError:
    return DataError(
        f"{where} has no column `{name}`; it has {', '.join(names(row))}. Say which is meant with `data.columns`, such "
        f"as `data.columns.chosen=better`."
    )
