"""The sessions: each attempt's prompts and answers as token ids, while it runs.

A call *continues* if its prompt begins with the prompt and the answer of an earlier call, id by id. It *begins* a
conversation if that has no answer of the model, even if the agent wrote assistant messages itself. Otherwise the agent
rewrote the history, and the trajectory *branches*.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from hashlib import blake2b
from typing import Generic, Literal, TypeVar

import numpy as np

from etude.agents.proxy.answer_limits import AnswerGrammar, build_grammar
from etude.agents.proxy.request import APIError, ModelRequest, count_characters
from etude.agents.proxy.request_images import ImageQuota
from etude.chat import ChatRenderer, RenderedPrompt
from etude.chat.answer_index import Tools
from etude.chat.messages import content_text
from etude.chat.reasoning import THINK_CLOSE, THINK_OPEN
from etude.chat.tokenizer import Ids
from etude.chat.tool_parsers import CALL_AFFIXES
from etude.errors import ChatError, ConfigError, ImageError
from etude.images import ImageSpan, keyed_ids
from etude.records import Completion, Message
from etude.store.queue.rollout_queue import AttemptId, RolloutPurpose

K = TypeVar("K")
T = TypeVar("T")
V = TypeVar("V")

NO_IDS = np.zeros(0, np.int32)
MIN_THREAD_CHARACTERS = 2_000
"""Characters of a conversation from which on it is rendered on a thread."""
MAX_ANSWERS, MAX_ANSWER_CHARACTERS = 1024, 2**25
"""The most answers of one attempt, and the most characters of their conversations, that later calls may reference; and
the most continued texts that are kept with their ids."""
MAX_KNOWN_PREFIXES = 4096
"""The most answers of one attempt that a prompt may continue, recognized by their ids only."""
MAX_COUNTED_PROMPTS = 2**16
"""The most prompts of one attempt whose occurrences are counted."""


@dataclass(frozen=True, eq=False)
class Prompt:
    """The prompt of a call."""

    ids: Ids
    """The conversation, up to the start of the assistant's answer."""
    prefill_ids: Ids
    """The beginning of the answer, which the model continues as if it had written it."""
    hash: int
    how: Literal["begun", "continued", "branched"]
    changed: int = 0
    """For a call that continues: the number of tokens from the first to the last that a new rendering would change."""
    observed: int | None = None
    """The number of ids at the end that were added after the model's last answer; None if the ids show it."""
    known: int = 0
    """The number of ids at the beginning that are an earlier prompt and its answer."""
    images: tuple[ImageSpan, ...] = ()
    """The images among `ids`."""

    @cached_property
    def input_ids(self) -> Ids:
        """All ids that the model gets."""
        return np.concatenate([self.ids, self.prefill_ids])


class AttemptSession:
    """One attempt at the endpoint. Used on one event loop; any number of its calls may be active."""

    def __init__(
        self,
        attempt_id: AttemptId,
        use: RolloutPurpose,
        chat: ChatRenderer,
        draw: int = 0,
        threads: Executor | None = None,
        max_tokens: int | None = None,
    ) -> None:
        """threads: where long conversations are rendered, by default the event loop's own executor. max_tokens: the
        most tokens of an answer, if the run has a limit for these tasks."""
        self.attempt_id = attempt_id
        self.use = use
        self.max_tokens = max_tokens
        self.draw = draw
        """The index of the attempt among its rollout's draws; it determines the seeds."""
        self.under_way: set[asyncio.Task[None]] = set()
        self.version: int | None = None
        """The policy version of all answers, of an engine that keeps several; None until the first call samples."""
        self.refused: set[str] = set()
        """The reasons of refused calls that were recorded."""
        self.image_quota = ImageQuota()
        """The images that the attempt may still bring into the store."""
        self.last_call_at = time.monotonic()
        """The time of the last call."""
        self._chat = chat
        self._conversation = chat.start_conversation()
        self._lock = asyncio.Lock()
        self._threads = threads
        # digest of a prompt with its answer -> their length
        self._known_prefixes: BoundedCache[bytes, int] = BoundedCache(MAX_KNOWN_PREFIXES)
        # prompt and answer of calls without messages -> their ids
        self._texts: BoundedCache[str, Ids] = BoundedCache(MAX_ANSWERS, MAX_ANSWER_CHARACTERS)
        self._prompt_counts: BoundedCache[int, int] = BoundedCache(MAX_COUNTED_PROMPTS)
        self._answers: BoundedCache[str, tuple[Message, ...]] = BoundedCache(MAX_ANSWERS, MAX_ANSWER_CHARACTERS)

    async def build_prompt(self, request: ModelRequest, count_rerendered: bool) -> Prompt:
        """Return the prompt of a call; raise `APIError` if it has none. count_rerendered: count the tokens that a new
        rendering would change."""
        try:
            size = request.characters + MIN_THREAD_CHARACTERS * request.has_images
            prompt = await self._run(size, partial(self._build_prompt, request, count_rerendered))
        except UnicodeEncodeError as error:
            raise APIError(f"A string has an unpaired surrogate ({error.reason}). Remove it.") from error
        except (ChatError, ConfigError, ImageError, RecursionError) as error:
            raise APIError(str(error), param="messages") from error
        if not len(prompt.ids):
            raise APIError("The prompt is empty; the model needs at least one token.", param="prompt")
        return prompt

    async def build_grammar(self, request: ModelRequest, prompt: Prompt, *, held: bool, strict: bool) -> AnswerGrammar:
        """Return the grammar of an answer; see `answer_limits`. It is compiled on a thread."""
        if not request.limits.fields and request.tool_choice != "required":
            return AnswerGrammar(None)
        work = partial(build_grammar, self._chat, prompt.ids, request, held=held, strict=strict)
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def count_occurrence(self, prompt: Prompt) -> int:
        """Return the number of earlier answers to this prompt."""
        occurrences = self._prompt_counts.get(prompt.hash) or 0
        self._prompt_counts.put(prompt.hash, occurrences + 1)
        return occurrences

    async def remember_answer(
        self, request: ModelRequest, prompt: Prompt, completion: Completion, answer: Message, stop: str | None = None
    ) -> None:
        """Remember an answer, so that later calls continue it exactly. stop: the stop string that ended it."""
        size = request.characters + count_characters([answer])
        await self._run(size, partial(self._remember, request, prompt, completion, answer, stop or ""))

    async def _run(self, size: int, work: Callable[[], T]) -> T:
        """Run a function alone on the conversation; on a thread, if its text is so long that other calls would wait for
        the event loop."""
        async with self._lock:
            if size < MIN_THREAD_CHARACTERS:
                return work()
            future = asyncio.get_running_loop().run_in_executor(self._threads, work)
            try:
                return await asyncio.shield(future)
            finally:
                while not future.done():  # the call was cancelled, but the thread still uses the conversation
                    with suppress(asyncio.CancelledError):
                        await asyncio.wait([future])

    def _remember(
        self, request: ModelRequest, prompt: Prompt, completion: Completion, answer: Message, stop: str
    ) -> None:
        input_ids, completion_ids = prompt.input_ids, completion.ids
        ids = np.concatenate([input_ids, completion_ids])
        keys = keyed_ids(ids, prompt.images)
        self._known_prefixes.put(blake2b(keys.tobytes(), digest_size=16).digest(), len(ids))
        if request.prompt is None:
            answer_start = len(prompt.ids)
            self._conversation.remember_answer(
                request.messages,
                request.tools,
                input_ids,
                completion_ids,
                answer,
                stop,
                answer_start=answer_start,
                images=prompt.images,
            )
            return
        decode = self._chat.tokenizer.decode
        prefix = request.prompt if isinstance(request.prompt, str) else decode(input_ids, keep_special_tokens=True)
        text = prefix + decode(completion_ids)
        self._texts.put(text, ids, len(text) + len(ids))

    def store_conversation(self, id: str, messages: tuple[Message, ...]) -> None:
        """Keep a conversation up to the answer of this id, for calls that continue or reference it. The oldest ones are
        dropped."""
        self._answers.put(id, messages, count_characters(messages))

    def find_conversation(self, id: str) -> tuple[Message, ...] | None:
        """Return the conversation up to an answer, by the answer's id."""
        return self._answers.get(id)

    def find_answer(self, id: str) -> Message | None:
        """Return an answer by its id."""
        messages = self._answers.get(id)
        return messages[-1] if messages else None

    def _build_prompt(self, request: ModelRequest, count_rerendered: bool) -> Prompt:
        if request.prompt is not None:
            alone = request.with_prompt  # the log-probs of a prompt do not depend on earlier calls
            return self._match_history(RenderedPrompt(self._text_ids(request.prompt, alone=alone)))
        messages = request.messages
        tools = request.tools
        conversation = self._conversation
        served_ids = (
            conversation.find_prefill_ids(messages, tools, request.prefill) if request.prefill is not None else None
        )
        if served_ids is not None:
            prompt = replace(self._match_history(*served_ids), observed=0)  # all of it was a prompt or sampled before
        else:
            rendered = conversation.render(messages, tools)
            prompt = self._match_history(rendered, _build_prefill(self._chat, rendered.ids, request))
            prompt = replace(prompt, observed=conversation.count_observed_tokens(messages, tools, rendered.ids))
        all_messages = messages if request.prefill is None else (*messages, request.prefill)
        if prompt.how == "begun" and conversation.rewrites_history(all_messages):
            return replace(prompt, how="branched")
        if not count_rerendered or prompt.how != "continued":
            return prompt
        return replace(prompt, changed=self._count_rerendered(prompt.ids, messages, tools))

    def _count_rerendered(self, ids: Ids, messages: tuple[Message, ...], tools: Tools) -> int:
        """Return the number of tokens that a new rendering would change: all, if there can be none because an answer
        spells the placeholder of an image."""
        try:
            return _count_differing(ids, self._chat.render(messages, tools).ids)
        except ChatError:
            return len(ids)

    def _text_ids(self, prompt: str | Ids, *, alone: bool) -> Ids:
        """Return the ids of a text. Unless it is tokenized alone, they contain the ids of the longest prefix that was
        served before."""
        if not isinstance(prompt, str):
            return prompt
        if alone:
            return self._chat.tokenizer.encode(prompt, add_special_tokens=True)
        prefix = max((text for text in self._texts if prompt.startswith(text)), key=len, default=None)
        if prefix is None:
            return self._chat.tokenizer.encode(prompt, add_special_tokens=True)
        ids, rest = self._texts.get(prefix), prompt[len(prefix) :]
        assert ids is not None, "the key was found above"
        eos_text = next((text for text, id in self._chat.tokenizer.eos_tokens.items() if id == ids[-1]), None)
        if eos_text is not None:  # the answer's text is without it, but a handwritten prompt has it
            rest = rest.removeprefix(eos_text)
        return np.concatenate([ids, self._chat.tokenizer.encode_after_ids(ids, rest)]) if rest else ids

    def _match_history(self, rendered: RenderedPrompt, prefill_ids: Ids = NO_IDS) -> Prompt:
        """Return a prompt, and note if it begins with an earlier prompt and its answer, images included."""
        digest = blake2b(digest_size=16)
        hashed = known = 0
        input_ids = keyed_ids(np.concatenate([rendered.ids, prefill_ids]), rendered.images)
        data = input_ids.tobytes()
        for length in sorted({length for length in self._known_prefixes.values() if length <= len(input_ids)}):
            digest.update(data[hashed * input_ids.itemsize : length * input_ids.itemsize])
            hashed = length
            known = length if self._known_prefixes.get(digest.digest()) is not None else known
        digest.update(data[hashed * input_ids.itemsize :])
        hash = int.from_bytes(digest.digest()[:8], "little") >> 1
        how: Literal["begun", "continued"] = "continued" if known else "begun"
        return Prompt(rendered.ids, prefill_ids, hash, how, known=known, images=rendered.images)


def _build_prefill(chat: ChatRenderer, prompt: Ids, request: ModelRequest) -> Ids:
    """Return the ids that the answer has to begin with: those of the agent's prefill, or of a required tool call, or
    none.

    They are context, like the rest of the prompt: the policy did not choose them, and they train nothing. If the prompt
    opens the reasoning, a required call closes it first.
    """
    if request.prefill is not None:
        if request.tool_choice == "required":
            message = "'tool_choice' cannot require a call if the request begins the answer. Use 'auto' or 'none'."
            raise APIError(message, param="tool_choice")
        return chat.tokenizer.encode_after_ids(prompt, _prefill_text(chat, prompt, request.prefill))
    if request.tool_choice != "required":
        return NO_IDS
    affixes = CALL_AFFIXES.get(chat.tool_format or "")
    if affixes is None:
        raise APIError(
            "'tool_choice' cannot require a call: this endpoint cannot begin one in this model's tool format. Use "
            "'auto' or 'none'.",
            param="tool_choice",
        )
    before, after = affixes
    name = (
        json.dumps(request.tool_name)[1:-1] + ('"' if before.endswith('"') else "") + after if request.tool_name else ""
    )
    closed = f"\n{THINK_CLOSE}\n\n" if chat.opens_reasoning(prompt) else ""
    return chat.tokenizer.encode_after_ids(prompt, closed + before + name)


def _prefill_text(chat: ChatRenderer, prompt: Ids, prefill: Message) -> str:
    """Return the text of the agent's prefill, with its reasoning. A prefill without content ends within the
    reasoning."""
    content, opens_reasoning = content_text(prefill.content) or "", chat.opens_reasoning(prompt)
    if not prefill.reasoning:
        return f"\n{THINK_CLOSE}\n\n{content}" if opens_reasoning and content else content
    reasoning = ("\n" if opens_reasoning else f"{THINK_OPEN}\n") + prefill.reasoning
    return f"{reasoning}\n{THINK_CLOSE}\n\n{content}" if content else reasoning


def state_id(name: str) -> int:
    """Return a number for the state that an agent names."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") >> 1


def _count_differing(one: Ids, other: Ids) -> int:
    """Return the number of tokens between the common prefix and the common suffix of two sequences."""
    if np.array_equal(one, other):
        return 0
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    start = int(differs[0]) if len(differs) else length
    differs = np.flatnonzero(one[::-1][: length - start] != other[::-1][: length - start])
    end = int(differs[0]) if len(differs) else length - start
    return max(len(one), len(other)) - start - end


class BoundedCache(Generic[K, V]):
    """The newest entries. The last one is kept even if it is too heavy."""

    def __init__(self, max_entries: int, max_weight: float = math.inf) -> None:
        """max_entries: the number of entries. max_weight: the weight of all entries."""
        self._max_entries = max_entries
        self._max_weight = max_weight
        self._entries: dict[K, tuple[V, int]] = {}  # the oldest first
        self._weight = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[K]:
        return iter(self._entries)

    def get(self, key: K) -> V | None:
        """Return the value of a key; None if it is not kept."""
        entry = self._entries.get(key)
        return None if entry is None else entry[0]

    def values(self) -> list[V]:
        """Return the values, the oldest first."""
        return [value for value, _ in self._entries.values()]

    def put(self, key: K, value: V, weight: int = 0) -> None:
        """Make this the newest entry. The oldest ones are dropped if there are too many."""
        self._weight += weight - self._entries.pop(key, (value, 0))[1]
        self._entries[key] = value, weight
        while len(self._entries) > self._max_entries or (self._weight > self._max_weight and len(self._entries) > 1):
            self._weight -= self._entries.pop(next(iter(self._entries)))[1]
