"""Demonstrations: rows with answers that the model learns.

A row has one of four forms. The first form whose columns are there counts:

    input_ids, assistant_masks     the exact tokens, with the mask of trained tokens (`pretokenized`)
    messages                       a conversation whose answers are trained
    prompt, completion             each text or messages; the completion is trained
    text                           a text, all of which is trained
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from etude.chat import ChatRenderer
from etude.data.examples import SupervisedColumns, SupervisedDataConfig
from etude.data.files import column_paths, lookup
from etude.data.pretokenized import INPUT_IDS, check_vocabulary, keep_last_answer, load_token_rows
from etude.data.prompts import check_prompt
from etude.data.task_images import TaskImages
from etude.data.tokenization import (
    AnswerRows,
    Example,
    check_text_or_messages,
    tokenize_answer,
    tokenize_messages,
    tokenize_text,
    tools_of,
)
from etude.errors import ChatError, DataError


class DemonstrationColumns(SupervisedColumns):
    """The columns of demonstrations. A dotted path leads into a column of mappings."""

    messages: str = Field("messages", min_length=1, description="column of whole conversations")
    prompt: str = Field("prompt", min_length=1, description="column of the prompt, which is text or messages")
    completion: str = Field("completion", min_length=1, description="column of the answer, which is text or messages")
    text: str = Field("text", min_length=1, description="column of plain texts, all of whose tokens are trained")


class DemonstrationDataConfig(SupervisedDataConfig):
    """The source of demonstrations, and the part of them that is trained."""

    columns: DemonstrationColumns = Field(DemonstrationColumns(), description="columns of the files with the examples")
    train_on: Literal["all", "last"] = Field(
        "all", description="answers of a conversation to train on: `all`, or only the `last`; the others are context"
    )

    def tokenize_row(self, row: Mapping[str, Any], chat: ChatRenderer, where: str, images: TaskImages) -> Example:
        columns = self.columns
        if row.get(INPUT_IDS) is not None:
            images.refuse_in(row, f"`{INPUT_IDS}`")
            check_vocabulary(row, chat.tokenizer, where)
            answer = load_token_rows(row, chat.tokenizer, where)
            return (keep_last_answer(answer) if self.train_on == "last" else answer,)
        conversation, prompt = lookup(row, columns.messages), lookup(row, columns.prompt)
        tools = tools_of(lookup(row, columns.tools), where)
        if conversation is not None:
            return (self._tokenize_conversation(images.place_in(row, conversation), tools, chat, where),)
        completion = lookup(row, columns.completion)
        paths = set(column_paths(row))
        if prompt is not None and (completion is not None or columns.completion in paths):
            shown, answer = _place_images(images, row, prompt, completion)
            answer_messages = check_text_or_messages(answer, where, "completion")
            last_only = self.train_on == "last"
            prompt_messages = check_prompt(shown, where)
            return (tokenize_answer(chat, prompt_messages, answer_messages, tools, where, last_only=last_only),)
        text = lookup(row, columns.text)
        if columns.text in paths or text is not None:
            if text is not None and not isinstance(text, str):
                raise DataError(
                    f"{where} has a value of type {type(text).__name__} for its `{columns.text}`; it must be text."
                )
            images.refuse_in(row, f"`{columns.text}`")
            return (tokenize_text(chat, text or ""),)
        raise DataError(
            f"{where} has neither `{columns.messages}`, nor `{columns.prompt}` with `{columns.completion}`, nor "
            f"`{columns.text}`; it has {', '.join(column_paths(row))}. Name the columns with `data.columns`, such as "
            f"`data.columns.prompt=question data.columns.completion=answer`."
        )

    def _tokenize_conversation(
        self, value: Any, tools: list[dict[str, Any]], chat: ChatRenderer, where: str
    ) -> AnswerRows:
        messages = check_prompt(value, where, "conversation")
        if isinstance(messages, str):
            raise DataError(f"{where} has a text for its `{self.columns.messages}`; it must be a list of messages.")
        try:
            return tokenize_messages(chat, messages, tools, last_only=self.train_on == "last")
        except ChatError as error:
            raise ChatError(f"{where}: {error}") from error


def _place_images(images: TaskImages, row: Mapping[str, Any], prompt: Any, completion: Any) -> tuple[Any, Any]:
    """Return a prompt and its completion with the images of the row, which both may show if both are messages."""
    if not isinstance(prompt, list) or not isinstance(completion, list):
        return images.place_in(row, prompt), completion
    placed = images.place_in(row, [*prompt, *completion])
    return placed[: len(prompt)], placed[len(prompt) :]
