"""The steps of a call: it gets a slot, the upstream samples, the turn is recorded, and the answer is returned.

The end of an answer is never sent before its turn is acknowledged. Other ends are recorded too. A call that its client
dropped, or that took too long, leaves an aborted turn with the sampled tokens. A failure of the engine leaves a note.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from etude.agents.proxy.metrics import EndpointMetrics
from etude.agents.proxy.request import (
    AnswerWriter,
    APIError,
    CompletionChunk,
    JSONObject,
    ModelAnswer,
    PromptScorer,
    ReturnedPrompt,
    Upstream,
)
from etude.agents.proxy.sampling_rules import SeedFunction
from etude.agents.proxy.slot_queue import SlotQueue
from etude.agents.proxy.turn_recorder import ModelCall, TurnRecorder
from etude.chat import ChatRenderer, ContentDelta, MessageDelta, ReasoningDelta, TokenStreamParser, ToolCallDelta
from etude.chat.streaming import TextStreamParser
from etude.errors import ConfigError, DataError, EngineError
from etude.observe import get_logger
from etude.records import Completion, Message, SamplingParams
from etude.running_time import time_limit

T = TypeVar("T")
Write = Callable[[bytes], Awaitable[None]]
_EMPTY = Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), "length")


class ModelCallRunner:
    """Answers calls. Any number may be active; each may be cancelled at any await."""

    def __init__(
        self,
        chat: ChatRenderer,
        upstream: Upstream,
        slots: SlotQueue,
        metrics: EndpointMetrics,
        recorder: TurnRecorder,
        seeds: SeedFunction,
        *,
        timeout_s: float,
        newest_version: Callable[[], int] | None = None,
        scorer: PromptScorer | None = None,
    ) -> None:
        """newest_version, scorer: see `ModelEndpoint`."""
        self._scorer = scorer
        self._newest_version = newest_version
        self._chat = chat
        self._upstream = upstream
        self._slots = slots
        self._metrics = metrics
        self._recorder = recorder
        self._seeds = seeds
        self._timeout = timeout_s

    @property
    def scores_prompts(self) -> bool:
        """True if answers are not recorded, so that a call of /v1/completions may have several prompts."""
        return self._scorer is not None

    async def answer_all(self, calls: Sequence[ModelCall]) -> list[JSONObject]:
        """Return a response to each call. If one fails, the others are cancelled."""
        return await _gather_limited([self.answer(call) for call in calls], len(calls))

    async def answer(self, call: ModelCall) -> JSONObject:
        """Return the answers to a call as one response."""
        if call.request.with_prompt and not self.scores_prompts:
            raise APIError(
                "'echo' cannot be true: this endpoint records answers, and a prompt's log-probs are none. Put the "
                "prompt before the answer yourself; `etude serve` returns both.",
                param="echo",
            )
        async with self._under_way(call):
            began = time.perf_counter()
            async with self._slots.acquire(call.request.n) as slots:
                prompt = await self._score_prompt(call) if call.request.with_prompt else None
                answers = await _gather_limited(
                    [self._answer_one(call, params) for params in self._params(call)], slots
                )
            sampled = max(answer.sampled for answer in answers) - began
        self._on_answered(call, answers)
        body = call.dialect.format_response(call.reply_header(self._chat.tokenizer, prompt), answers)
        seconds = time.perf_counter() - call.began
        self._metrics.record("latency", seconds)
        self._metrics.record("overhead", seconds - sampled)
        return body

    async def stream(self, call: ModelCall, start: Callable[[], Awaitable[None]], write: Write) -> None:
        """Write the answers as they come. `start` is called before the first byte, once the call has a slot. An error
        before it is raised; a later one is written in the dialect's form."""
        writer = call.dialect.writer(call.reply_header(self._chat.tokenizer))
        started = False
        try:
            async with self._under_way(call):
                async with self._slots.acquire(call.request.n) as slots:
                    await start()
                    started = True
                    await write(writer.begin())
                    params = self._params(call)
                    coroutines = [
                        self._stream_one(call, writer, n, sampling, write) for n, sampling in enumerate(params)
                    ]
                    answers = await _gather_limited(coroutines, slots)
                self._on_answered(call, answers)
                self._metrics.record("latency", time.perf_counter() - call.began)
                await write(writer.close(answers))
        except APIError as refusal:
            if not started:
                raise
            await write(writer.fail(refusal))

    @asynccontextmanager
    async def _under_way(self, call: ModelCall) -> AsyncIterator[None]:
        """Bound a call by its timeout, and by the end of its attempt."""
        task = asyncio.current_task()
        assert task is not None, "calls are answered on an event loop"
        self._metrics.counts["calls"] += 1
        call.session.under_way.add(task)
        try:
            async with time_limit(self._timeout):
                yield
        except TimeoutError as error:
            self._metrics.counts["timed_out"] += 1
            message = f"The call took longer than {self._timeout:g} s, including its wait for a slot."
            raise APIError(message, "timeout") from error
        finally:
            call.session.under_way.discard(task)

    def _params(self, call: ModelCall) -> list[SamplingParams]:
        """Return the parameters of each answer, with the policy version that the attempt keeps.

        If the agent's seed holds, further answers use the following numbers.
        """
        session = call.session
        prompt = call.prompt
        seed = call.sampling.seed
        if session.version is None and self._newest_version is not None:
            session.version = self._newest_version()
        if seed is not None:
            seeds = [(seed + n) % 2**63 for n in range(call.request.n)]
        else:
            rollout = session.attempt_id.rollout
            seeds = [
                self._seeds(session.use, rollout, session.draw, prompt.hash, session.count_occurrence(prompt))
                for _ in range(call.request.n)
            ]
        return [replace(call.sampling, seed=seed, version=session.version) for seed in seeds]

    async def _answer_one(self, call: ModelCall, params: SamplingParams) -> ModelAnswer:
        """Sample one answer and record it as soon as it is complete, even if the call's other answers fail."""
        if call.request.prompt_only:
            return ModelAnswer(Message("assistant", ""), _EMPTY, sampled=time.perf_counter())
        began = time.time()
        try:
            completion = await self._upstream.generate(call.prompt.input_ids, params, images=call.images)
        except Exception as error:
            raise await self._to_api_error(call, error) from error
        except BaseException:  # the client has disconnected, or the call timed out
            self._recorder.record_aborted(call, (), self._chat.tokenizer, began)
            raise
        sampled = time.perf_counter()
        answer = await self._record(call, completion, began, self._start_parser(call)[0].parse_all(completion.ids))
        return replace(answer, sampled=sampled)

    async def _score_prompt(self, call: ModelCall) -> ReturnedPrompt:
        """Return the prompt of a call, with the log-probs of its tokens if they were requested."""
        ids = call.prompt.input_ids
        if not call.request.logprobs:
            return ReturnedPrompt(ids, None)
        assert self._scorer is not None, "an endpoint without one has refused the call"
        try:
            return ReturnedPrompt(ids, await self._scorer.score(ids, call.sampling.top_logprobs))
        except Exception as error:
            raise await self._to_api_error(call, error) from error

    async def _stream_one(
        self, call: ModelCall, writer: AnswerWriter, index: int, params: SamplingParams, write: Write
    ) -> ModelAnswer:
        """Write one answer as it comes; record it before its end is written."""
        (parser, first_deltas), stripper = self._start_parser(call), _PrefillStripper(self._parse_prefill(call))
        stripper.strip_deltas(first_deltas)
        chunks: list[CompletionChunk] = []
        completion, began = None, time.time()
        try:
            sampled = self._upstream.stream(call.prompt.input_ids, params, images=call.images)
            async with aclosing(sampled) as stream:
                async for chunk in stream:
                    chunks.append(chunk)
                    completion = chunk.completion
                    if completion is None:
                        await _write_deltas(write, writer, index, stripper.strip_deltas(parser.push(chunk.ids)))
        except Exception as error:
            self._recorder.record_aborted(call, chunks, self._chat.tokenizer, began)
            raise await self._to_api_error(call, error) from error
        except BaseException:  # the client has disconnected, or the call timed out
            self._recorder.record_aborted(call, chunks, self._chat.tokenizer, began)
            raise
        assert completion is not None, "the last chunk has the completion"
        last_deltas = [*parser.push(chunks[-1].ids), *parser.finish()]
        answer = await self._record(call, completion, began, parser.message)
        await _write_deltas(write, writer, index, stripper.strip_deltas(last_deltas))
        await write(writer.end(index, answer))
        return answer

    def _start_parser(self, call: ModelCall) -> tuple[TokenStreamParser, list[MessageDelta]]:
        """Return a parser of the answer, and the deltas of its prefill."""
        if call.request.prompt is not None:
            special = self._chat.tokenizer.special_ids
            return TokenStreamParser(
                TextStreamParser(None), self._chat.tokenizer, lambda id: id not in special, call.sampling
            ), []
        parser = self._chat.stream_parser(
            call.prompt.ids, call.request.tools, call.sampling, parse_calls=call.allows_tools
        )
        return parser, parser.push_prefix(call.prompt.prefill_ids)

    def _parse_prefill(self, call: ModelCall) -> Message:
        if call.request.prefill is None:
            return Message("assistant", "")
        parser, _ = self._start_parser(call)
        parser.finish()
        return parser.message

    async def _record(self, call: ModelCall, completion: Completion, began: float, message: Message) -> ModelAnswer:
        """Record the turn of an answer. The answer is returned once that is acknowledged."""
        await self._recorder.record_turn(call, completion, began)
        if completion.finish_reason == "abort":
            raise APIError("The engine aborted this answer. Try again.", "failed")
        stop = self._find_stop_string(completion, call.sampling)
        if not call.request.with_prompt:  # such a call evaluates, and nothing continues it
            await call.session.remember_answer(call.request, call.prompt, completion, message, stop)
        return ModelAnswer(_PrefillStripper(self._parse_prefill(call)).strip(message), completion, stop)

    def _find_stop_string(self, completion: Completion, sampling: SamplingParams) -> str | None:
        """Return the stop string that ended an answer: the first of those that end within its last token."""
        if not sampling.stop or completion.finish_reason != "stop":
            return None
        decode = self._chat.tokenizer.decode
        text, before = decode(completion.ids), len(decode(completion.ids[:-1]).rstrip("\ufffd"))
        matches = [
            (position, stop)
            for stop in sampling.stop
            if (position := text.find(stop, max(0, before - len(stop) + 1))) >= 0
        ]
        return min(matches)[1] if matches else None

    async def _to_api_error(self, call: ModelCall, error: Exception) -> APIError:
        """Return the refusal for an error of the upstream."""
        if isinstance(error, APIError):
            return error
        if isinstance(error, DataError | ConfigError):
            return APIError(str(error))
        self._metrics.counts["upstream_failed"] += 1
        if not isinstance(error, EngineError):
            get_logger("agents").error(f"Sampling failed: {error!r}")
        message = str(error) or repr(error)
        await self._recorder.note(call.session.attempt_id, "upstream_failed", {"error": message, **call.labels})
        return APIError(f"The model could not answer: {message}", "failed")

    def _on_answered(self, call: ModelCall, answers: Sequence[ModelAnswer]) -> None:
        if call.request.store:
            call.session.store_conversation(
                call.id, (*call.request.messages[call.request.instruction_count :], answers[0].message)
            )
        self._metrics.counts["answered"] += 1


class _PrefillStripper:
    """Removes an agent's prefill from the answer: the agent knows it already."""

    def __init__(self, prefill: Message) -> None:
        known = {ContentDelta: str(prefill.content), ReasoningDelta: prefill.reasoning}
        # the prefill may end within a character
        self._known = {kind: text.rstrip("\ufffd") for kind, text in known.items()}

    def strip(self, message: Message) -> Message:
        """Return a whole answer without the prefill."""
        content = str(message.content).removeprefix(self._known[ContentDelta])
        return replace(message, content=content, reasoning=message.reasoning.removeprefix(self._known[ReasoningDelta]))

    def strip_deltas(self, deltas: Sequence[MessageDelta]) -> list[MessageDelta]:
        """Return the deltas of an answer without the prefill."""
        return [
            stripped
            for delta in deltas
            if isinstance(stripped := self._strip_delta(delta), ToolCallDelta) or stripped.text
        ]

    def _strip_delta(self, delta: MessageDelta) -> MessageDelta:
        if isinstance(delta, ToolCallDelta):
            return delta
        known = self._known[type(delta)]
        self._known[type(delta)] = known[len(delta.text) :] if known.startswith(delta.text) else ""
        return replace(delta, text="" if known.startswith(delta.text) else delta.text.removeprefix(known))


async def _write_deltas(write: Write, writer: AnswerWriter, index: int, deltas: Sequence[MessageDelta]) -> None:
    if deltas:
        await write(b"".join(writer.delta(index, delta) for delta in deltas))


async def _gather_limited(coroutines: Sequence[Coroutine[Any, Any, T]], limit: int) -> list[T]:
    """Return the results of coroutines, of which at most `limit` run at once. If one fails, the others are cancelled
    and awaited."""
    if len(coroutines) == 1:
        return [await coroutines[0]]
    semaphore = asyncio.Semaphore(limit)

    async def run_limited(coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            async with semaphore:
                return await coroutine
        finally:
            coroutine.close()  # it may never have started

    tasks = [asyncio.ensure_future(run_limited(coroutine)) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
