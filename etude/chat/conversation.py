"""Exact continuation: a conversation that continues a served answer keeps the exact ids that were served.

Text does not determine tokens. If a model's text is tokenized again, the tokens may differ from those it sampled, and a
template may drop or change earlier messages. So a conversation remembers the ids of each answer, and only renders what
follows the answer. If the messages are not those that were served, the agent rewrote its history. Then the conversation
is rendered again: it branches, and both branches are kept. `messages` defines which differences count.

To find the end of an answer in a rendered text, the conversation renders a marked answer in its place. Usually the
model sampled the token that closes its turn, and the rest of the template's closing text follows. If the answer was cut
off, or another token ended it, the whole closing text follows.

An answer that a stop string ended is returned without that string. Some agents write it back at the end, with their own
text after it. That text is context, between the ids of the answer and the template's closing text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

import numpy as np

from etude.chat.answer_index import AnswerIndex, ServedAnswer, Tools
from etude.chat.images import PromptEncoder, RenderedPrompt, TextEncoder
from etude.chat.tokenizer import Ids, Tokenizer
from etude.errors import ChatError
from etude.images import ImageSpan
from etude.records import Message

History: TypeAlias = Literal["served", "template"]


class Conversation:
    """The calls of one attempt to a model, in all branches that the agent makes. Used by one thread at a time."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        render_text: Callable[[Sequence[Message], Tools], str],
        history: History = "served",
        encoder: PromptEncoder | None = None,
    ) -> None:
        """`render_text` renders a conversation up to the start of the assistant's answer. encoder: for a model that
        takes images."""
        self._encoder = encoder or TextEncoder(tokenizer)
        self._render_text = render_text
        self._history = history
        self._answers = AnswerIndex()
        self._eos_texts = {id: end for end, id in tokenizer.eos_tokens.items()}

    def render(self, messages: Sequence[Message], tools: Tools = ()) -> RenderedPrompt:
        """Return the ids of a conversation up to the start of the assistant's answer. They contain the ids that were
        served."""
        messages = tuple(messages)
        restored = None
        for served in self._answers.find_continued(messages, tools):
            history = served.restore_history(messages)
            restored = restored or history
            if self._history == "served" or served.visible_reasoning <= self._visible_reasoning(history, tools):
                suffix = self._encode_suffix(served, history, tools)
                return RenderedPrompt(np.concatenate([served.ids, suffix.ids]), served.images + suffix.images)
        shown = restored or messages
        images = self._encoder.find(shown)
        return self._encoder.encode(self._render_text(shown, tools), images)

    def count_observed_tokens(self, messages: Sequence[Message], tools: Tools, prompt: Ids) -> int:
        """Return the number of ids at the end of the prompt that follow its last served answer; 0 if it continues none.

        If the prompt begins with the ids of that answer, its length gives the number. A prompt that was rendered again
        is compared, from its end, with the text that follows that answer.
        """
        messages = tuple(messages)
        served = next(self._answers.find_continued(messages, tools), None)
        if served is None:
            return 0
        history = served.restore_history(messages)
        last = max(index for index, message in enumerate(history) if message.role == "assistant")
        if last + 1 > len(served.history):  # an assistant message that was not served follows it
            served = replace(served, history=history[: last + 1], end=None, stop_string="")
        elif _starts_with(prompt, served.ids):
            return len(prompt) - len(served.ids)
        try:
            suffix = self._encode_suffix(served, history, tools).ids
        except ChatError:
            return 0  # the template does not show the end of that answer
        length = min(len(prompt), len(suffix))
        differ = np.flatnonzero(prompt[len(prompt) - length :] != suffix[len(suffix) - length :])
        return length - 1 - int(differ[-1]) if len(differ) else length

    def find_prefill_ids(
        self, messages: Sequence[Message], tools: Tools, answer: Message
    ) -> tuple[RenderedPrompt, Ids] | None:
        """Return the prompt of a served answer and the answer's own ids without its end token, so that the model can
        continue the answer. None if the answer was not served. White space at its end may be missing."""
        for served in self._answers.find_answers_to(messages):
            all_messages = (*messages, served.restore_whitespace(answer))
            if served.stop_string or not served.is_continued_by(all_messages, tools):
                continue
            if self._history == "template" and not served.visible_reasoning - {
                len(messages)
            } <= self._visible_reasoning(all_messages, tools):
                continue
            end = len(served.ids) - (served.end is not None)
            prompt = RenderedPrompt(served.ids[: served.answer_start], served.images)
            return prompt, served.ids[served.answer_start : end]
        return None

    def rewrites_history(self, messages: Sequence[Message]) -> bool:
        """Return whether a conversation that continues no answer rewrote one: it contains an answer of the model, or
        other assistant text in place of one. Text that an agent wrote where the model gave no answer does not count."""
        return self._answers.occurs_in(messages)

    def remember_answer(
        self,
        messages: Sequence[Message],
        tools: Tools,
        prompt_ids: Ids,
        completion_ids: Ids,
        answer: Message,
        stop: str = "",
        *,
        answer_start: int | None = None,
        images: tuple[ImageSpan, ...] = (),
    ) -> None:
        """Remember an answer: its prompt (messages and ids), its own ids, its parsed message, and the stop string that
        ended it. answer_start: the number of prompt ids before the answer, if the rest of them is its prefill. images:
        those of the prompt."""
        messages = tuple(messages)
        previous = next(
            (
                answered
                for answered in self._answers.find_continued(messages, tools)
                if _starts_with(prompt_ids, answered.ids)
            ),
            None,
        )
        known_history = previous.history if previous else ()
        history = previous.restore_history(messages) if previous else messages
        visible_reasoning: frozenset[int] = frozenset()
        if self._history == "template":
            visible_reasoning = previous.visible_reasoning if previous else visible_reasoning
            visible_reasoning |= {
                index for index in self._visible_reasoning(history, tools) if index >= len(known_history)
            }
            visible_reasoning |= {len(history)} if answer.reasoning else set()
        last_id = int(completion_ids[-1]) if len(completion_ids) else None
        self._answers.add(
            ServedAnswer(
                tools=tuple(tools),
                history=(*history, answer),
                ids=np.concatenate([prompt_ids, completion_ids]).astype(np.int32),
                end=last_id if last_id in self._eos_texts else None,
                visible_reasoning=visible_reasoning,
                answer_start=len(prompt_ids) if answer_start is None else answer_start,
                images=images,
                stop_string=stop if last_id not in self._eos_texts and not answer.tool_calls else "",
            )
        )

    def _visible_reasoning(self, messages: tuple[Message, ...], tools: Tools) -> frozenset[int]:
        """Return the indices of the messages whose reasoning the template shows."""
        mark = make_unused_word("etudemark", messages)
        marks = {index: f"{mark}{index}x" for index, message in enumerate(messages) if message.reasoning}
        if not marks:
            return frozenset()
        marked = [replace(message, reasoning=marks.get(index, "")) for index, message in enumerate(messages)]
        text = self._render_text(marked, tools)
        return frozenset(index for index, text_mark in marks.items() if text_mark in text)

    def _encode_suffix(self, served: ServedAnswer, messages: tuple[Message, ...], tools: Tools) -> RenderedPrompt:
        """Return the ids that follow a served answer: the rest of its closing text, the new messages, and the next
        answer's opening."""
        text, region = self._render_suffix(served, messages, tools)
        end = self._eos_texts[served.end] if served.end is not None else ""
        if end and end in region:
            text = text[region.index(end) + len(end) :]
        else:
            text = text[
                min(
                    (region.index(eos_text) for eos_text in self._eos_texts.values() if eos_text in region), default=0
                ) :
            ]
        appended = served.appended_text(messages[len(served.history) - 1]) or ""
        images = self._encoder.find(messages[len(served.history) :])
        start = len(served.ids)
        if end:  # it is encoded too: some tokenizers treat the beginning of a text differently
            suffix = self._encoder.encode(end + appended + text, images, start - 1)
            if suffix.ids[0] == served.end:
                return RenderedPrompt(suffix.ids[1:], suffix.images)
        return self._encoder.encode(appended + text, images, start)

    def _render_suffix(self, served: ServedAnswer, messages: tuple[Message, ...], tools: Tools) -> tuple[str, str]:
        """Return the text that follows a served answer, and its part before the content of the first new message."""
        before, new = served.history[:-1], messages[len(served.history) :]
        mark, probe_word = make_unused_word("etudemark", messages), make_unused_word("etudewords", messages)
        for marked in _marked_answers(served.history[-1], mark):
            try:
                rendered = self._render_text((*before, marked, *new), tools)
                probe_messages = (replace(new[0], content=probe_word), *new[1:]) if new else ()
                probed = self._render_text((*before, marked, *probe_messages), tools)
            except ChatError:
                continue  # a template may refuse this kind of answer, or the messages after it
            text = rendered.rpartition(mark)[2]
            region = _common_prefix(text, probed.rpartition(mark)[2])
            closed = any(end in region for end in self._eos_texts.values())
            if mark in rendered and (closed or not marked.tool_calls):
                return text, region
        self._render_text(messages, tools)  # raises the template's own error if it refuses the conversation
        raise ChatError(
            "The chat template does not show the content of an assistant message, so a conversation cannot continue "
            "one. Give the model another template with `chat.template`."
        )


def _marked_answers(answer: Message, mark: str) -> Iterator[Message]:
    """Yield answers of the same kind that end in a mark: templates close a call and a text differently."""
    if answer.tool_calls:
        arguments = json.dumps({mark: mark})
        calls = tuple(replace(call, arguments=arguments) for call in answer.tool_calls)
        yield replace(answer, content="", reasoning="", tool_calls=calls)
    yield Message("assistant", mark)


def make_unused_word(word: str, messages: Sequence[Message]) -> str:
    """Extend a word until it occurs in none of the messages."""
    text = repr(messages)
    while word in text:
        word += "k"
    return word


def _common_prefix(one: str, other: str) -> str:
    """Return the common prefix of two texts."""
    length = min(len(one), len(other))
    return one[: next((index for index in range(length) if one[index] != other[index]), length)]


def _starts_with(ids: Ids, prefix: Ids) -> bool:
    return len(prefix) <= len(ids) and bool(np.array_equal(ids[: len(prefix)], prefix))
