"""An index of a conversation's answers, by the messages before each of them.

Only the newest answers are kept. The cost of a lookup depends on the number of its messages, not on the number of
answers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from etude.chat.messages import content_text, is_same_message, message_hash, same_tools
from etude.chat.tokenizer import Ids
from etude.images import ImageSpan
from etude.records import Message

Tools: TypeAlias = Sequence[Mapping[str, Any]]
MAX_ANSWERS, MAX_IDS = 1024, 2**23
"""The most answers of one conversation that are kept, and the most ids of all their prompts and answers."""


@dataclass(frozen=True, slots=True, eq=False)
class ServedAnswer:
    """One answer, and all that came before it."""

    tools: Tools
    history: tuple[Message, ...]
    """The messages, with earlier answers as they were served; the last is this answer."""
    ids: Ids
    end: int | None
    """The last id, if it is an end token."""
    visible_reasoning: frozenset[int]
    """The indices of messages whose reasoning is among the ids; only filled if the template decides which reasoning is
    kept."""
    answer_start: int
    """The number of ids before the answer."""
    stop_string: str = ""
    """The stop string that ended the answer; its ids are included."""
    images: tuple[ImageSpan, ...] = ()
    """The images among the ids."""

    def appended_text(self, message: Message) -> str | None:
        """Return the text that an agent added to the answer: an empty one, or the text after the stop string that it
        wrote back. None if the message is not this answer."""
        answer = self.history[-1]
        if is_same_message(answer, message):
            return ""
        answer_text, text = content_text(answer.content), content_text(message.content)
        if (
            not self.stop_string
            or answer_text is None
            or text is None
            or not text.startswith(answer_text + self.stop_string)
        ):
            return None
        return (
            text[len(answer_text + self.stop_string) :]
            if is_same_message(answer, replace(message, content=answer_text))
            else None
        )

    def is_continued_by(self, messages: tuple[Message, ...], tools: Tools) -> bool:
        """Return whether these messages continue the answer."""
        return (
            len(self.history) <= len(messages)
            and all(is_same_message(*pair) for pair in zip(self.history[:-1], messages, strict=False))
            and self.appended_text(messages[len(self.history) - 1]) is not None
            and same_tools(self.tools, tools)
        )

    def restore_whitespace(self, message: Message) -> Message:
        """Return the message with the white space at the answer's end, if nothing else in its text differs."""
        content = self.history[-1].content
        answer_text, text = content_text(content), content_text(message.content)
        is_same_text = answer_text is not None and text is not None and answer_text.rstrip() == text.rstrip()
        return replace(message, content=content) if is_same_text else message

    def count_resent_reasoning(self, messages: tuple[Message, ...]) -> int:
        """Return the number of messages that have exactly the reasoning that was served."""
        return sum(one.reasoning == other.reasoning for one, other in zip(self.history, messages, strict=False))

    def restore_history(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """Return a conversation that continues the answer, with served messages as they were served, and with appended
        text."""
        answer, returned = self.history[-1], messages[len(self.history) - 1]
        if not is_same_message(answer, returned):
            answer = replace(answer, content=returned.content)
        return (*self.history[:-1], answer, *messages[len(self.history) :])


class AnswerIndex:
    """The newest answers. Used by one thread at a time."""

    def __init__(self) -> None:
        self._answers: deque[ServedAnswer] = deque()  # the oldest first
        self._num_ids = 0
        self._by_prefix: dict[int, list[ServedAnswer]] = {}  # by the messages before the answer; the latest first
        self._by_answer: dict[int, list[ServedAnswer]] = {}  # by the answer itself

    def __len__(self) -> int:
        return len(self._answers)

    def add(self, served: ServedAnswer) -> None:
        """Add an answer. The oldest are dropped if there are too many answers or ids."""
        self._answers.append(served)
        self._num_ids += len(served.ids)
        for index, key in self._keys(served):
            index.setdefault(key, []).insert(0, served)
        while len(self._answers) > MAX_ANSWERS or (self._num_ids > MAX_IDS and len(self._answers) > 1):
            self._drop(self._answers.popleft())

    def find_continued(self, messages: Sequence[Message], tools: Tools) -> Iterator[ServedAnswer]:
        """Yield the answers that these messages continue: the longest history first, then the one with the most resent
        reasoning, then the latest."""
        messages = tuple(messages)
        for prefix_hash in reversed(_prefix_hashes(messages[:-1])):
            known = self._by_prefix.get(prefix_hash, ())
            for served in (
                sorted(known, key=lambda answer: -answer.count_resent_reasoning(messages)) if len(known) > 1 else known
            ):
                if served.is_continued_by(messages, tools):
                    yield served

    def find_answers_to(self, messages: Sequence[Message]) -> Iterator[ServedAnswer]:
        """Yield the answers to exactly these messages, the latest first."""
        return self._find_answers(_prefix_hashes(messages)[-1], messages)

    def occurs_in(self, messages: Sequence[Message]) -> bool:
        """Return whether the messages contain an answer, or other assistant text in place of one."""
        prefix_hashes = _prefix_hashes(messages)
        return any(
            next(self._find_answers(prefix_hashes[position], messages[:position]), None) is not None
            or self._is_answer(message)
            for position, message in enumerate(messages)
            if message.role == "assistant"
        )

    def _find_answers(self, prefix_hash: int, messages: Sequence[Message]) -> Iterator[ServedAnswer]:
        for served in self._by_prefix.get(prefix_hash, ()):
            before = served.history[:-1]
            if len(before) == len(messages) and all(map(is_same_message, before, messages)):
                yield served

    def _is_answer(self, message: Message) -> bool:
        """Return whether the message is one of the answers."""
        stopped = (answer for answer in self._answers if answer.stop_string)
        return any(
            answer.appended_text(message) is not None
            for answer in (*self._by_answer.get(message_hash(message), ()), *stopped)
        )

    def _keys(self, served: ServedAnswer) -> tuple[tuple[dict[int, list[ServedAnswer]], int], ...]:
        prefix_hash = _prefix_hashes(served.history[:-1])[-1]
        return (self._by_prefix, prefix_hash), (self._by_answer, message_hash(served.history[-1]))

    def _drop(self, oldest: ServedAnswer) -> None:
        self._num_ids -= len(oldest.ids)
        for index, key in self._keys(oldest):
            index[key].remove(oldest)
            if not index[key]:
                del index[key]


def _prefix_hashes(messages: Sequence[Message]) -> list[int]:
    """Return a hash of each prefix of these messages, the empty one included."""
    hashes = [0]
    for message in messages:
        hashes.append(hash((hashes[-1], message_hash(message))))
    return hashes
