"""What each attempt has said to the model and heard from it, to the token, for as long as it runs.

A call continues exactly where its prompt begins with the prompt and the answer of an earlier call, id for id. One that
has no answer of the model's in its conversation begins one. Any other has a history that the agent rewrote: there the
trajectory branches.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

import numpy as np

from etude.agents.proxy.asked import Asked, Body
from etude.chat import Chat
from etude.chat.tokenizer import Ids
from etude.records import Completion, Message
from etude.store.desk import Key, Use

__all__ = ["Prompt", "Sitting", "named_state"]

LONG = 20_000
"""Characters of a conversation, from which on it is rendered on a thread."""


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """What the model is shown for a call."""

    ids: Ids
    hash: int
    how: Literal["begun", "continued", "branched"]
    changed: int = 0
    """Of a call that continues: how many of its tokens stand between the first and the last that would be others, had
    the conversation been rendered anew."""


class Sitting:
    """One attempt at the endpoint. Used on one event loop; any number of its calls may be under way."""

    def __init__(self, key: Key, use: Use, chat: Chat, draw: int = 0) -> None:
        self.key, self.use = key, use
        self.draw = draw
        """Which draw of its rollout the attempt is: what its seeds are made of."""
        self.calls = 0
        """How many there were."""
        self.under_way: set[asyncio.Task[None]] = set()
        self.spoke = time.monotonic()
        """When it last called."""
        self._chat = chat
        self._conversation = chat.conversation()
        self._lock = asyncio.Lock()
        self._served: dict[int, set[bytes]] = {}  # digests of prompt and answer, by their length
        self._texts: dict[str, Ids] = {}  # of calls without messages: what was asked and answered, and its ids
        self._asked: Counter[int] = Counter()
        self._answers: dict[str, tuple[Message, ...]] = {}

    async def prompt(self, asked: Asked, compare: bool) -> Prompt:
        """What the model is shown. compare: count what a conversation that is rendered anew would have changed."""
        async with self._lock:
            if asked.characters() < LONG:
                return self._shown(asked, compare)
            return await asyncio.to_thread(self._shown, asked, compare)

    def occurrence(self, prompt: Prompt) -> int:
        """How often an answer to this prompt was asked for before."""
        self._asked[prompt.hash] += 1
        return self._asked[prompt.hash] - 1

    async def heard(
        self, asked: Asked, shown: Ids, completion: Completion, answer: Message, stop: str | None = None
    ) -> None:
        """Remember an answer to what was shown, so that what goes on from it continues it exactly. stop: the stop
        string that ended it."""
        whole = np.concatenate([shown, completion.ids])
        self._served.setdefault(len(whole), set()).add(blake2b(whole.tobytes(), digest_size=16).digest())
        async with self._lock:
            if asked.characters() < LONG:
                self._remember(asked, shown, completion, answer, stop or "")
            else:
                await asyncio.to_thread(self._remember, asked, shown, completion, answer, stop or "")

    def _remember(self, asked: Asked, shown: Ids, completion: Completion, answer: Message, stop: str) -> None:
        if asked.prompt is None:
            self._conversation.served(asked.messages, asked.tools, shown, completion.ids, answer, stop)
            return
        decode = self._chat.tokenizer.decode
        before = asked.prompt if isinstance(asked.prompt, str) else decode(shown, special=True)
        self._texts[before + decode(completion.ids)] = np.concatenate([shown, completion.ids])

    def keep(self, id: str, messages: tuple[Message, ...]) -> None:
        """Keep a conversation up to the answer of this name, for a call that goes on from it."""
        self._answers[id] = messages

    def earlier(self, id: str) -> tuple[Message, ...] | None:
        """The conversation up to that answer."""
        return self._answers.get(id)

    def _shown(self, asked: Asked, compare: bool) -> Prompt:
        if asked.prompt is not None:
            return self._found(self._text_ids(asked.prompt), False)
        return self._rendered(asked.messages, asked.tools, compare)

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Body], compare: bool) -> Prompt:
        prompt = self._found(
            self._conversation.render(messages, tools), any(each.role == "assistant" for each in messages)
        )
        if not compare or prompt.how != "continued":
            return prompt
        anew = self._chat.render(messages, tools)
        return Prompt(prompt.ids, prompt.hash, prompt.how, _apart(prompt.ids, anew))

    def _text_ids(self, prompt: str | Ids) -> Ids:
        """The ids of a text, those of the longest beginning that was served before among them."""
        if not isinstance(prompt, str):
            return prompt
        known = max((text for text in self._texts if prompt.startswith(text)), key=len, default=None)
        if known is None:
            return self._chat.tokenizer.encode(prompt, special=True)
        ids, rest = self._texts[known], prompt[len(known) :]
        ended = next((text for text, id in self._chat.tokenizer.ends.items() if id == ids[-1]), None)
        if ended is not None:  # the text that was answered is without it, and what is written by hand has it
            rest = rest.removeprefix(ended)
        return np.concatenate([ids, self._chat.tokenizer.after(ids, rest)]) if rest else ids

    def _found(self, ids: Ids, spoken: bool) -> Prompt:
        """What is known of a prompt. spoken: whether the model has spoken in it."""
        running, at, continued = blake2b(digest_size=16), 0, False
        data = ids.tobytes()
        for length in sorted(length for length in self._served if length <= len(ids)):
            running.update(data[at * ids.itemsize : length * ids.itemsize])
            at = length
            continued = continued or running.digest() in self._served[length]
        running.update(data[at * ids.itemsize :])
        how: Literal["begun", "continued", "branched"]
        how = "continued" if continued else "branched" if spoken else "begun"
        return Prompt(ids, int.from_bytes(running.digest()[:8], "little") >> 1, how)


def named_state(name: str) -> int:
    """A number for the state that an agent says it is in."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") >> 1


def _apart(one: Ids, other: Ids) -> int:
    """How many tokens stand between what two sequences begin with alike and what they end with alike."""
    if np.array_equal(one, other):
        return 0
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    start = int(differs[0]) if len(differs) else length
    differs = np.flatnonzero(one[::-1][: length - start] != other[::-1][: length - start])
    end = int(differs[0]) if len(differs) else length - start
    return max(len(one), len(other)) - start - end
