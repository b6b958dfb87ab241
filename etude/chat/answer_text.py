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


def render_answer(
    render_text: RenderText, messages: Sequence[Message], answer: Message, supports_reasoning: bool
) -> tuple[str, str]:
    """What the model is shown, and what it would have to write to give this answer: all that the template shows of it,
    with what closes it. reasons: whether the template knows of reasoning, which an answer may have in its text."""
    prompt = render_text(messages, True)
    if supports_reasoning and not answer.reasoning and isinstance(answer.content, str):
        reasoning, content = split_reasoning(answer.content)
        answer = replace(answer, reasoning=reasoning, content=content)
    answer_text = _find_answer_text(render_text, prompt, messages, answer)
    if answer_text is None:
        raise ChatError(
            "The chat template does not show an answer after the words with which it asks for one, so that nobody can "
            "say what the model would have to write. Give it another template with `chat.template`, or give prompts "
            "and completions as plain text."
        )
    for call in answer.tool_calls:
        if call.name not in answer_text:
            raise ChatError(
                f"The chat template leaves out what an answer calls ({call.name}), so that nothing of it would be "
                f"learned. Give the model a template with tools, by `chat.template`."
            )
    return prompt, answer_text


def _find_answer_text(render_text: RenderText, prompt: str, messages: Sequence[Message], answer: Message) -> str | None:
    """What follows the words that ask for an answer, where it is this one."""
    for variant, placeholder in _reasoning_variants(answer, messages):
        rendered = render_text([*messages, variant], False)
        if rendered.startswith(prompt):
            return rendered[len(prompt) :].replace(placeholder, "") if placeholder else rendered[len(prompt) :]
    if not prompt.rstrip().endswith(THINK_OPEN):
        return None
    unopened = prompt[: prompt.rindex(THINK_OPEN)]
    rendered = render_text([*messages, replace(answer, reasoning="")], False)
    answer_text = rendered[len(unopened) :].rpartition(THINK_CLOSE)[2].lstrip()
    return f"{answer.reasoning}\n{THINK_CLOSE}\n\n{answer_text}" if rendered.startswith(unopened) else None


def strip_turn_end(answer_text: str, answer: Message, eos_texts: Sequence[str]) -> tuple[str, str | None]:
    """What was said without what closes it, and the end that comes first after the answer's own words; None where the
    template shows none."""
    matches = sorted((position, end) for end in eos_texts for position in _find_all(answer_text, end))
    if not matches:
        return answer_text, None
    content = answer.content.strip() if isinstance(answer.content, str) and not answer.tool_calls else ""
    position, end = next((match for match in matches if answer_text[: match[0]].rstrip().endswith(content)), matches[0])
    return answer_text[:position], end


def _reasoning_variants(answer: Message, messages: Sequence[Message]) -> Iterator[tuple[Message, str]]:
    """The answer, and how it is with the reasoning that a template may want; with what is to be taken out again."""
    yield answer, ""
    if answer.reasoning:
        yield replace(answer, reasoning=""), ""
    else:
        word = make_unused_word("etudethought", [*messages, answer])
        yield replace(answer, reasoning=word), word


def _find_all(text: str, word: str) -> Iterator[int]:
    position = text.find(word)
    while position >= 0:
        yield position
        position = text.find(word, position + 1)
