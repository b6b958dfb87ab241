"""The model endpoint: answers every call of an agent, and records each answer as one turn with the exact token ids.

    key ─► attempt ─► request ─► prompt ids ─► slot ─► sampling ─► turn is recorded ─► answer

This file goes as far as the prompt's ids; `model_call_runner` does the rest.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import count, islice
from typing import Self

from etude.agents.proxy.endpoint_config import EndpointConfig
from etude.agents.proxy.external import ExternalCall, Passthrough
from etude.agents.proxy.image_addresses import ImageFetcher
from etude.agents.proxy.metrics import EndpointMetrics
from etude.agents.proxy.model_call_runner import ModelCallRunner
from etude.agents.proxy.request import (
    APIDialect,
    APIError,
    ErrorKind,
    JSONObject,
    ModelRequest,
    PromptScorer,
    Upstream,
)
from etude.agents.proxy.request_fields import parse_request
from etude.agents.proxy.request_images import RequestImages
from etude.agents.proxy.sampling_rules import SamplingRules, SeedFunction, make_seed_function
from etude.agents.proxy.session import AttemptSession, state_id
from etude.agents.proxy.slot_queue import SlotQueue
from etude.agents.proxy.turn_recorder import ModelCall, TurnRecorder, attempt_over_error
from etude.chat import ChatRenderer
from etude.errors import ConfigError, EtudeError, InvalidKeyError
from etude.observe import get_logger
from etude.records import SamplingParams
from etude.store.http.background_thread import BackgroundThread
from etude.store.journal.states import LIVE, RolloutState, Status
from etude.store.queue.keys import Keyring, keys_from_headers
from etude.store.queue.rollout_queue import AttemptId, RolloutQuery, RolloutQueue
from etude.token_routes import find_routes_start

SWEEP_S, UNNOTIFIED_SWEEP_S = 15.0, 2.0
"""Seconds between two sweeps for ended attempts: if a store reports them, and if none does."""
IDLE_S = 30.0
"""Seconds without a call, after which a sweep checks an attempt."""
MAX_CHARACTERS_PER_TOKEN = 64
"""Characters per token of the model's context, beyond which a prompt is refused without tokenization."""
MIN_TOKENS_PER_MESSAGE = 4
"""Tokens of the model's context per message: it bounds the number of messages in the same way."""
RENDER_THREADS = 2
"""Threads that render long conversations. They are few, because each competes with the event loop for the interpreter.
They are more than one, so that no attempt waits for the longest conversation of another."""
SWEEP_BATCH = 100
"""The most attempts per query of a sweep."""
RECORDED_KINDS: tuple[ErrorKind, ...] = ("invalid", "not_found", "too_large", "forbidden")
"""Refusals that the call itself causes, which are recorded on its attempt. The others appear in the journal as other
notes or turns, or are temporary."""
MAX_REFUSALS = 16
"""The most different refusals that are recorded for an attempt; all are counted."""
MAX_REFUSAL_CHARACTERS = 2000
"""The most characters that are recorded of a refusal."""
MAX_LOGGED_NAMES = 200
"""The most names of ignored fields that are logged: agents may invent any number."""


class ModelEndpoint:
    """Answers the calls of all attempts. It lives on one event loop; `async with` runs its sweeps for ended
    attempts."""

    def __init__(
        self,
        queue: RolloutQueue,
        keyring: Keyring,
        chat: ChatRenderer,
        upstream: Upstream,
        *,
        model: str = "policy",
        context: int | None = None,
        train: SamplingParams | None = None,
        val: SamplingParams | None = None,
        seeds: SeedFunction | None = None,
        config: EndpointConfig | None = None,
        notified: bool = True,
        newest_version: Callable[[], int] | None = None,
        holds_grammars: bool = False,
        scorer: PromptScorer | None = None,
        max_tokens_of: Callable[[RolloutState], int | None] | None = None,
    ) -> None:
        """context: the model's maximum sequence length, if the upstream does not check it. train, val: the sampling
        parameters of training and of validation, by default those of training. notified: True if a store reports ended
        attempts by `forget_attempts`; otherwise the endpoint queries the rollout queue often. newest_version: returns
        the newest policy version of an upstream that keeps several; an attempt keeps that of its first call.
        holds_grammars: the upstream follows `SamplingParams.grammar`. scorer: computes the log-probs of prompts, where
        answers are not recorded; a call of /v1/completions may then have several prompts, and `echo`. max_tokens_of:
        returns the limit that a rollout's answers have instead of the one in `train` or `val`, if there is one; called
        on a thread."""
        self._max_tokens_of = max_tokens_of
        self._holds_grammars = holds_grammars
        self.config = config or EndpointConfig()
        self.queue = queue
        self.keyring = keyring
        self.chat = chat
        self.model = model
        training = train or SamplingParams()
        self._sampling_rules = SamplingRules(training, val or training, self.config.parameters)
        self._context = context
        self._notified = notified
        self._slots = SlotQueue(self.config.max_running, self.config.max_waiting)
        self._metrics = EndpointMetrics()
        self._recorder = TurnRecorder(queue, self._metrics, self.forget)
        self.runner = ModelCallRunner(
            chat,
            upstream,
            self._slots,
            self._metrics,
            self._recorder,
            seeds or make_seed_function(0),
            timeout_s=self.config.timeout_s,
            newest_version=newest_version,
            scorer=scorer,
        )
        if model in self.config.external:
            raise ConfigError(f"The trained model has the name '{model}'. Give the external model another name.")
        external_slots = SlotQueue(self.config.max_running, self.config.max_waiting)
        self.passthrough = Passthrough(
            self.config.external, external_slots, self._metrics, self._recorder, self.config.timeout_s
        )
        self._threads = ThreadPoolExecutor(RENDER_THREADS, thread_name_prefix="etude-rendering")
        self._images = RequestImages(
            queue,
            ImageFetcher(self.config.image_hosts, int(self.config.max_body_mib * 2**20)),
            self._threads,
            refusal=chat.encoder.refusal,
            max_images=self.config.max_images,
        )
        self._sessions: dict[AttemptId, AttemptSession] = {}
        self._process = secrets.token_hex(4)
        self._calls = count(1)
        self._ignored: set[str] = set()  # names that were logged
        self._sweeper: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._sweeper = asyncio.create_task(self._sweep_loop(), name="etude-endpoint")
        return self

    async def __aexit__(self, *raised: object) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
            with suppress(asyncio.CancelledError):
                await self._sweeper
        await self._recorder.close()
        await self.passthrough.close()

    @property
    def models(self) -> tuple[str, ...]:
        """The names of the models that agents may use: first the one that is trained."""
        return (self.model, *self.passthrough.models)

    def metrics(self) -> Mapping[str, float]:
        """Return counts since the start, percentiles of recent latencies in seconds, and the number of active calls."""
        now = {
            "endpoint/running": self._slots.running,
            "endpoint/waiting": self._slots.waiting,
            "endpoint/attempts": len(self._sessions),
        }
        return self._metrics.summary() | now

    def forget_attempts(self, attempt_ids: Sequence[AttemptId]) -> None:
        """Forget attempts that have ended. Any thread may call it."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed, and so are its sessions
                for attempt_id in attempt_ids:
                    self._loop.call_soon_threadsafe(self.forget, attempt_id)

    def forget(self, attempt_id: AttemptId) -> None:
        """Cancel the calls of an attempt that has ended, and drop its session."""
        session = self._sessions.pop(attempt_id, None)
        for task in session.under_way if session is not None else ():
            task.cancel()

    # -- before sampling ----------------------------------------------------------------------------------------------

    def authorize(self, headers: Mapping[str, str]) -> AttemptId:
        """Return the attempt whose key came as `Authorization: Bearer …` or as `x-api-key`."""
        texts = keys_from_headers(headers.get("authorization"), headers.get("x-api-key"))
        if not texts:
            raise APIError(
                "The request has no key. Send the model key as 'Authorization: Bearer KEY' or 'x-api-key: KEY'. "
                "Commands find it in OPENAI_API_KEY and ANTHROPIC_API_KEY.",
                "unauthorized",
                code="invalid_api_key",
            )
        try:
            grant = self.keyring.read_first(texts)
        except InvalidKeyError as error:
            raise APIError(str(error), "unauthorized", code="invalid_api_key") from error
        if grant.scope != "model" or grant.attempt_id is None:
            raise APIError(
                f"This key has the scope '{grant.scope}'. A call to the model needs the attempt's model key.",
                "forbidden",
            )
        return grant.attempt_id

    async def prepare_call(
        self,
        background: BackgroundThread,
        dialect: APIDialect,
        attempt_id: AttemptId,
        body: JSONObject,
        size: int,
        *,
        tags: Sequence[str],
        began: float,
        state: str,
    ) -> ModelCall:
        """Parse a call, and build the ids of its prompt. background: parses long bodies. size: the number of bytes of
        the body. state: a name for the agent's state; by default the prompt names it."""
        request, session = await self._parse_request(background, dialect, attempt_id, body, size)
        sampling, ignored = self._sampling_rules.resolve(request, session.use, session.max_tokens)
        prompt = await session.build_prompt(request, self.config.count_rerendered)
        grammar = await session.build_grammar(request, prompt, held=self._holds_grammars, strict=self.config.strict)
        if grammar.text is not None:
            sampling = replace(sampling, grammar=grammar.text, support=sampling.support or session.use != "val")
        sampling = replace(sampling, routes_start=find_routes_start(sampling.routes_start, prompt.known))
        ignored = (*ignored, *grammar.ignored)
        self._log_ignored(ignored)
        id = f"{dialect.prefix}{attempt_id.rollout}-{attempt_id.attempt}-{self._process}-{next(self._calls)}"
        anchor = state_id(state) if state else prompt.hash
        images = await self._images.of_prompt(prompt.images)
        call = ModelCall(id, dialect, request, session, prompt, sampling, ignored, tuple(tags), began, anchor, images)
        await self._check_length(call)
        return call

    async def _check_length(self, call: ModelCall) -> None:
        """Refuse a prompt that leaves no room for an answer."""
        tokens, context = len(call.prompt.input_ids), self._context
        if context is None or tokens + (not call.request.prompt_only) <= context:
            return
        shown = sum(span.stop - span.start for span in call.prompt.images)
        raise await self._too_long(
            call.session.attempt_id,
            f"{tokens} tokens > {context - 1} maximum{f', {shown} of them of images' if shown else ''}; this model's "
            f"maximum context length is {context} tokens, and the answer needs at least one. "
            + ("Lower `vision.max_pixels`, or send fewer images." if shown else "Shorten the messages."),
            {"tokens": tokens, "context": context, **call.labels},
        )

    async def count_tokens(
        self, background: BackgroundThread, dialect: APIDialect, attempt_id: AttemptId, body: JSONObject, size: int
    ) -> int:
        """Return the number of prompt tokens of a call."""
        request, session = await self._parse_request(background, dialect, attempt_id, body, size)
        return len((await session.build_prompt(request, self.config.count_rerendered)).input_ids)

    async def _parse_request(
        self, background: BackgroundThread, dialect: APIDialect, attempt_id: AttemptId, body: JSONObject, size: int
    ) -> tuple[ModelRequest, AttemptSession]:
        """Parse a call; return it with its session. Refuse one that no context holds, before it is tokenized."""
        session, context = await self._session(attempt_id), self._context
        async with background.slot(attempt_id, size):
            request, characters = await background.run(size, self._parse_body, dialect, body, session)
        if context is not None and (
            characters > MAX_CHARACTERS_PER_TOKEN * context or MIN_TOKENS_PER_MESSAGE * len(request.messages) > context
        ):
            raise await self._too_long(
                attempt_id,
                f"about {characters} characters in {len(request.messages)} messages; this model's maximum context "
                f"length is {context} tokens. Shorten the messages.",
                {"characters": characters, "context": context},
            )
        return await self._images.read(request, session.image_quota), session

    def _parse_body(self, dialect: APIDialect, body: JSONObject, session: AttemptSession) -> tuple[ModelRequest, int]:
        """Return a call, after the conversation that it continues by an answer's id, and its number of characters."""
        request = parse_request(dialect, body, session.find_answer, strict=self.config.strict)
        if request.model in self.passthrough.models:
            raise APIError(
                f"The model '{request.model}' is external, and available in OpenAI's dialects only. Call it at "
                "/v1/chat/completions, /v1/completions or /v1/responses.",
                param="model",
            )
        if request.model != self.model:
            raise unknown_model_error(request.model, self.models)
        request.check_tools()
        if request.previous_id:
            earlier, start = session.find_conversation(request.previous_id), request.instruction_count
            if earlier is None:
                raise APIError(
                    f"This attempt has no answer '{request.previous_id}' to continue. An attempt's answers are kept "
                    "until it ends, except for requests with 'store': false.",
                    "not_found",
                    param="previous_response_id",
                    code="previous_response_not_found",
                )
            request = replace(request, messages=(*request.messages[:start], *earlier, *request.messages[start:]))
        return request, request.characters

    async def prepare_external_call(
        self, path: str, attempt_id: AttemptId, body: JSONObject, tags: Sequence[str], began: float
    ) -> ExternalCall | None:
        """Return a call to an external model; None if it names none. path: without /v1."""
        name = body.get("model")
        if not isinstance(name, str) or name not in self.passthrough.models:
            return None
        return ExternalCall(name, path, body, await self._session(attempt_id), tuple(tags), began)

    def _log_ignored(self, names: Sequence[str]) -> None:
        new = [name for name in dict.fromkeys(names) if name not in self._ignored]
        if new and len(self._ignored) < MAX_LOGGED_NAMES:
            self._ignored |= set(new)
            get_logger("agents").info(
                "Agents send %s, which answers do not follow: the run decides, or this endpoint does not support it. "
                "Each response names such fields in `x-etude-ignored`; `agent.strict=true` refuses them.",
                ", ".join(f"`{name}`" for name in new),
            )

    async def _session(self, attempt_id: AttemptId) -> AttemptSession:
        """Return the attempt's session. The first call queries the rollout queue: the attempt has to run.

        An attempt that infrastructure broke is repeated with the same draw.
        """
        session = self._sessions.get(attempt_id)
        if session is None:
            page = await self.queue.find(RolloutQuery(ids=(attempt_id.rollout,), limit=1))
            attempts = page.rollouts[0].attempts if page.rollouts else ()
            if not 0 <= attempt_id.attempt < len(attempts):
                message = f"The store has no attempt {attempt_id.attempt} at rollout {attempt_id.rollout}."
                raise APIError(message, "forbidden")
            if attempts[attempt_id.attempt].status not in LIVE:
                raise attempt_over_error(attempt_id)
            draw = sum(attempt.status is not Status.INFRA_ERROR for attempt in attempts[: attempt_id.attempt])
            (rollout,) = page.rollouts
            limit = None if self._max_tokens_of is None else await asyncio.to_thread(self._max_tokens_of, rollout)
            session = AttemptSession(attempt_id, rollout.use, self.chat, draw, self._threads, limit)
            session = self._sessions.setdefault(attempt_id, session)
        session.last_call_at = time.monotonic()
        return session

    async def _too_long(self, attempt_id: AttemptId, reason: str, data: Mapping[str, object]) -> APIError:
        """Record a prompt that is too long, and return the refusal."""
        self._metrics.counts["context_length"] += 1
        await self._recorder.note(attempt_id, "context_length_exceeded", data)
        code = "context_length_exceeded"
        return APIError(f"prompt is too long: {reason}", "context", param="messages", code=code)

    async def record_refusal(self, attempt_id: AttemptId | None, path: str, refusal: APIError) -> None:
        """Count a call that got no answer, and record the reason on its attempt, if that is known: agents often hide
        the error."""
        self._metrics.counts["refused"] += 1
        if attempt_id is None or refusal.kind not in RECORDED_KINDS:
            return
        try:
            session = await self._session(attempt_id)
            if len(session.refused) >= MAX_REFUSALS or refusal.message in session.refused:
                return
            session.refused.add(refusal.message)
            data = {"path": path, "status": refusal.status, "param": refusal.param, "code": refusal.code}
            data = {name: value for name, value in data.items() if value is not None}
            await self.queue.record_note(
                attempt_id, "refused", {**data, "error": refusal.message[:MAX_REFUSAL_CHARACTERS]}
            )
        except (APIError, EtudeError) as error:  # the attempt has ended, or the store is unreachable
            get_logger("agents").debug(f"A refused call of {attempt_id} could not be recorded: {error}")

    # -- attempts that have ended -------------------------------------------------------------------------------------

    async def _sweep_loop(self) -> None:
        """Drop the sessions of ended attempts from time to time."""
        while True:
            await asyncio.sleep(SWEEP_S if self._notified else UNNOTIFIED_SWEEP_S)
            try:
                await self.sweep(IDLE_S if self._notified else 0.0)
            except Exception as error:  # the store may be unreachable for a while
                details = None if isinstance(error, EtudeError) else error
                get_logger("agents").warning(
                    "The endpoint could not query the ended attempts: %s", error, exc_info=details
                )

    async def sweep(self, silent: float = 0.0) -> None:
        """Query the attempts that have not called for `silent` seconds, and forget those that have ended."""
        now = time.monotonic()
        idle = iter(
            [attempt_id for attempt_id, session in self._sessions.items() if now - session.last_call_at >= silent]
        )
        while attempt_ids := list(islice(idle, SWEEP_BATCH)):
            ids = tuple({attempt_id.rollout for attempt_id in attempt_ids})
            page = await self.queue.find(RolloutQuery(ids=ids, limit=len(ids)))
            attempts = {rollout.id: rollout.attempts for rollout in page.rollouts}
            for attempt_id in attempt_ids:
                known = attempts.get(attempt_id.rollout, ())
                if attempt_id.attempt >= len(known) or known[attempt_id.attempt].status not in LIVE:
                    self.forget(attempt_id)


def unknown_model_error(name: str, models: Sequence[str]) -> APIError:
    """Return the refusal of a model that does not exist."""
    known = "', '".join(models)
    message = f"This endpoint has no model '{name}'. Its models are: '{known}'."
    return APIError(message, "not_found", param="model", code="model_not_found")
