"""Demonstrations: rows that show what is to be said.

Four forms, told apart by their columns, the first that is there: `input_ids` with `assistant_masks`, tokens as they
were drawn (`exact`); `messages`, a conversation whose answers are learned; `prompt` and `completion`, each text or
messages; `text`, all of which is learned.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from etude.chat import Chat
from etude.data.exact import IDS, exact, last_learned, same_vocabulary
from etude.data.examples import Shown, ShownColumns
from etude.data.files import lookup, names
from etude.data.lessons import Answer, Example, answered, of_messages, of_text, told, tools_of
from etude.data.prompts import plain_prompt
from etude.errors import ChatError, DataError

__all__ = ["DemonstrationColumns", "Demonstrations"]


class DemonstrationColumns(ShownColumns):
    """Which columns hold what is shown. A dotted path leads into a column that holds mappings."""

    messages: str = Field("messages", min_length=1, description="the column with whole conversations")
    prompt: str = Field("prompt", min_length=1, description="the column with what is asked: text, or messages")
    completion: str = Field("completion", min_length=1, description="the column with what is to be answered: the same")
    text: str = Field("text", min_length=1, description="the column with plain texts, all of which is learned")


class Demonstrations(Shown):
    """What is shown, and which part of it is learned."""

    columns: DemonstrationColumns = Field(DemonstrationColumns(), description="which columns of the files mean what")
    learn: Literal["all", "last"] = Field(
        "all", description="which answers of a conversation are learned; the others are context"
    )

    def example(self, row: Mapping[str, Any], chat: Chat, where: str) -> Example:
        """What is learned from a row; `where` is its place, for what is wrong with it."""
        columns = self.columns
        if row.get(IDS) is not None:
            same_vocabulary(row, chat.tokenizer, where)
            answer = exact(row, chat.tokenizer, where)
            return (last_learned(answer) if self.learn == "last" else answer,)
        conversation, prompt = lookup(row, columns.messages), lookup(row, columns.prompt)
        tools = tools_of(lookup(row, columns.tools), where)
        if conversation is not None:
            return (self._of_conversation(conversation, tools, chat, where),)
        completion = lookup(row, columns.completion)
        there = set(names(row))
        if prompt is not None and (completion is not None or columns.completion in there):
            said = told(completion, where, "completion")
            if self.learn == "last" and not isinstance(said, str):
                said = [form if place == len(said) - 1 else {**form, "weight": 0} for place, form in enumerate(said)]
            return (answered(chat, plain_prompt(prompt, where), said, tools, where),)
        text = lookup(row, columns.text)
        if columns.text in there or text is not None:
            if text is not None and not isinstance(text, str):
                raise DataError(
                    f"{where} has a value of type {type(text).__name__} for its `{columns.text}`; it must be text."
                )
            return (of_text(chat, text or ""),)
        raise DataError(
            f"{where} has neither `{columns.messages}`, nor `{columns.prompt}` with `{columns.completion}`, nor "
            f"`{columns.text}`; it has {', '.join(names(row))}. Say which is meant with `data.columns`, such as "
            f"`data.columns.prompt=question data.columns.completion=answer`."
        )

    def _of_conversation(self, value: Any, tools: list[dict[str, Any]], chat: Chat, where: str) -> Answer:
        forms = plain_prompt(value, where, "conversation")
        if isinstance(forms, str):
            raise DataError(f"{where} has a text for its `{self.columns.messages}`; it must be a list of messages.")
        try:
            return of_messages(chat, forms, tools, last_only=self.learn == "last")
        except ChatError as error:
            raise ChatError(f"{where}: {error}") from error
