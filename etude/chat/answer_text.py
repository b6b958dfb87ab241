"""The text that a model has to write for a given answer: the target of supervised training.

A template can render a conversation to its end, or up to the start of the assistant's answer. The difference, up to the
token that ends the turn, is the text that the model has to write. Two kinds of templates add text at the start of the
answer that the finished conversation lacks. Some open the reasoning there, but the answer has none. Others close it
there at once, but the answer has some. For these the answer is rendered with the matching reasoning: an empty one, or
none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from etude.chat.conversation import make_unused_word
from etude.chat.reasoning import THINK_CLOSE, THINK_OPEN, split_reasoning
from etude.errors import ChatError
from etude.records import Message

RenderText = Callable[[Sequence[Message], bool], str]
"""Renders a conversation to its end, or up to the start of the assistant's answer."""


def render_answer(
    render_text: RenderText, messages: Sequence[Message], answer: Message, supports_reasoning: bool
) -> tuple[str, str]:
    """Return the prompt, and the text that the model has to write to give this answer, with the text that closes it.
    supports_reasoning: the template has reasoning, which the answer may have within its content."""
    prompt = render_text(messages, True)
    if supports_reasoning and not answer.reasoning and isinstance(answer.content, str):
        reasoning, content = split_reasoning(answer.content)
        answer = replace(answer, reasoning=reasoning, content=content)
    answer_text = _find_answer_text(render_text, prompt, messages, answer)
    if answer_text is None:
        raise ChatError(
            "The chat template shows an answer differently from the prompt that asks for it, so the text that the "
            "model has to write is unknown. Give another template with `chat.template`, or give prompts and "
            "completions as plain text."
        )
    for call in answer.tool_calls:
        if call.name not in answer_text:
            raise ChatError(
                f"The chat template leaves out a tool call of an answer ({call.name}), so the model would not learn "
                f"it. Give a template with tools by `chat.template`."
            )
    return prompt, answer_text


def _find_answer_text(render_text: RenderText, prompt: str, messages: Sequence[Message], answer: Message) -> str | None:
    """Return the text after the prompt, if the prompt is a prefix of the rendered conversation."""
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
    """Return the text of an answer without the text that closes it, and the first end token after the answer's content.
    That token is None if the template shows none."""
    matches = sorted((position, end) for end in eos_texts for position in _find_all(answer_text, end))
    if not matches:
        return answer_text, None
    content = answer.content.strip() if isinstance(answer.content, str) and not answer.tool_calls else ""
    position, end = next((match for match in matches if answer_text[: match[0]].rstrip().endswith(content)), matches[0])
    return answer_text[:position], end


def _reasoning_variants(answer: Message, messages: Sequence[Message]) -> Iterator[tuple[Message, str]]:
    """Yield the answer in the variants that a template may need, each with a placeholder that has to be removed
    again."""
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
