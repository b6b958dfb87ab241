"""Chats for tests of what is learned from conversations: a byte-level tokenizer, and a template of one's choice."""

from __future__ import annotations

from pathlib import Path

from etude.chat import Chat, Tokenizer
from etude.chat.continuation import History
from etude.data.lessons import Answer
from tests.chat.made import CHATML, byte_level, ends_of, published, save


def chat_of(directory: Path, name: str | None = "chatml", history: History = "served") -> Chat:
    """The chat of a published template, of plain ChatML, or of a model without a template."""
    template = None if name is None else CHATML if name == "chatml" else published()[name]
    ends = ends_of(name or "chatml")
    inner = byte_level(template, ["<|endoftext|>", *ends])
    return Chat(Tokenizer.load(save(directory, inner, template, list(ends))), history)


def shown(chat: Chat, answer: Answer) -> list[str]:
    """Each row as text, what is learned in [brackets]."""
    told = []
    for row in answer:
        text, open_ = "", False
        for id, learned in zip(row.ids.tolist(), row.action.tolist(), strict=True):
            text += ("[" if learned and not open_ else "]" if open_ and not learned else "") + chat.tokenizer.decode(
                [id], special=True
            )
            open_ = learned
        told.append(text + ("]" if open_ else ""))
    return told
