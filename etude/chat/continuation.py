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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from etude.chat.messages import same, same_tools, text_of
from etude.chat.tokenizer import Ids, Tokenizer
from etude.errors import ChatError
from etude.records import Message

__all__ = ["Conversation", "History", "unused"]

History: TypeAlias = Literal["served", "template"]
Tools: TypeAlias = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, eq=False)
class _Served:
    """One answer and all that came before it."""

    tools: Tools
    history: tuple[Message, ...]
    """The messages, with earlier answers as they were served; the last is the answer."""
    ids: Ids
    end: int | None
    """The last id, if it is one that ends an answer."""
    thoughts: frozenset[int]
    """Which messages' reasoning the ids show, as far as that matters: only where the template decides what is kept."""
    begins: int
    """How many of the ids come before the answer."""
    stop: str = ""
    """The stop string that ended the answer, and is among its ids."""

    def added(self, given: Message) -> str | None:
        """What an agent added to the answer: nothing, or what follows the stop string that it wrote back. None where it
        is not this answer."""
        answer = self.history[-1]
        if same(answer, given):
            return ""
        said, told = text_of(answer.content), text_of(given.content)
        if not self.stop or said is None or told is None or not told.startswith(said + self.stop):
            return None
        return told[len(said + self.stop) :] if same(answer, replace(given, content=said)) else None

    def precedes(self, messages: tuple[Message, ...], tools: Tools) -> bool:
        """Return whether these messages continue the answer."""
        return (
            len(self.history) <= len(messages)
            and all(same(*pair) for pair in zip(self.history[:-1], messages, strict=False))
            and self.added(messages[len(self.history) - 1]) is not None
            and same_tools(self.tools, tools)
        )

    def spaced(self, given: Message) -> Message:
        """A message with the white space at the answer's end, where nothing else of its text differs."""
        content = self.history[-1].content
        said, told = text_of(content), text_of(given.content)
        alike = said is not None and told is not None and said.rstrip() == told.rstrip()
        return replace(given, content=content) if alike else given

    def resent(self, messages: tuple[Message, ...]) -> int:
        """How many of the messages came back with the very reasoning that was served."""
        return sum(one.reasoning == other.reasoning for one, other in zip(self.history, messages, strict=False))

    def whole(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """A conversation that goes on from the answer, with what was served as it was, and what was added."""
        answer, given = self.history[-1], messages[len(self.history) - 1]
        if not same(answer, given):
            answer = replace(answer, content=given.content)
        return (*self.history[:-1], answer, *messages[len(self.history) :])


class Conversation:
    """What one attempt has said to a model, in as many branches as its agent made. Used by one thread at a time."""

    def __init__(
        self, tokenizer: Tokenizer, text: Callable[[Sequence[Message], Tools], str], history: History = "served"
    ) -> None:
        """`text` renders a conversation up to where the assistant is to speak."""
        self._tokenizer = tokenizer
        self._text = text
        self._history = history
        self._served: list[_Served] = []  # the latest first
        self._ends = {id: end for end, id in tokenizer.ends.items()}

    def render(self, messages: Sequence[Message], tools: Tools = ()) -> Ids:
        """The ids of a conversation, up to where the assistant is to speak, those that were served among them."""
        messages = tuple(messages)
        known = None
        for served in self._continued(messages, tools):
            whole = served.whole(messages)
            known = known or whole
            if self._history == "served" or served.thoughts <= self._shown(whole, tools):
                return np.concatenate([served.ids, self._after(served, whole, tools)])
        return self._tokenizer.encode(self._text(known or messages, tools))

    def observed(self, messages: Sequence[Message], tools: Tools, prompt: Ids) -> int:
        """How many ids at the end of this conversation's prompt were shown after its last answer; 0 where it goes on
        from no answer of the model.

        A prompt that begins with the ids of that answer tells it by them. One that was rendered anew is compared, from
        its end, with what follows that answer.
        """
        messages = tuple(messages)
        served = next(self._continued(messages, tools), None)
        if served is None:
            return 0
        whole = served.whole(messages)
        last = max(place for place, message in enumerate(whole) if message.role == "assistant")
        if last + 1 > len(served.history):  # an answer that was not given here stands behind it
            served = replace(served, history=whole[: last + 1], end=None, stop="")
        elif _begins(prompt, served.ids):
            return len(prompt) - len(served.ids)
        try:
            after = self._after(served, whole, tools)
        except ChatError:
            return 0  # the template does not show where that answer ends
        length = min(len(prompt), len(after))
        differ = np.flatnonzero(prompt[len(prompt) - length :] != after[len(after) - length :])
        return length - 1 - int(differ[-1]) if len(differ) else length

    def begun(self, messages: Sequence[Message], tools: Tools, answer: Message) -> tuple[Ids, Ids] | None:
        """The prompt of an answer and the answer's own ids, without the one that ended it, for an answer that the model
        is to go on from. None where it is not one that was served. White space at its end may be missing."""
        for served in self._served:
            whole = (*messages, served.spaced(answer))
            if len(served.history) != len(whole) or served.stop or not served.precedes(whole, tools):
                continue
            if self._history == "template" and not served.thoughts - {len(messages)} <= self._shown(whole, tools):
                continue
            end = len(served.ids) - (served.end is not None)
            return served.ids[: served.begins], served.ids[served.begins : end]
        return None

    def rewrites(self, messages: Sequence[Message]) -> bool:
        """Whether a conversation that goes on from no answer has an answer of the model's in it, or other words of the
        assistant's where the model gave one. Words that an agent put where nothing was sampled are its own."""
        for at, message in enumerate(messages):
            if message.role != "assistant":
                continue
            for served in self._served:
                before = served.history[:-1]
                here = len(before) == at and all(map(same, before, messages))
                if here or served.added(message) is not None:
                    return True
        return False

    def served(
        self,
        messages: Sequence[Message],
        tools: Tools,
        prompt_ids: Ids,
        completion_ids: Ids,
        answer: Message,
        stop: str = "",
        *,
        begins: int | None = None,
    ) -> None:
        """Remember an answer: the messages and ids it was given, the ids it is, the message it was read as, and the
        stop string that ended it, if one did. begins: how many of the ids that were given come before the answer, where
        those after them are its beginning."""
        messages = tuple(messages)
        kept = next((each for each in self._continued(messages, tools) if _begins(prompt_ids, each.ids)), None)
        known = kept.history if kept else ()
        history = kept.whole(messages) if kept else messages
        thoughts: frozenset[int] = frozenset()
        if self._history == "template":
            thoughts = kept.thoughts if kept else thoughts
            thoughts |= {index for index in self._shown(history, tools) if index >= len(known)}
            thoughts |= {len(history)} if answer.reasoning else set()
        last = int(completion_ids[-1]) if len(completion_ids) else None
        self._served.insert(
            0,
            _Served(
                tools=tuple(tools),
                history=(*history, answer),
                ids=np.concatenate([prompt_ids, completion_ids]).astype(np.int32),
                end=last if last in self._ends else None,
                thoughts=thoughts,
                begins=len(prompt_ids) if begins is None else begins,
                stop=stop if last not in self._ends and not answer.tool_calls else "",
            ),
        )

    def _continued(self, messages: tuple[Message, ...], tools: Tools) -> Iterator[_Served]:
        """The answers that these messages go on from: the longest history first, of equals the one whose reasoning came
        back, and of those the latest."""
        for served in sorted(self._served, key=lambda each: (-len(each.history), -each.resent(messages))):
            if served.precedes(messages, tools):
                yield served

    def _shown(self, messages: tuple[Message, ...], tools: Tools) -> frozenset[int]:
        """The messages whose reasoning the template shows."""
        mark = unused("etudemark", messages)
        marks = {index: f"{mark}{index}x" for index, message in enumerate(messages) if message.reasoning}
        if not marks:
            return frozenset()
        marked = [replace(message, reasoning=marks.get(index, "")) for index, message in enumerate(messages)]
        text = self._text(marked, tools)
        return frozenset(index for index, each in marks.items() if each in text)

    def _after(self, served: _Served, messages: tuple[Message, ...], tools: Tools) -> Ids:
        """The ids of what follows a served answer: the rest of its close, the new messages, the assistant's opening."""
        text, region = self._rest(served, messages, tools)
        end = self._ends[served.end] if served.end is not None else ""
        if end and end in region:
            text = text[region.index(end) + len(end) :]
        else:
            text = text[min((region.index(each) for each in self._ends.values() if each in region), default=0) :]
        added = served.added(messages[len(served.history) - 1]) or ""
        ids = self._tokenizer.encode(end + added + text)
        # The end is encoded too, for tokenizers that treat a text's beginning in a way of its own.
        return ids[1:] if end and ids[0] == served.end else self._tokenizer.encode(added + text)

    def _rest(self, served: _Served, messages: tuple[Message, ...], tools: Tools) -> tuple[str, str]:
        """The text that follows a served answer, and of it what comes before the first new message's own words."""
        before, new = served.history[:-1], messages[len(served.history) :]
        mark, words = unused("etudemark", messages), unused("etudewords", messages)
        for marked in _marked(served.history[-1], mark):
            try:
                whole = self._text((*before, marked, *new), tools)
                probe = (replace(new[0], content=words), *new[1:]) if new else ()
                other = self._text((*before, marked, *probe), tools)
            except ChatError:
                continue  # a template may refuse this kind of answer, or what follows it
            text = whole.rpartition(mark)[2]
            region = _common(text, other.rpartition(mark)[2])
            closed = any(end in region for end in self._ends.values())
            if mark in whole and (closed or not marked.tool_calls):
                return text, region
        self._text(messages, tools)  # if the template refuses the conversation itself, it says why
        raise ChatError(
            "The chat template does not show what an assistant's message says, so a conversation cannot go on from "
            "one. Give the model another template."
        )


def _marked(answer: Message, mark: str) -> Iterator[Message]:
    """Answers of the same kind that end in a mark: templates close a call and a text in their own ways."""
    if answer.tool_calls:
        arguments = json.dumps({mark: mark})
        calls = tuple(replace(call, arguments=arguments) for call in answer.tool_calls)
        yield replace(answer, content="", reasoning="", tool_calls=calls)
    yield Message("assistant", mark)


def unused(word: str, messages: Sequence[Message]) -> str:
    """A word that occurs in none of the messages, made of this one."""
    said = repr(messages)
    while word in said:
        word += "k"
    return word


def _common(one: str, other: str) -> str:
    """What two texts begin with alike."""
    length = min(len(one), len(other))
    return one[: next((at for at in range(length) if one[at] != other[at]), length)]


def _begins(ids: Ids, prefix: Ids) -> bool:
    return len(prefix) <= len(ids) and bool(np.array_equal(ids[: len(prefix)], prefix))
