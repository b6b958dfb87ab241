"""A router over servers that share the requests and replace each other.

All requests wait in one queue until a server has a free slot. `AdaptiveConcurrencyLimit` decides how many slots a
server has. A request then goes where the beginning of its prompt went (`Router`), or to another server if that one is
full. If its server breaks off, another server with the same weights continues from the tokens that are there. With
other weights, or if it is not known which weights drew them, the answer begins anew. A streamed answer is never begun
anew: its reader has the beginning. An answer that new weights restarted `MAX_RESTARTS` times keeps its tokens too.
An answer that is held to a grammar is never continued: it begins anew, and fails where that is not possible.
Requests go only to servers that are up, not withdrawn, and of the newest version.

Servers that hold adapters answer by the version that a request names, or else by the last one that was published. So a
server may take the next adapter while it answers. The adapter is used once all servers in rotation have it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress

from etude.errors import EngineError
from etude.images import PromptImages
from etude.observe import Last, Mean, Metric, Sum, get_logger
from etude.protocols import Ids
from etude.records import Completion, PromptScores, SamplingParams
from etude.rollout.partial_completion import PartialCompletion
from etude.rollout.request import MAX_RESTARTS, Delta
from etude.rollout.router import Router, prompt_keys
from etude.rollout.server_engine import RequestWithdrawnError, ServerEngine, StreamInterruptedError
from etude.rollout.server_load import AdaptiveConcurrencyLimit, ServerLoad, SlotUsage

MAX_TRIES = 4
"""The most servers that are tried for one answer. After that it fails with the last error."""


class FailoverRouter(Router):
    """A `TokenGenerator` over servers. All requests come from one event loop."""

    def __init__(self, servers: Sequence[ServerEngine], *, max_num_seqs: int | None, max_waiting: int) -> None:
        """max_num_seqs: the most requests that one server has at once; with None its load decides. max_waiting: the
        most requests in the queue."""
        super().__init__(servers)
        self.servers = servers
        self.keeps_versions = any(server.backend.adapters for server in servers)
        """True if servers hold an adapter for each version that a request may name."""
        self.limits = [AdaptiveConcurrencyLimit(max_num_seqs) for _ in servers]
        self.failure: EngineError | None = None
        """The reason that there will be no more server; None while there may be one."""
        self.resumed = self.restarted = 0
        """The numbers of answers that another server continued, and that were begun anew."""
        self.published_version = 0
        """The version that was published last. A server that holds an older one gets no requests."""
        self._max_waiting = max_waiting
        self._queue: deque[asyncio.Future[None]] = deque()
        self._slots_taken = 0
        self._usage = SlotUsage()

    @property
    def version(self) -> int:
        """The newest version that was published to the servers."""
        if self.keeps_versions:
            return self.published_version
        return max(self.published_version, *(server.version for server in self.servers))

    @property
    def waiting(self) -> int:
        """The number of requests in the queue."""
        return len(self._queue)

    @property
    def is_stuck(self) -> bool:
        """True if requests wait and no server accepts any."""
        return bool(self._queue) and not any(map(self.accepts_requests, range(len(self.servers))))

    async def generate(
        self,
        prompt: Ids,
        sampling: SamplingParams,
        *,
        images: PromptImages | None = None,
        on_start: Callable[[], None] | None = None,
    ) -> Completion:
        completion: Completion | None = None
        partial = self._begin_completion(prompt, sampling, images, on_start)
        async with aclosing(self._stream_with_failover(partial, streaming=False)) as deltas:
            async for delta in deltas:
                completion = delta.completion
        assert completion is not None, "an answer that does not end whole is an error"
        return completion

    async def stream(
        self, prompt: Ids, sampling: SamplingParams, *, images: PromptImages | None = None
    ) -> AsyncGenerator[Delta, None]:
        """Do the same, and yield the answer as it comes."""
        partial = self._begin_completion(prompt, sampling, images)
        async with aclosing(self._stream_with_failover(partial, streaming=True)) as deltas:
            async for delta in deltas:
                yield delta

    async def score(self, prompt: Ids, top: int) -> PromptScores:
        """Have a server score a prompt. No other is asked if it fails: the caller may ask again."""
        async with self._hold_slot(retry=False):
            with self._choose_engine(prompt) as engine:
                return await self.servers[engine].score(prompt, top)

    def admit_waiting(self) -> None:
        """Give free slots to waiting requests. Call this when a server came, went, or got more slots."""
        while self._queue and (self.failure is not None or self._has_room()):
            future = self._queue.popleft()
            if not future.done():
                self._slots_taken += 1
                future.set_result(None)

    def report_load(self, engine: int, load: ServerLoad) -> None:
        """Adapt the number of requests that a server gets to its load."""
        limit = self.limits[engine]
        before = limit.limit
        limit.update(load)
        if limit.limit != before:
            message = "The server at %s gets at most %d requests at once now, %d before: %s."
            level = logging.INFO if limit.limit < before else logging.DEBUG
            get_logger("rollout").log(level, message, self.servers[engine].url, limit.limit, before, limit.reason)
        self._count_slots()
        self.admit_waiting()

    def pop_metrics(self) -> dict[str, Metric]:
        """Return the metrics of requests and slots since the last call."""
        metrics: dict[str, Metric] = {
            "engine/waiting": Last.of(self.waiting),
            "engine/concurrency_limit": Mean.over(sum(limit.limit for limit in self.limits), len(self.servers)),
            "engine/requests_resumed": Sum.of(self.resumed),
            "engine/requests_restarted": Sum.of(self.restarted),
        }
        self.resumed = self.restarted = 0
        return metrics | self._usage.pop_metrics(self._max_waiting)

    def fail(self, failure: EngineError) -> None:
        """Fail all requests from now on: there will be no more server."""
        self.failure = failure
        self.admit_waiting()

    def expect_preemptions(self) -> None:
        """Record that a publish has preempted running answers, so that servers do not count as overloaded."""
        for limit in self.limits:
            limit.on_publish()

    def accepts_requests(self, engine: int) -> bool:
        """Return True if this server takes requests at all."""
        server = self.servers[engine]
        return server.is_up and not server.withdrawn and server.version >= self.version

    def _has_capacity(self, engine: int) -> bool:
        return self.accepts_requests(engine) and self._load[engine] < self.limits[engine].limit

    @contextmanager
    def _choose_engine(self, keys: Ids) -> Iterator[int]:
        try:
            with super()._choose_engine(keys) as engine:
                self._count_slots()
                yield engine
        finally:
            self._count_slots()

    def _count_slots(self) -> None:
        accepting = filter(self.accepts_requests, range(len(self.servers)))
        self._usage.count(sum(self._load), sum(self.limits[engine].limit for engine in accepting))

    def _has_room(self) -> bool:
        engines = [engine for engine in range(len(self.servers)) if self.accepts_requests(engine)]
        free = sum(max(0, self.limits[engine].limit - self._load[engine]) for engine in engines)
        return self._slots_taken - sum(self._load) < free  # some admitted requests have not reached a server yet

    def _begin_completion(
        self,
        prompt: Ids,
        sampling: SamplingParams,
        images: PromptImages | None,
        on_start: Callable[[], None] | None = None,
    ) -> PartialCompletion:
        server = next((server for server in self.servers if server.is_up), self.servers[0])
        return server.begin_completion(prompt, sampling, images, on_start)

    async def _stream_with_failover(
        self, partial: PartialCompletion, *, streaming: bool
    ) -> AsyncGenerator[Delta, None]:
        """Yield the answer as it comes. streaming: a reader has the beginning, so the answer cannot begin anew."""
        is_bound = partial.sampling.grammar is not None  # no server goes on in the middle of a grammar
        partial.is_streamed = streaming
        failures = withdrawals = 0
        retry = False
        while True:
            async with self._hold_slot(retry=retry):
                with self._choose_engine(prompt_keys(partial.prompt, partial.images)) as engine:
                    server = self.servers[engine]
                    if self.keeps_versions and partial.kept_version is None:
                        partial.kept_version = self.version
                    keeps_tokens = streaming or (withdrawals > MAX_RESTARTS and not is_bound)
                    if not keeps_tokens and (_has_other_weights(partial, server) or (is_bound and partial.ids)):
                        partial.restart()
                        self.restarted += 1
                    elif retry and partial.ids:
                        self.resumed += 1
                    try:
                        async with aclosing(server.continue_completion(partial)) as deltas:
                            async for delta in deltas:
                                yield delta
                        return
                    except StreamInterruptedError as error:
                        if (keeps_tokens or not partial.version_uncertain) and partial.finish_if_complete():
                            yield await partial.next_delta()
                            return
                        is_withdrawn = isinstance(error, RequestWithdrawnError)
                        withdrawals += is_withdrawn and bool(partial.ids)
                        if is_bound and partial.ids and (streaming or withdrawals > MAX_RESTARTS):
                            raise
                        retry = True
                        if is_withdrawn:
                            continue
                        failures += 1
                        if failures == MAX_TRIES:
                            raise
                        self._mark_down(server, error, len(partial.ids))

    def _mark_down(self, server: ServerEngine, error: StreamInterruptedError, num_tokens: int) -> None:
        """Send this server no more requests until it is found healthy."""
        was_up = server.is_up
        server.is_up = False
        message = "%s Its answers continue on another server, or once it is back; this one has %d tokens."
        get_logger("rollout").log(logging.WARNING if was_up else logging.DEBUG, message, error, num_tokens)

    @asynccontextmanager
    async def _hold_slot(self, *, retry: bool) -> AsyncIterator[None]:
        """Hold one of the servers' slots. retry: the answer was begun; it is never refused, and waits before the
        others."""
        if self._queue or not self._has_room():
            if not retry and self.failure is None and len(self._queue) >= self._max_waiting:
                self._usage.refused += 1
                raise EngineError(
                    f"{len(self._queue)} requests wait for a server already, which is the limit. Send fewer at "
                    f"once, or raise `rollout.max_waiting`."
                )
            await self._wait_for_slot(at_front=retry, holds_slot=False)
        else:
            self._slots_taken += 1
        try:
            while self.failure is None and not any(map(self._has_capacity, range(len(self.servers)))):
                self._slots_taken -= 1  # the last server went, or got fewer slots, since this request was admitted
                await self._wait_for_slot(at_front=True, holds_slot=True)
            if self.failure is not None:
                raise self.failure
            yield
        finally:
            self._slots_taken -= 1
            self.admit_waiting()

    async def _wait_for_slot(self, *, at_front: bool, holds_slot: bool) -> None:
        """Wait in the queue for a slot. holds_slot: the caller's cleanup gives back a slot, which it does not have
        while it waits."""
        future = asyncio.get_running_loop().create_future()
        (self._queue.appendleft if at_front else self._queue.append)(future)
        self.admit_waiting()
        try:
            await future
        except asyncio.CancelledError:
            if future.cancelled():
                with suppress(ValueError):
                    self._queue.remove(future)
                if holds_slot:
                    self._slots_taken += 1
            elif not holds_slot:
                self._slots_taken -= 1
                self.admit_waiting()
            raise


def _has_other_weights(partial: PartialCompletion, server: ServerEngine) -> bool:
    """Return True if other weights than the server's drew tokens of the answer, or may have."""
    if partial.kept_version is not None:
        return False
    return partial.version_uncertain or partial.version not in (None, server.version)
