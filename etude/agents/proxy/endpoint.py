"""The model endpoint: every call of an agent, answered and recorded as one turn, with the very tokens.

    key ─► whose ─► what is asked ─► the prompt's ids ─► a place ─► sampling ─► the turn is written ─► the answer

This file goes as far as the prompt's ids; the rest is `answering`.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import count, islice
from typing import Self

from pydantic import Field

from etude.agents.proxy.answering import Answering, Write
from etude.agents.proxy.asked import Asked, Body, Dialect, Kind, Refusal, Terms
from etude.agents.proxy.external import Elsewhere, External, Foreign
from etude.agents.proxy.gate import Gate
from etude.agents.proxy.meter import Meter
from etude.agents.proxy.notary import Call, Notary, over
from etude.agents.proxy.policy import Parameters, Policy, Seeds, seeds_of
from etude.agents.proxy.record import Prompt, Sitting, named_state
from etude.agents.proxy.upstream import Upstream
from etude.chat import Chat
from etude.config import Config
from etude.errors import ChatError, ConfigError, EtudeError, KeyRefusedError
from etude.observe import get_log
from etude.records import SamplingParams
from etude.store.aside import Aside
from etude.store.desk import Desk, Find, Key, Use
from etude.store.keys import Keyring, keys_in
from etude.store.states import LIVE, Status

__all__ = ["Endpoint", "EndpointConfig", "no_model"]

SWEEP, FAR_SWEEP = 15.0, 2.0
"""Seconds between two looks for attempts that have ended; and where nobody tells of them."""
SILENT = 30.0
"""Seconds without a call, after which it is asked whether an attempt has ended."""
FARTHEST = 64
"""Characters for each token of the model's context, beyond which a prompt is refused without being read."""
FEWEST = 4
"""Tokens of the model's context for each message, by which the number of messages is bounded in the same way."""
RENDERING = 2
"""Threads on which long conversations are rendered: few, because the event loop waits for the interpreter like each of
them, and more than one, so that no attempt waits for another's longest."""
AT_ONCE = 100
"""Of how many attempts that is asked at a time."""
NOTED: tuple[Kind, ...] = ("invalid", "not_found", "too_large", "forbidden")
"""Refusals that the call itself causes, which are noted on its attempt. The others are in the journal by other notes or
turns, or pass."""
MOST_REFUSALS = 16
"""Different refusals that are noted of an attempt; all are counted."""
LONGEST = 2000
"""Characters of a refusal that are noted."""
MOST_LOGGED = 200
"""The most names of ignored fields that are logged: agents make them up."""


class EndpointConfig(Config):
    """The model endpoint."""

    max_running: int = Field(256, ge=1, description="most answers sampled at once; more calls wait")
    max_waiting: int = Field(2048, ge=0, description="most calls that wait; the next is answered 429, with Retry-After")
    timeout_s: float = Field(600.0, gt=0, description="seconds for a call, waiting included; then it is answered 504")
    max_body_mib: float = Field(
        16.0, gt=0, le=32, description="MiB of the largest request; a larger one is answered 413"
    )
    parameters: Parameters = Field(
        "force", description="force: the run's sampling parameters hold; default: the agent's own, where it sets them"
    )
    strict: bool = Field(
        False, description="refuse requests whose fields the run decides or cannot serve, in place of ignoring those"
    )
    compare: bool = Field(True, description="count the tokens that rendering conversations anew would have changed")
    external: dict[str, External] = Field(
        {}, description="models of other providers, by the names that agents ask for: recorded, never trained"
    )


class Endpoint:
    """Answers the calls of all attempts. It lives on one event loop; `async with` has it tend to what has ended."""

    def __init__(
        self,
        desk: Desk,
        keyring: Keyring,
        chat: Chat,
        upstream: Upstream,
        *,
        model: str = "policy",
        context: int | None = None,
        train: SamplingParams | None = None,
        val: SamplingParams | None = None,
        seeds: Seeds | None = None,
        config: EndpointConfig | None = None,
        told: bool = True,
    ) -> None:
        """context: the model's longest sequence, where the upstream does not say it. train, val: what answers are
        drawn with in attempts of either use; validation's are training's unless they are given. told: whether somebody
        tells of attempts that are over, by `over`; else the desk is asked often."""
        self.config = config or EndpointConfig()
        self.desk, self.keyring, self.chat, self.upstream, self.model = desk, keyring, chat, upstream, model
        training = train or SamplingParams()
        self._policy = Policy(training, val or training, self.config.parameters)
        self._context, self._told = context, told
        self._gate = Gate(self.config.max_running, self.config.max_waiting)
        self._meter = Meter()
        self._notary = Notary(desk, model, self._meter, self.forget)
        self._answering = Answering(
            chat,
            upstream,
            self._gate,
            self._meter,
            self._notary,
            seeds or seeds_of(0),
            timeout_s=self.config.timeout_s,
        )
        if model in self.config.external:
            raise ConfigError(f"The model that is trained is called '{model}' here; call the external one otherwise.")
        places = Gate(self.config.max_running, self.config.max_waiting)
        self.elsewhere = Elsewhere(self.config.external, places, self._meter, self._notary, self.config.timeout_s)
        self._threads = ThreadPoolExecutor(RENDERING, thread_name_prefix="etude-rendering")
        self._sittings: dict[Key, Sitting] = {}
        self._process, self._calls = secrets.token_hex(4), count(1)
        self._ignored: set[str] = set()  # names that were logged
        self._tending: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._tending = asyncio.create_task(self._tend(), name="etude-endpoint")
        return self

    async def __aexit__(self, *raised: object) -> None:
        if self._tending is not None:
            self._tending.cancel()
            with suppress(asyncio.CancelledError):
                await self._tending
        await self._notary.close()
        await self.elsewhere.close()

    @property
    def models(self) -> tuple[str, ...]:
        """The names of the models that agents may ask for: first the one that is trained."""
        return (self.model, *self.elsewhere.models)

    def metrics(self) -> Mapping[str, float]:
        """Counts since it was made, percentiles of its last calls' times in seconds, and how many are under way."""
        now = {
            "endpoint/running": self._gate.taken,
            "endpoint/waiting": self._gate.waiting,
            "endpoint/attempts": len(self._sittings),
        }
        return self._meter.told() | now

    def over(self, keys: Sequence[Key]) -> None:
        """Attempts have ended: forget them. Any thread may say so."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed, and nothing is remembered there
                self._loop.call_soon_threadsafe(self._forget_all, tuple(keys))

    def _forget_all(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self.forget(key)

    def forget(self, key: Key) -> None:
        """An attempt has ended: its calls are ended, and what it said is let go of."""
        found = self._sittings.pop(key, None)
        for task in found.under_way if found is not None else ():
            task.cancel()

    # -- before sampling ----------------------------------------------------------------------------------------------

    def entitled(self, authorization: str | None, api_key: str | None = None) -> Key:
        """Return the attempt whose key came as `Authorization: Bearer …` or as `x-api-key`."""
        texts = keys_in(authorization, api_key)
        if not texts:
            raise Refusal(
                "A key is needed: the attempt's model key, as 'Authorization: Bearer KEY' or 'x-api-key: KEY'. Agents "
                "find it in OPENAI_API_KEY and ANTHROPIC_API_KEY.",
                "unauthorized",
                code="invalid_api_key",
            )
        try:
            grant = self.keyring.first(texts)
        except KeyRefusedError as error:
            raise Refusal(str(error), "unauthorized", code="invalid_api_key") from error
        if grant.scope != "model" or grant.key is None:
            raise Refusal(f"This is a key for {grant.scope}; calling the model takes a model key.", "forbidden")
        return grant.key

    async def open(
        self,
        aside: Aside,
        dialect: Dialect,
        key: Key,
        body: Body,
        tags: Sequence[str] = (),
        began: float | None = None,
        state: str = "",
        size: int = 0,
    ) -> Call:
        """Understand a call, and find the ids that it asks to go on from. aside: where what is long is read. state: a
        name for the state that the agent is in; without one it is all that the model is shown. size: how many bytes the
        body was."""
        began = time.perf_counter() if began is None else began
        asked, sitting = await self._understood(aside, dialect, key, body, size)
        sampling, ignored = self._policy.params(asked, sitting.use)
        prompt = await self._prompt(sitting, asked)
        self._log_ignored(ignored)
        id = f"{dialect.prefix}{key.rollout}-{key.attempt}-{self._process}-{next(self._calls)}"
        anchor = named_state(state) if state else prompt.hash
        call = Call(id, dialect, asked, sitting, prompt, sampling, ignored, tuple(tags), began, anchor)
        if self._context is not None and len(call.shown) >= self._context:
            raise await self._too_long(call, self._context)
        return call

    async def count(self, aside: Aside, dialect: Dialect, key: Key, body: Body, size: int = 0) -> int:
        """How many tokens a call would show the model."""
        asked, sitting = await self._understood(aside, dialect, key, body, size)
        return len((await self._prompt(sitting, asked)).shown)

    async def _understood(
        self, aside: Aside, dialect: Dialect, key: Key, body: Body, size: int
    ) -> tuple[Asked, Sitting]:
        """Parse a call, join what it continues, and return it with its session; refuse what no context holds."""
        sitting = await self._sitting(key)
        async with aside.turn(key, size):
            asked = _joined(await aside.run(size, self._parsed, dialect, body, sitting), sitting)
            await self._refuse_what_no_context_holds(key, asked, await aside.run(size, _weighed, asked))
        return asked, sitting

    async def foreign(self, path: str, key: Key, body: Body, tags: Sequence[str], began: float) -> Foreign | None:
        """A call to a model of somebody else's, where it is one. path: after /v1."""
        name = body.get("model")
        if not isinstance(name, str) or name not in self.elsewhere.models:
            return None
        return Foreign(name, path, body, await self._sitting(key), tuple(tags), began)

    def _log_ignored(self, names: Sequence[str]) -> None:
        """Log each name once."""
        new = [name for name in dict.fromkeys(names) if name not in self._ignored]
        if new and len(self._ignored) < MOST_LOGGED:
            self._ignored |= set(new)
            get_log("agents").info(
                "Agents send %s, which answers do not follow: the run decides, or it cannot be served here. Each "
                "response names such fields in `x-etude-ignored`; `agent.strict=true` refuses them.",
                ", ".join(f"`{name}`" for name in new),
            )

    def _parsed(self, dialect: Dialect, body: Body, sitting: Sitting) -> Asked:
        asked = dialect.parse(body, Terms(self.config.strict, sitting.answer))
        if asked.model in self.elsewhere.models:
            raise Refusal(
                f"The model '{asked.model}' is served by somebody else, in OpenAI's dialects alone: ask for it at "
                "/v1/chat/completions, /v1/completions or /v1/responses.",
                param="model",
            )
        if asked.model != self.model:
            raise no_model(asked.model, self.models)
        return asked

    async def _refuse_what_no_context_holds(self, key: Key, asked: Asked, size: int) -> None:
        """Refuse a prompt that is too long for any context, before it is tokenised. size: its characters."""
        context = self._context
        if context is not None and (size > FARTHEST * context or FEWEST * len(asked.messages) > context):
            self._meter.counts["context_length"] += 1
            await self.desk.note(key, "context_length_exceeded", {"characters": size, "context": context})
            raise Refusal(
                f"prompt is too long: about {size} characters in {len(asked.messages)} messages; this model's maximum "
                f"context length is {context} tokens. Shorten the messages.",
                "context",
                param="messages",
                code="context_length_exceeded",
            )

    async def _prompt(self, sitting: Sitting, asked: Asked) -> Prompt:
        try:
            prompt = await sitting.prompt(asked, self.config.compare)
        except UnicodeEncodeError as error:
            raise Refusal(f"A text has half a character in it ({error.reason}). Leave it out.") from error
        except (ChatError, ConfigError, RecursionError) as error:
            raise Refusal(str(error), param="messages") from error
        if not len(prompt.ids):
            raise Refusal("The prompt is empty: a model continues at least one token.", param="prompt")
        return prompt

    async def _sitting(self, key: Key) -> Sitting:
        """The attempt at the endpoint. At its first call, the desk is asked whether it runs, and what for."""
        found = self._sittings.get(key)
        if found is None:
            use, draw = await self._use(key)
            found = self._sittings.setdefault(key, Sitting(key, use, self.chat, draw, self._threads))
        found.spoke = time.monotonic()
        return found

    async def _use(self, key: Key) -> tuple[Use, int]:
        """What the attempt is for, and which draw it is: one that infrastructure broke is made again as it was."""
        page = await self.desk.find(Find(ids=(key.rollout,), limit=1))
        attempts = page.rollouts[0].attempts if page.rollouts else ()
        if not 0 <= key.attempt < len(attempts):
            raise Refusal(f"The store knows no attempt {key.attempt} at rollout {key.rollout}.", "forbidden")
        if attempts[key.attempt].status not in LIVE:
            raise over(key)
        draw = sum(attempt.status is not Status.INFRA_ERROR for attempt in attempts[: key.attempt])
        return page.rollouts[0].use, draw

    async def _too_long(self, call: Call, context: int) -> Refusal:
        """A prompt that the model cannot be shown, noted."""
        tokens = len(call.shown)
        self._meter.counts["context_length"] += 1
        await self._notary.note(call, "context_length_exceeded", {"tokens": tokens, "context": context})
        return Refusal(
            f"prompt is too long: {tokens} tokens > {context - 1} maximum; this model's maximum context length is "
            f"{context} tokens, and at least one is to follow. Shorten the messages.",
            "context",
            param="messages",
            code="context_length_exceeded",
        )

    # -- answering ----------------------------------------------------------------------------------------------------

    async def answer(self, call: Call) -> Body:
        """The answers to a call in one piece."""
        return await self._answering.whole(call)

    async def stream(self, call: Call, start: Callable[[], Awaitable[None]], write: Write) -> None:
        """Write the answers as they come, after `start`: what goes wrong before it is raised, what goes wrong later is
        written in the dialect's words."""
        await self._answering.stream(call, start, write)

    async def refused(self, key: Key | None, path: str, refusal: Refusal) -> None:
        """Count a call that got no answer, and note on its attempt why: agents often keep that to themselves, and fail.
        key: whose call it was, where that is known."""
        self._meter.counts["refused"] += 1
        if key is None or refusal.kind not in NOTED:
            return
        try:
            sitting = await self._sitting(key)
            if len(sitting.refused) >= MOST_REFUSALS or refusal.message in sitting.refused:
                return
            sitting.refused.add(refusal.message)
            told = {"path": path, "status": refusal.status, "param": refusal.param, "code": refusal.code}
            told = {name: value for name, value in told.items() if value is not None}
            await self.desk.note(key, "refused", {**told, "error": refusal.message[:LONGEST]})
        except (Refusal, EtudeError) as error:  # the attempt is over, or the store is away: the answer goes out anyway
            get_log("agents").debug(f"A refused call of {key} could not be noted: {error}")

    # -- what has ended -----------------------------------------------------------------------------------------------

    async def _tend(self) -> None:
        """From time to time, let go of attempts that have ended."""
        while True:
            await asyncio.sleep(SWEEP if self._told else FAR_SWEEP)
            try:
                await self.sweep(SILENT if self._told else 0.0)
            except Exception as error:  # a store that is away for a while
                get_log("agents").warning(f"The endpoint could not ask which attempts have ended: {error}")

    async def sweep(self, silent: float = 0.0) -> None:
        """Ask the desk about the attempts that have not called for so many seconds, and forget those that ended."""
        now = time.monotonic()
        quiet = iter([key for key, each in self._sittings.items() if now - each.spoke >= silent])
        while keys := list(islice(quiet, AT_ONCE)):
            ids = tuple({key.rollout for key in keys})
            page = await self.desk.find(Find(ids=ids, limit=len(ids)))
            attempts = {each.id: each.attempts for each in page.rollouts}
            for key in keys:
                known = attempts.get(key.rollout, ())
                if key.attempt >= len(known) or known[key.attempt].status not in LIVE:
                    self.forget(key)


def no_model(name: str, models: Sequence[str]) -> Refusal:
    """The refusal of a model that nobody knows."""
    known = "', '".join(models)
    told = f"There is no model '{name}' here; there is '{known}'."
    return Refusal(told, "not_found", param="model", code="model_not_found")


def _weighed(asked: Asked) -> int:
    return asked.characters


def _joined(asked: Asked, sitting: Sitting) -> Asked:
    """With the conversation that it goes on from, where it names an answer instead of repeating it."""
    if not asked.previous:
        return asked
    earlier = sitting.earlier(asked.previous)
    if earlier is None:
        raise Refusal(
            f"This attempt has no answer '{asked.previous}' to go on from. Answers are kept for the attempt that asked "
            "for them, unless it said 'store': false.",
            "not_found",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return replace(asked, messages=(*asked.messages[: asked.lead], *earlier, *asked.messages[asked.lead :]))
