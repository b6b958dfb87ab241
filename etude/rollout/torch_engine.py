"""The embedded inference engine: continuous batching over the very model that is trained.

One thread owns all state and runs one loop: run the queued commands, then a step: schedule, compute, sample. All other
callers (coroutines on any event loop, or plain threads) queue a command and wait for a future. So no state is shared,
and `pause`, `update_weights` and `abort` never interrupt a step.

    consumes       requests, from `generate`, `stream` and `generate_all`
    produces       completions; each token with its log-probs and the version of the weights that drew it
    waits for      requests, and while paused for `resume`
    unblocked by   any command; `close` ends the loop after the current step

With `deterministic`, a request's tokens and log-probs do not depend on what shares its batch, when it arrived, or how
often it was preempted. With float32 weights this holds bit for bit (see `kv_cache`), on processors that have
batch-invariant product shapes. A trial before the first step finds them (see `batch_invariance`).
"""

from __future__ import annotations

import asyncio
import math
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.errors import ConfigError, EngineError
from etude.images import PromptImages
from etude.images.pixel_cache import PixelCache
from etude.models import EngineModel, Model
from etude.observe import Metrics, Sum, get_logger
from etude.records import Completion, PromptScores, SamplingParams
from etude.rollout.config import TorchEngineConfig
from etude.rollout.engine_steps import EngineSteps
from etude.rollout.engine_thread import EngineCommands, WeightCopy, release_omp_workers, to_engine_error
from etude.rollout.image_reader import ImageReader, read_images
from etude.rollout.prompt_pixels import PromptPixels
from etude.rollout.prompt_scores import score_prompt
from etude.rollout.request import Delta, Request, RequestImages, check_request, check_scored_prompt
from etude.rollout.sampling import SampledTokens
from etude.rollout.scheduler import Scheduler
from etude.rollout.step_pipeline import DrawnTokens

if TYPE_CHECKING:
    from etude.chat import Tokenizer

Ids = NDArray[np.int32]

CLOSE_TIMEOUT = 60.0
"""Seconds that `close` waits for the current step."""


class TorchEngine:
    """An inference engine in this process. `update_weights` is for the weight sender; all other methods for any
    caller."""

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer | None,
        config: TorchEngineConfig,
        *,
        version: int = 0,
        merge: bool = False,
        records_routes: bool = False,
        images: ImageReader | None = None,
    ) -> None:
        """merge: for a model with adapters, compute with a second copy of the weights, into which the adapters are
        merged. records_routes: keep the experts of each token, for requests that ask for them. images: reads those of
        prompts, for a model that takes images."""
        self.model = model
        self.tokenizer = tokenizer
        self.config = config
        routes = model.control_routers("train.router_replay=r3") if records_routes else None
        self._keeps_routes = records_routes
        self._images = images
        self._commands = EngineCommands()
        pixels = None if images is None else PromptPixels(images.pixels, self._commands.wake)
        self._steps = EngineSteps(model, config, version=version, routes=routes, pixels=pixels)
        self._resident = EngineModel(model, merge=merge, prepack=config.prepack)
        self._paused = False
        self._finished: Future[None] = Future()
        """Done once no request runs, while none begins before new weights."""
        self._broken: EngineError | None = None
        self._busy = 0.0
        self._thread = threading.Thread(target=self._loop, name="etude-engine", daemon=True)
        self._thread.start()

    # -- for any caller -----------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The policy version of its weights."""
        return self._scheduler.version

    @property
    def pixels(self) -> PixelCache | None:
        """The pixels of the images of prompts, which a trainer in this process may share; None without images."""
        return None if self._images is None else self._images.pixels

    @property
    def exact(self) -> bool:
        """True if a request gets the same bits in every batch; known after the first step."""
        return self._steps.exact

    async def generate(
        self,
        prompt: Ids,
        sampling: SamplingParams,
        *,
        images: PromptImages | None = None,
        on_start: Callable[[], None] | None = None,
    ) -> Completion:
        """Sample one continuation. Cancelling the wait aborts the request. `on_start` is called on the engine's
        thread."""
        shown = await read_images(self._images, self.model, len(prompt), images)
        request = self._request(prompt, sampling, images, shown, on_start=on_start)
        self._submit(request)
        try:
            return await asyncio.wrap_future(request.future)
        except asyncio.CancelledError:
            self._cancel(request)
            raise

    async def stream(
        self, prompt: Ids, sampling: SamplingParams, *, images: PromptImages | None = None
    ) -> AsyncGenerator[Delta, None]:
        """Do the same, and yield each token as it comes. Leaving the iteration aborts the request."""
        loop = asyncio.get_running_loop()
        deltas: asyncio.Queue[Delta | None] = asyncio.Queue()

        def listen(delta: Delta | None) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(deltas.put_nowait, delta)

        shown = await read_images(self._images, self.model, len(prompt), images)
        request = self._request(prompt, sampling, images, shown, listen)
        request.future.add_done_callback(lambda _: listen(None))
        self._submit(request)
        try:
            while (delta := await deltas.get()) is not None:
                yield delta
            request.future.result()
        finally:
            self._cancel(request)

    def generate_all(self, prompts: Sequence[Ids], samplings: Sequence[SamplingParams]) -> list[Completion]:
        """Sample a continuation of each prompt, and wait for all of them. Not for use on an event loop."""
        pairs = zip(prompts, samplings, strict=True)
        requests = [self._request(prompt, sampling) for prompt, sampling in pairs]
        self._submit(*requests)
        try:
            return [request.future.result() for request in requests]
        finally:
            self._cancel(*requests)

    async def score(self, prompt: Ids, top: int) -> PromptScores:
        """Return the log-probs of a prompt's tokens, and the `top` likeliest tokens at each place."""
        ids = np.asarray(prompt, dtype=np.int32)
        check_scored_prompt(ids, vocab_size=self.model.vocab_size, context_length=self.model.context_length)
        return await self._commands.call_async(lambda: self._score(ids, top))

    async def abort(self) -> None:
        """End all requests. Every waiting call returns its tokens so far, finished by `abort`."""
        await self._commands.call_async(self._abort)

    async def pause(self) -> None:
        """Stop between two tokens. Requests under way stay, new ones queue, and all continue after `resume`."""
        await self._commands.call_async(lambda: self._set_paused(True))

    async def resume(self) -> None:
        """Continue the requests under way."""
        await self._commands.call_async(lambda: self._set_paused(False))

    async def sleep(self) -> None:
        """Free the memory of the KV cache and of extra copies of weights. No request may be under way."""
        await self._commands.call_async(self._sleep)

    async def wake(self) -> None:
        """Allocate that memory again."""
        await self._commands.call_async(self._wake)

    async def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Compute with these weights from the next token on.

        Pass no weights if the model's own memory was written; do this while the engine is paused. The options `running`
        and `kv` say what happens to requests under way. New ones use nothing that older weights computed.
        """
        try:
            if self.config.running == "finish":
                await self._finish_running()
            await self._commands.call_async(lambda: self._update_weights(weights, version))
        finally:
            with suppress(EngineError):  # a closed engine begins no requests
                self._commands.submit(lambda: self._scheduler.hold_new(False))

    async def _finish_running(self) -> None:
        """Begin no more requests, and wait until the running ones have ended."""
        seconds = self.config.update_timeout
        finished = await self._commands.call_async(self._hold_new)
        try:
            await asyncio.wait_for(asyncio.wrap_future(finished), seconds)
        except TimeoutError:
            raise EngineError(
                f"Requests still ran {seconds:g} s after new weights arrived, and `rollout.running=finish` lets them "
                f"end first. Raise `rollout.update_timeout`, lower the answers' length, or set "
                f"`rollout.running=continue`."
            ) from None

    def stats(self) -> Metrics:
        """Return the metrics since the last call, and the current load."""
        return self._commands.call(self._stats)

    def close(self) -> None:
        """End the thread after the current step. Requests under way get an error.

        A step that takes too long is an error, or only a warning if another error closes the engine.
        """
        self._commands.close()
        self._thread.join(CLOSE_TIMEOUT)
        if self._thread.is_alive():
            message = f"The engine is still computing a step {CLOSE_TIMEOUT:g} s after it was asked to close."
            if sys.exception() is None:
                raise EngineError(message)
            get_logger("rollout").warning(message)

    def __enter__(self) -> TorchEngine:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    # -- from other threads to the engine's ---------------------------------------------------------------------------

    def _request(
        self,
        prompt: Ids,
        sampling: SamplingParams,
        images: PromptImages | None = None,
        shown: RequestImages | None = None,
        listener: Callable[[Delta], None] | None = None,
        on_start: Callable[[], None] | None = None,
    ) -> Request:
        """Return a request; raise if it cannot be computed."""
        ids = np.asarray(prompt, dtype=np.int32)
        check_request(
            ids,
            sampling,
            vocab_size=self.model.vocab_size,
            context_length=self.model.context_length,
            cache_tokens=self._steps.cache_tokens,
            keeps_routes=self._keeps_routes,
            images=images,
        )
        if sampling.stop and self.tokenizer is None:
            raise ConfigError("An engine without a tokenizer cannot look for stop strings: give stop_ids instead.")
        return Request(
            ids,
            sampling,
            limit=self.model.context_length,
            vocab_size=self.model.vocab_size,
            tokenizer=self.tokenizer,
            images=shown,
            listener=listener,
            on_start=on_start,
        )

    def _submit(self, *requests: Request) -> None:
        """Queue these requests. First release the caller's OpenMP workers, since a trainer now waits for its engine."""
        release_omp_workers()
        self._commands.submit(lambda: self._enqueue(*requests), *(request.future for request in requests))

    def _cancel(self, *requests: Request) -> None:
        """Remove these requests: no caller waits for them."""
        unfinished = [request for request in requests if not request.future.done()]
        if unfinished:
            with suppress(EngineError):  # an engine that has ended has dropped them
                self._commands.submit(lambda: [self._scheduler.remove(request) for request in unfinished])

    @property
    def _scheduler(self) -> Scheduler:
        return self._steps.scheduler

    # -- on the engine's thread ---------------------------------------------------------------------------------------

    def _loop(self) -> None:
        """Run until the engine closes or breaks. Then every request fails, and later commands are refused."""
        failure = EngineError("The engine was closed while this request was under way.")
        try:
            torch.set_num_threads(self.config.threads or torch.get_num_threads())  # of this thread
            gpu = torch.accelerator.device_index(self.model.device.index)  # a new thread has GPU 0
            with gpu, torch.inference_mode(), self._resident.activate():
                while self._run_once():
                    pass
        except BaseException as error:  # the recovery failed too, as it does on a lost device
            failure = EngineError(f"The engine could not continue after an error, and has stopped: {error!r}")
            failure.__cause__ = error
        for request in [*self._scheduler.running, *self._scheduler.waiting]:
            request.fail(failure)
        self._commands.fail_pending(failure)
        if not self._finished.done():
            self._finished.set_exception(failure)

    def _run_once(self) -> bool:
        """Run the queued commands, then a step if there is work. Return False if the engine is closing.

        If the step fails, all requests get the error, and the cache is allocated again.
        """
        is_open = self._commands.run_pending(self._has_work, self._read_launched, release_omp_workers)
        self._read_ahead()
        if self._has_work() and is_open:
            self._append(self._steps.run(self._resident))
            self._read_ahead()
        if not (self._finished.done() or self._scheduler.has_started_requests):
            self._finished.set_result(None)
        return is_open

    def _read_ahead(self) -> None:
        """Have the images of the next requests read, and end those whose images cannot be read."""
        while failed := self._steps.read_ahead():
            for request, error in failed:
                self._remove_failed(request, error)

    def _read_launched(self) -> None:
        """Wait for the steps under way, before something else changes the requests or the weights."""
        self._append(self._steps.read_launched())

    def _append(self, steps: Iterator[DrawnTokens]) -> None:
        """Compute steps and append their tokens. If one fails, all requests get the error."""
        start = time.perf_counter()
        try:
            for drawn in steps:
                self._finish(drawn.requests, drawn.sampled)
        except Exception as error:
            self._fail_all(to_engine_error(error, self.config))
            self._steps.recover()
        self._busy += time.perf_counter() - start

    def _has_work(self) -> bool:
        return not self._paused and self._steps.has_work

    def _hold_new(self) -> Future[None]:
        """Begin no more requests. The future is done once none runs any more."""
        if self._paused and self._scheduler.has_started_requests:
            raise EngineError("The engine is paused, so its requests cannot finish before new weights: resume it.")
        self._scheduler.hold_new(True)
        self._finished = Future()
        self._finished.set_running_or_notify_cancel()
        return self._finished

    def _finish(self, requests: Sequence[Request], sampled: SampledTokens) -> None:
        """Append each request's token, and complete the requests that finish."""
        scheduler = self._scheduler
        if math.isnan(sum(sampled.raw_logp)):
            raise EngineError("The model's logits are not numbers. Its weights have diverged, or do not fit its dtype.")
        scheduler.stats.new_tokens += len(requests)
        for request, drawn in zip(requests, sampled.tokens(), strict=True):
            try:
                finish_reason = request.append_token(drawn, scheduler.version)
                if finish_reason is not None:
                    routes = self._steps.read_routes(request)
                    scheduler.finish(request)
                    request.finish(finish_reason, routes)
            except BaseException as error:
                self._remove_failed(request, error)

    def _remove_failed(self, request: Request, error: BaseException) -> None:
        """End one request and no other by an error, such as a listener's or a tokenizer's."""
        request.fail(error)
        self._scheduler.remove(request)

    def _enqueue(self, *requests: Request) -> None:
        for request in requests:
            if self._broken is not None:
                request.fail(self._broken)
            elif self._steps.cache is None:
                request.fail(EngineError("The engine is asleep: call wake() before you send requests."))
            else:
                self._scheduler.add(request)

    def _score(self, ids: Ids, top: int) -> PromptScores:
        if self._broken is not None:
            raise self._broken
        try:
            return score_prompt(self._resident.model, ids, top)
        except Exception as error:
            raise to_engine_error(error, self.config) from error

    def _abort(self) -> None:
        for request in [*self._scheduler.running, *self._scheduler.waiting]:
            routes = self._steps.read_routes(request)
            self._scheduler.remove(request)
            try:
                request.finish("abort", routes)
            except BaseException as error:
                self._remove_failed(request, error)

    def _fail_all(self, error: EngineError) -> None:
        for request in [*self._scheduler.running, *self._scheduler.waiting]:
            request.fail(error)
        self._scheduler.clear()

    def _set_paused(self, paused: bool) -> None:
        self._paused = paused

    def _sleep(self) -> None:
        under_way = len(self._scheduler.running) + len(self._scheduler.waiting)
        if under_way:
            raise EngineError(f"The engine cannot sleep while {under_way} requests are under way: await or abort them.")
        self._resident.clear()
        self._steps.clear()

    def _wake(self) -> None:
        if self._steps.cache is None:
            self._steps.restart()
            self._resident.refresh()

    def _update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy the weights in place. A copy that stops half-way ends service until one succeeds."""
        copy = WeightCopy(self.model)
        try:
            copy.run(weights)
        except Exception:
            if copy.has_begun:
                self._broken = EngineError("The last change of weights stopped half-way: publish again before use.")
                self._fail_all(self._broken)
            raise
        if copy.has_begun:
            self._broken = None
        self._scheduler.set_version(version, self.config.running, self.config.kv)
        if self._steps.cache is not None:
            self._resident.refresh(frozen=copy.is_whole)
        self._steps.renew(self._resident, is_tower_new=copy.is_whole or self.model.trains_tower)

    def _stats(self) -> Metrics:
        metrics = self._steps.pop_metrics()
        metrics.add("engine/busy_seconds", Sum.of(self._busy))
        metrics.merge(self._resident.pop_merge_metrics())
        self._busy = 0.0
        return metrics
