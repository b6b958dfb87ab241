"""What each attempt has said to the model and heard from it, to the token, for as long as it runs.

A call continues exactly where its prompt begins with the prompt and the answer of an earlier call, id for id. One that
has no answer of the model's in its conversation begins one, also where the agent itself put words into the assistant's
mouth. Any other has a history that the agent rewrote: there the trajectory branches.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import Literal, TypeVar

import numpy as np

from etude.agents.proxy.bounded_cache import BoundedCache
from etude.agents.proxy.prefill import NO_IDS, build_prefill
from etude.agents.proxy.request import ModelRequest, count_characters
from etude.chat import ChatRenderer
from etude.chat.tokenizer import Ids
from etude.records import Completion, Message
from etude.store.rollout_queue import AttemptId, RolloutPurpose

__all__ = ["AttemptSession", "Prompt", "state_id"]

T = TypeVar("T")

MIN_THREAD_CHARACTERS = 2_000
"""Characters that a conversation weighs, from which on it is rendered on a thread."""
MAX_ANSWERS, MAX_ANSWER_CHARACTERS = 1024, 2**25
"""The most answers of one attempt, and the most characters of their conversations, that are kept to be named again; and
the most texts that were continued, with their ids."""
MAX_KNOWN_PREFIXES = 4096
"""The most answers of one attempt that a prompt is found to go on from by its ids alone."""
MAX_COUNTED_PROMPTS = 2**16
"""The most prompts of one attempt of which is counted how often they were asked."""


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """What the model is shown for a call."""

    ids: Ids
    """The conversation, up to where the assistant is to speak."""
    prefill_ids: Ids
    """The beginning of the answer, which the model goes on from as if it had written it."""
    hash: int
    how: Literal["begun", "continued", "branched"]
    changed: int = 0
    """Of a call that continues: how many of its tokens stand between the first and the last that would be others, had
    the conversation been rendered anew."""
    observed: int | None = None
    """How many of the ids, at their end, were shown after the model's last answer; None where the ids tell it."""

    @property
    def input_ids(self) -> Ids:
        """All that the model is shown."""
        return np.concatenate([self.ids, self.prefill_ids])


class AttemptSession:
    """One attempt at the endpoint. Used on one event loop; any number of its calls may be under way."""

    def __init__(
        self,
        attempt_id: AttemptId,
        use: RolloutPurpose,
        chat: ChatRenderer,
        draw: int = 0,
        threads: Executor | None = None,
    ) -> None:
        """threads: where long conversations are rendered; by default on those of the event loop."""
        self.attempt_id, self.use = attempt_id, use
        self.draw = draw
        """Which draw of its rollout the attempt is: what its seeds are made of."""
        self.under_way: set[asyncio.Task[None]] = set()
        self.refused: set[str] = set()
        """Why calls were refused, as far as that is noted."""
        self.last_call_at = time.monotonic()
        """When it last called."""
        self._chat = chat
        self._conversation = chat.start_conversation()
        self._lock = asyncio.Lock()
        self._threads = threads
        self._known_prefixes: BoundedCache[bytes, int] = BoundedCache(
            MAX_KNOWN_PREFIXES
        )  # digests of prompt and answer, and their length
        self._texts: BoundedCache[str, Ids] = BoundedCache(
            MAX_ANSWERS, MAX_ANSWER_CHARACTERS
        )  # of calls without messages, with the answer
        self._prompt_counts: BoundedCache[int, int] = BoundedCache(MAX_COUNTED_PROMPTS)
        self._answers: BoundedCache[str, tuple[Message, ...]] = BoundedCache(MAX_ANSWERS, MAX_ANSWER_CHARACTERS)

    async def build_prompt(self, request: ModelRequest, count_rerendered: bool) -> Prompt:
        """What the model is shown. compare: count what a conversation that is rendered anew would have changed."""
        async with self._lock:
            return await self._run(request.characters, partial(self._build_prompt, request, count_rerendered))

    def count_occurrence(self, prompt: Prompt) -> int:
        """How often an answer to this prompt was asked for before."""
        occurrences = self._prompt_counts.get(prompt.hash) or 0
        self._prompt_counts.put(prompt.hash, occurrences + 1)
        return occurrences

    async def remember_answer(
        self, request: ModelRequest, prompt: Prompt, completion: Completion, answer: Message, stop: str | None = None
    ) -> None:
        """Remember an answer to a prompt, so that what goes on from it continues it exactly. stop: the stop string that
        ended it."""
        size = request.characters + count_characters([answer])
        async with self._lock:
            await self._run(size, partial(self._remember, request, prompt, completion, answer, stop or ""))

    async def _run(self, size: int, work: Callable[[], T]) -> T:
        """Do this, on a thread where it is on so many characters that others would wait for the event loop."""
        if size < MIN_THREAD_CHARACTERS:
            return work()
        future = asyncio.get_running_loop().run_in_executor(self._threads, work)
        try:
            return await asyncio.shield(future)
        finally:
            while not future.done():  # the call was cancelled; the conversation is the thread's until its work is done
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([future])

    def _remember(
        self, request: ModelRequest, prompt: Prompt, completion: Completion, answer: Message, stop: str
    ) -> None:
        input_ids, completion_ids = prompt.input_ids, completion.ids
        ids = np.concatenate([input_ids, completion_ids])
        self._known_prefixes.put(blake2b(ids.tobytes(), digest_size=16).digest(), len(ids))
        if request.prompt is None:
            answer_start = len(prompt.ids)
            self._conversation.remember_answer(
                request.messages, request.tools, input_ids, completion_ids, answer, stop, answer_start=answer_start
            )
            return
        decode = self._chat.tokenizer.decode
        prefix = request.prompt if isinstance(request.prompt, str) else decode(input_ids, keep_special_tokens=True)
        text = prefix + decode(completion_ids)
        self._texts.put(text, ids, len(text) + len(ids))

    def store_conversation(self, id: str, messages: tuple[Message, ...]) -> None:
        """Keep a conversation up to the answer of this name, for a call that goes on from it or names it. The oldest
        are let go of where there are too many."""
        self._answers.put(id, messages, count_characters(messages))

    def find_conversation(self, id: str) -> tuple[Message, ...] | None:
        """The conversation up to that answer."""
        return self._answers.get(id)

    def find_answer(self, id: str) -> Message | None:
        """That answer alone."""
        messages = self._answers.get(id)
        return messages[-1] if messages else None

    def _build_prompt(self, request: ModelRequest, count_rerendered: bool) -> Prompt:
        if request.prompt is not None:
            return self._match_history(self._text_ids(request.prompt))
        return self._render_prompt(request, count_rerendered)

    def _render_prompt(self, request: ModelRequest, count_rerendered: bool) -> Prompt:
        messages, tools, conversation = request.messages, request.tools, self._conversation
        served_ids = (
            conversation.find_prefill_ids(messages, tools, request.prefill) if request.prefill is not None else None
        )
        if served_ids is not None:
            prompt = replace(self._match_history(*served_ids), observed=0)  # all of it was shown or sampled before
        else:
            ids = conversation.render(messages, tools)
            prompt = self._match_history(ids, build_prefill(self._chat, ids, request))
            prompt = replace(prompt, observed=conversation.count_observed_tokens(messages, tools, ids))
        all_messages = messages if request.prefill is None else (*messages, request.prefill)
        if prompt.how == "begun" and conversation.rewrites_history(all_messages):
            return replace(prompt, how="branched")
        if not count_rerendered or prompt.how != "continued":
            return prompt
        return replace(prompt, changed=_count_differing(prompt.ids, self._chat.render(messages, tools)))

    def _text_ids(self, prompt: str | Ids) -> Ids:
        """The ids of a text, those of the longest beginning that was served before among them."""
        if not isinstance(prompt, str):
            return prompt
        prefix = max((text for text in self._texts if prompt.startswith(text)), key=len, default=None)
        if prefix is None:
            return self._chat.tokenizer.encode(prompt, add_special_tokens=True)
        ids, rest = self._texts.get(prefix), prompt[len(prefix) :]
        assert ids is not None, "it was found there"
        eos_text = next((text for text, id in self._chat.tokenizer.eos_tokens.items() if id == ids[-1]), None)
        if eos_text is not None:  # the text that was answered is without it, and what is written by hand has it
            rest = rest.removeprefix(eos_text)
        return np.concatenate([ids, self._chat.tokenizer.encode_after_ids(ids, rest)]) if rest else ids

    def _match_history(self, ids: Ids, prefill_ids: Ids = NO_IDS) -> Prompt:
        """A prompt, and whether it begins with an earlier one and its answer."""
        digest, hashed, continued = blake2b(digest_size=16), 0, False
        input_ids = np.concatenate([ids, prefill_ids])
        data = input_ids.tobytes()
        for length in sorted({length for length in self._known_prefixes.values() if length <= len(input_ids)}):
            digest.update(data[hashed * input_ids.itemsize : length * input_ids.itemsize])
            hashed = length
            continued = continued or self._known_prefixes.get(digest.digest()) is not None
        digest.update(data[hashed * input_ids.itemsize :])
        hash = int.from_bytes(digest.digest()[:8], "little") >> 1
        return Prompt(ids, prefill_ids, hash, "continued" if continued else "begun")


def state_id(name: str) -> int:
    """A number for the state that an agent says it is in."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") >> 1


def _count_differing(one: Ids, other: Ids) -> int:
    """How many tokens stand between what two sequences begin with alike and what they end with alike."""
    if np.array_equal(one, other):
        return 0
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    start = int(differs[0]) if len(differs) else length
    differs = np.flatnonzero(one[::-1][: length - start] != other[::-1][: length - start])
    end = int(differs[0]) if len(differs) else length - start
    return max(len(one), len(other)) - start - end
