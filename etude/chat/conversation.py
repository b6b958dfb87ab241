"""Exact continuation: a conversation that goes on from what was served keeps the very ids it was served with.

Text does not determine tokens: what a model wrote, turned to text and tokenised again, may be other tokens than those
it sampled, and a template may leave out or reword what was said. So a conversation remembers the ids of each answer,
and what comes after an answer is rendered alone, from the end of the answer on. Where the messages are not those
that were served (an agent rewrote its history), the conversation is rendered anew: it branches, and both branches are
kept. Which differences count is said in `messages`.

Where an answer ends in a rendered text is found by rendering a marked answer in its place. The model usually wrote the
token that closes its turn, and the rest of what the template closes it with follows; where it did not (it was cut off,
or stopped by another token), all of the template's close follows.

An answer that a stop string ended is told without it, and some agents write it back at its end, and words of their own
after it: those are context, and stand between the ids of the answer and the template's close.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

import numpy as np

from etude.chat.answer_index import AnswerIndex, ServedAnswer, Tools
from etude.chat.tokenizer import Ids, Tokenizer
from etude.errors import ChatError
from etude.records import Message

__all__ = ["Conversation", "History", "make_unused_word"]

History: TypeAlias = Literal["served", "template"]


class Conversation:
    """What one attempt has said to a model, in as many branches as its agent made. Used by one thread at a time."""

    def __init__(
        self, tokenizer: Tokenizer, render_text: Callable[[Sequence[Message], Tools], str], history: History = "served"
    ) -> None:
        """`text` renders a conversation up to where the assistant is to speak."""
        self._tokenizer = tokenizer
        self._render_text = render_text
        self._history = history
        self._answers = AnswerIndex()
        self._eos_texts = {id: end for end, id in tokenizer.eos_tokens.items()}

    def render(self, messages: Sequence[Message], tools: Tools = ()) -> Ids:
        """The ids of a conversation, up to where the assistant is to speak, those that were served among them."""
        messages = tuple(messages)
        restored = None
        for served in self._answers.find_continued(messages, tools):
            history = served.restore_history(messages)
            restored = restored or history
            if self._history == "served" or served.visible_reasoning <= self._visible_reasoning(history, tools):
                return np.concatenate([served.ids, self._encode_suffix(served, history, tools)])
        return self._tokenizer.encode(self._render_text(restored or messages, tools))

    def count_observed_tokens(self, messages: Sequence[Message], tools: Tools, prompt: Ids) -> int:
        """How many ids at the end of this conversation's prompt were shown after its last answer; 0 where it goes on
        from no answer of the model.

        A prompt that begins with the ids of that answer tells it by them. One that was rendered anew is compared, from
        its end, with what follows that answer.
        """
        messages = tuple(messages)
        served = next(self._answers.find_continued(messages, tools), None)
        if served is None:
            return 0
        history = served.restore_history(messages)
        last = max(index for index, message in enumerate(history) if message.role == "assistant")
        if last + 1 > len(served.history):  # an answer that was not given here stands behind it
            served = replace(served, history=history[: last + 1], end=None, stop_string="")
        elif _starts_with(prompt, served.ids):
            return len(prompt) - len(served.ids)
        try:
            suffix = self._encode_suffix(served, history, tools)
        except ChatError:
            return 0  # the template does not show where that answer ends
        length = min(len(prompt), len(suffix))
        differ = np.flatnonzero(prompt[len(prompt) - length :] != suffix[len(suffix) - length :])
        return length - 1 - int(differ[-1]) if len(differ) else length

    def find_prefill_ids(self, messages: Sequence[Message], tools: Tools, answer: Message) -> tuple[Ids, Ids] | None:
        """The prompt of an answer and the answer's own ids, without the one that ended it, for an answer that the model
        is to go on from. None where it is not one that was served. White space at its end may be missing."""
        for served in self._answers.find_answers_to(messages):
            all_messages = (*messages, served.restore_whitespace(answer))
            if served.stop_string or not served.is_continued_by(all_messages, tools):
                continue
            if self._history == "template" and not served.visible_reasoning - {
                len(messages)
            } <= self._visible_reasoning(all_messages, tools):
                continue
            end = len(served.ids) - (served.end is not None)
            return served.ids[: served.answer_start], served.ids[served.answer_start : end]
        return None

    def rewrites_history(self, messages: Sequence[Message]) -> bool:
        """Whether a conversation that goes on from no answer has an answer of the model's in it, or other words of the
        assistant's where the model gave one. Words that an agent put where nothing was sampled are its own."""
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
    ) -> None:
        """Remember an answer: the messages and ids it was given, the ids it is, the message it was read as, and the
        stop string that ended it, if one did. begins: how many of the ids that were given come before the answer, where
        those after them are its beginning."""
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
                stop_string=stop if last_id not in self._eos_texts and not answer.tool_calls else "",
            )
        )

    def _visible_reasoning(self, messages: tuple[Message, ...], tools: Tools) -> frozenset[int]:
        """The messages whose reasoning the template shows."""
        mark = make_unused_word("etudemark", messages)
        marks = {index: f"{mark}{index}x" for index, message in enumerate(messages) if message.reasoning}
        if not marks:
            return frozenset()
        marked = [replace(message, reasoning=marks.get(index, "")) for index, message in enumerate(messages)]
        text = self._render_text(marked, tools)
        return frozenset(index for index, text_mark in marks.items() if text_mark in text)

    def _encode_suffix(self, served: ServedAnswer, messages: tuple[Message, ...], tools: Tools) -> Ids:
        """The ids of what follows a served answer: the rest of its close, the new messages, the assistant's opening."""
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
        ids = self._tokenizer.encode(end + appended + text)
        # The end is encoded too, for tokenizers that treat a text's beginning in a way of its own.
        return ids[1:] if end and ids[0] == served.end else self._tokenizer.encode(appended + text)

    def _render_suffix(self, served: ServedAnswer, messages: tuple[Message, ...], tools: Tools) -> tuple[str, str]:
        """The text that follows a served answer, and of it what comes before the first new message's own words."""
        before, new = served.history[:-1], messages[len(served.history) :]
        mark, probe_word = make_unused_word("etudemark", messages), make_unused_word("etudewords", messages)
        for marked in _marked_answers(served.history[-1], mark):
            try:
                rendered = self._render_text((*before, marked, *new), tools)
                probe_messages = (replace(new[0], content=probe_word), *new[1:]) if new else ()
                probed = self._render_text((*before, marked, *probe_messages), tools)
            except ChatError:
                continue  # a template may refuse this kind of answer, or what follows it
            text = rendered.rpartition(mark)[2]
            region = _common_prefix(text, probed.rpartition(mark)[2])
            closed = any(end in region for end in self._eos_texts.values())
            if mark in rendered and (closed or not marked.tool_calls):
                return text, region
        self._render_text(messages, tools)  # if the template refuses the conversation itself, it says why
        raise ChatError(
            "The chat template does not show what an assistant's message says, so a conversation cannot go on from "
            "one. Give the model another template."
        )


def _marked_answers(answer: Message, mark: str) -> Iterator[Message]:
    """Answers of the same kind that end in a mark: templates close a call and a text in their own ways."""
    if answer.tool_calls:
        arguments = json.dumps({mark: mark})
        calls = tuple(replace(call, arguments=arguments) for call in answer.tool_calls)
        yield replace(answer, content="", reasoning="", tool_calls=calls)
    yield Message("assistant", mark)


def make_unused_word(word: str, messages: Sequence[Message]) -> str:
    """A word that occurs in none of the messages, made of this one."""
    text = repr(messages)
    while word in text:
        word += "k"
    return word


def _common_prefix(one: str, other: str) -> str:
    """What two texts begin with alike."""
    length = min(len(one), len(other))
    return one[: next((index for index in range(length) if one[index] != other[index]), length)]


def _starts_with(ids: Ids, prefix: Ids) -> bool:
    return len(prefix) <= len(ids) and bool(np.array_equal(ids[: len(prefix)], prefix))
