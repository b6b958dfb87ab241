"""Renderers for tests of supervised tokenization: a byte-level tokenizer, and a chosen template."""

from __future__ import annotations

from pathlib import Path

from etude.chat import ChatRenderer, Tokenizer
from etude.chat.conversation import History
from etude.data.tokenization import AnswerRows
from tests.chat.made import CHATML, byte_level, ends_of, published, save


def chat_of(directory: Path, name: str | None = "chatml", history: History = "served") -> ChatRenderer:
    """Return the renderer of a published template, of plain ChatML, or of a model without a template."""
    template = None if name is None else CHATML if name == "chatml" else published()[name]
    ends = ends_of(name or "chatml")
    inner = byte_level(template, ["<|endoftext|>", *ends])
    return ChatRenderer(Tokenizer.load(save(directory, inner, template, list(ends))), history)


def shown(chat: ChatRenderer, answer: AnswerRows) -> list[str]:
    """Return each row as text, with trained parts in [brackets]."""
    rows = []
    for row in answer:
        text, open_ = "", False
        for id, learned in zip(row.ids.tolist(), row.action.tolist(), strict=True):
            text += ("[" if learned and not open_ else "]" if open_ and not learned else "") + chat.tokenizer.decode(
                [id], keep_special_tokens=True
            )
            open_ = learned
        rows.append(text + ("]" if open_ else ""))
    return rows
