"""An answer that somebody wrote, as the model would have written it: what a model is taught by.

A template shows a conversation in which the assistant has spoken, and one in which it is about to speak. What the first
has beyond the second, up to the token that ends the turn, is what the model would have to write. Two kinds of template
show more in the second than in the first: those that open the reasoning for the model, where its answer has none, and
those that close it at once, where its answer has some. There the answer is shown with the reasoning that it would have:
an empty one, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from etude.chat.conversation import make_unused_word
from etude.chat.reasoning import THINK_CLOSE, THINK_OPEN, split_reasoning
from etude.errors import ChatError
from etude.records import Message

__all__ = ["render_answer", "strip_turn_end"]

RenderText = Callable[[Sequence[Message], bool], str]
"""The text of a conversation, up to where the assistant is to speak if that is asked for."""


def render_answer(text: RenderText, before: Sequence[Message], answer: Message, reasons: bool) -> tuple[str, str]:
    """What the model is shown, and what it would have to write to give this answer: all that the template shows of it,
    with what closes it. reasons: whether the template knows of reasoning, which an answer may have in its text."""
    asked = text(before, True)
    if reasons and not answer.reasoning and isinstance(answer.content, str):
        thought, content = split_reasoning(answer.content)
        answer = replace(answer, reasoning=thought, content=content)
    said = _find_answer_text(text, asked, before, answer)
    if said is None:
        raise ChatError(
            "The chat template does not show an answer after the words with which it asks for one, so that nobody can "
            "say what the model would have to write. Give it another template with `chat.template`, or give prompts "
            "and completions as plain text."
        )
    for call in answer.tool_calls:
        if call.name not in said:
            raise ChatError(
                f"The chat template leaves out what an answer calls ({call.name}), so that nothing of it would be "
                f"learned. Give the model a template with tools, by `chat.template`."
            )
    return asked, said


def _find_answer_text(text: RenderText, asked: str, before: Sequence[Message], answer: Message) -> str | None:
    """What follows the words that ask for an answer, where it is this one."""
    for each, gone in _reasoning_variants(answer, before):
        whole = text([*before, each], False)
        if whole.startswith(asked):
            return whole[len(asked) :].replace(gone, "") if gone else whole[len(asked) :]
    if not asked.rstrip().endswith(THINK_OPEN):
        return None
    unopened = asked[: asked.rindex(THINK_OPEN)]
    whole = text([*before, replace(answer, reasoning="")], False)
    shown = whole[len(unopened) :].rpartition(THINK_CLOSE)[2].lstrip()
    return f"{answer.reasoning}\n{THINK_CLOSE}\n\n{shown}" if whole.startswith(unopened) else None


def strip_turn_end(said: str, answer: Message, ends: Sequence[str]) -> tuple[str, str | None]:
    """What was said without what closes it, and the end that comes first after the answer's own words; None where the
    template shows none."""
    found = sorted((at, end) for end in ends for at in _find_all(said, end))
    if not found:
        return said, None
    words = answer.content.strip() if isinstance(answer.content, str) and not answer.tool_calls else ""
    at, end = next((each for each in found if said[: each[0]].rstrip().endswith(words)), found[0])
    return said[:at], end


def _reasoning_variants(answer: Message, before: Sequence[Message]) -> Iterator[tuple[Message, str]]:
    """The answer, and how it is with the reasoning that a template may want; with what is to be taken out again."""
    yield answer, ""
    if answer.reasoning:
        yield replace(answer, reasoning=""), ""
    else:
        word = make_unused_word("etudethought", [*before, answer])
        yield replace(answer, reasoning=word), word


def _find_all(text: str, word: str) -> Iterator[int]:
    at = text.find(word)
    while at >= 0:
        yield at
        at = text.find(word, at + 1)
