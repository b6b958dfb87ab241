"""The answers of one conversation with a model, found again by what came before each of them.

The newest are kept. A conversation that goes on is looked for by its messages, so that the cost of a look-up follows
the number of its messages, not the number of answers that are kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from etude.chat.messages import likeness, same, same_tools, text_of
from etude.chat.tokenizer import Ids
from etude.records import Message

__all__ = ["Remembered", "Served", "Tools"]

Tools: TypeAlias = Sequence[Mapping[str, Any]]
KEPT, KEPT_IDS = 1024, 2**23
"""The most answers of one conversation that are kept, and the most ids of their prompts and of themselves."""


@dataclass(frozen=True, slots=True, eq=False)
class Served:
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


class Remembered:
    """The newest answers. Used by one thread at a time."""

    def __init__(self) -> None:
        self._kept: deque[Served] = deque()  # the oldest first
        self._ids = 0
        self._after: dict[int, list[Served]] = {}  # by the messages before the answer; the latest first
        self._saying: dict[int, list[Served]] = {}  # by the answer itself

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, served: Served) -> None:
        """Keep an answer. The oldest are dropped where there are too many, or too many ids."""
        self._kept.append(served)
        self._ids += len(served.ids)
        for index, key in self._keys(served):
            index.setdefault(key, []).insert(0, served)
        while len(self._kept) > KEPT or (self._ids > KEPT_IDS and len(self._kept) > 1):
            self._drop(self._kept.popleft())

    def continued(self, messages: Sequence[Message], tools: Tools) -> Iterator[Served]:
        """The answers that these messages go on from: the longest history first, of equals the one whose reasoning came
        back, and of those the latest."""
        messages = tuple(messages)
        for chain in reversed(_chains(messages[:-1])):
            known = self._after.get(chain, ())
            for served in sorted(known, key=lambda each: -each.resent(messages)) if len(known) > 1 else known:
                if served.precedes(messages, tools):
                    yield served

    def behind(self, messages: Sequence[Message]) -> Iterator[Served]:
        """The answers to exactly these messages, the latest first."""
        return self._behind(_chains(messages)[-1], messages)

    def occur(self, messages: Sequence[Message]) -> bool:
        """Return whether an answer is among the messages, or other words of the assistant's in the place of one."""
        chains = _chains(messages)
        return any(
            next(self._behind(chains[at], messages[:at]), None) is not None or self._says(message)
            for at, message in enumerate(messages)
            if message.role == "assistant"
        )

    def _behind(self, chain: int, messages: Sequence[Message]) -> Iterator[Served]:
        for served in self._after.get(chain, ()):
            before = served.history[:-1]
            if len(before) == len(messages) and all(map(same, before, messages)):
                yield served

    def _says(self, message: Message) -> bool:
        """Return whether the message is one of the answers."""
        stopped = (each for each in self._kept if each.stop)
        return any(each.added(message) is not None for each in (*self._saying.get(likeness(message), ()), *stopped))

    def _keys(self, served: Served) -> tuple[tuple[dict[int, list[Served]], int], ...]:
        chain = _chains(served.history[:-1])[-1]
        return (self._after, chain), (self._saying, likeness(served.history[-1]))

    def _drop(self, oldest: Served) -> None:
        self._ids -= len(oldest.ids)
        for index, key in self._keys(oldest):
            index[key].remove(oldest)
            if not index[key]:
                del index[key]


def _chains(messages: Sequence[Message]) -> list[int]:
    """A number for each beginning of these messages, the empty one included; the same ones have the same numbers."""
    found = [0]
    for message in messages:
        found.append(hash((found[-1], likeness(message))))
    return found
