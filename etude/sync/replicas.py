"""Publishing to many replicas: all of them come to the same weights, and one that fails serves nobody.

    consumes       the trainer's weights, and replicas that serve the version before
    produces       replicas that compute with exactly these, stamped with their version
    waits for      requests under way, where they are to finish first; each answer of a server, at most `timeout`
    unblocked by   the slowest replica, or its failure

The first parcel is made before any replica is asked to stop, so weights that cannot be had leave everything as it was.
From then on replicas fetch one parcel while the next is made. A replica that fails from there on is withdrawn: its
weights may be a mixture. The others go on, and a later publish, which is always whole, brings it back. If none is left
the publish fails and says what each of them said.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any, Literal

from torch import Tensor

from etude.errors import ConfigError, EngineError, EtudeError
from etude.observe import Metrics, Sum, get_logger
from etude.sync.transport import Bucket, BucketStream, WeightReceiver, WeightTransport
from etude.sync.weight_update_endpoints import get_weight_update_endpoints
from etude.sync.weights import WeightManifest

__all__ = ["InFlightPolicy", "ReplicaWeightSync"]

InFlightPolicy = Literal["finish", "continue"]
"""What becomes of requests that are under way."""

LOG = get_logger("sync")
CLEANUP_TIMEOUT = 10.0
"""Seconds for each of the last things that are asked of a server that failed."""


class ReplicaWeightSync:
    """A `WeightSync` to servers."""

    def __init__(
        self,
        servers: Sequence[WeightReceiver],
        transport: WeightTransport,
        *,
        running: InFlightPolicy = "continue",
        timeout: float = 300.0,
    ) -> None:
        if not servers:
            raise ConfigError("There is no engine to publish to. Start one, or name one that runs.")
        for server in servers:
            get_weight_update_endpoints(server)
        self._servers = tuple(servers)
        self._transport = transport
        self._running = running
        self._timeout = timeout
        self._plan = WeightManifest()
        self._last_version: int | None = None  # the version that was published last
        self._publish_lock = asyncio.Lock()
        self.failed: dict[str, str] = {}
        """Who fell out of the publish that was last, by URL, and why."""

    def close(self) -> None:
        """Let go of what the carrier holds."""
        self._transport.close()

    async def publish(
        self,
        weights: Iterable[tuple[str, Tensor]],
        version: int,
        servers: Sequence[WeightReceiver] | None = None,
        *,
        restarted: Sequence[WeightReceiver] = (),
    ) -> Metrics:
        """Bring replicas to these weights, by default all of them; returns the bytes that travelled, the time it took,
        for how much of it nothing was sampled, and how many replicas were withdrawn.

        anew: those that were started again, and know nothing of what was carried to them before.
        """
        async with self._publish_lock:
            targets = self._servers if servers is None else tuple(servers)
            for server in restarted:
                self._transport.disconnect(server)
            return await self._publish(weights, version, targets)

    async def _publish(
        self, weights: Iterable[tuple[str, Tensor]], version: int, servers: tuple[WeightReceiver, ...]
    ) -> Metrics:
        begun = time.perf_counter()
        self.failed = {}
        last, self._last_version = self._last_version, None  # stays unknown unless this publish succeeds
        any_behind = any(server.version != last for server in servers)
        buckets = _PrefetchedBuckets(self._transport.buckets(self._plan.check_weights(weights), any_behind))
        await buckets.prefetch()
        publish_round = _PublishRound(servers, self._transport, self._timeout)
        self.failed = publish_round.failed
        paused = time.perf_counter()
        try:
            await publish_round.run_step(self._pause_server)
            await publish_round.run_step(lambda server: get_weight_update_endpoints(server).begin_update(server))
            written = await self._send_buckets(publish_round, buckets)
            await publish_round.run_step(lambda server: get_weight_update_endpoints(server).finish_update(server))
            await publish_round.run_step(lambda server: server.set_version(version))
            await publish_round.run_step(lambda server: server.resume())
        except BaseException as error:
            await publish_round.fail_all(error)
            raise
        ended = time.perf_counter()
        self._last_version = version
        for url, message in publish_round.failed.items():
            LOG.warning("The replica %s is out of rotation until the next publish: %s", url, message)
        return Metrics(
            {
                "publish_bytes": Sum.of(written),
                "publish_ms": Sum.of(1e3 * (ended - begun)),
                "publish_pause_ms": Sum.of(1e3 * (ended - paused)),
                "publish_failed_replicas": Sum.of(len(publish_round.failed)),
            }
        )

    async def _pause_server(self, server: WeightReceiver) -> None:
        """Have it stop as configured, and be ready to bring it something."""
        server.withdraw()
        await self._transport.connect(server)
        if self._running == "finish":
            await server.drain()
        await get_weight_update_endpoints(server).pause(server)

    async def _send_buckets(self, publish_round: _PublishRound, buckets: BucketStream) -> int:
        """Have all of them fetch every parcel, the next of which is made meanwhile; returns the bytes of them all."""
        bucket = await buckets.next()
        written = 0
        while bucket is not None:
            written += sum(piece.nbytes for piece in bucket.pieces)
            fetching = asyncio.create_task(publish_round.send_bucket(bucket))
            try:
                bucket = await buckets.next()
                await fetching
            finally:
                fetching.cancel()
                with suppress(asyncio.CancelledError, EtudeError):
                    await fetching
        return written


class _PrefetchedBuckets:
    """Parcels, the first of which is made before anybody asks for it. It is held no longer than until then: beside the
    one that is fetched and the one that is made there is to be no third."""

    def __init__(self, buckets: BucketStream) -> None:
        self._buckets = buckets
        self._first: Bucket | None = None

    async def prefetch(self) -> None:
        """Make the first."""
        self._first = await self._buckets.next()
        assert self._first is not None, "a plan refuses to publish nothing"

    async def next(self) -> Bucket | None:
        """The next one; none at the end."""
        first, self._first = self._first, None
        return first or await self._buckets.next()


class _PublishRound:
    """One publish under way: who still goes, and who fell out and why."""

    def __init__(self, servers: tuple[WeightReceiver, ...], transport: WeightTransport, timeout: float) -> None:
        self.active = list(servers)
        self.failed: dict[str, str] = {}
        self._transport = transport
        self._timeout = timeout

    async def run_step(self, step: Callable[[WeightReceiver], Coroutine[Any, Any, None]]) -> None:
        """Take a step with all that still go; who fails falls out. If none is left that is an error."""
        going = list(self.active)
        done = await asyncio.gather(
            *(self._with_timeout(server, step(server)) for server in going), return_exceptions=True
        )
        failed = [(server, error) for server, error in zip(going, done, strict=True) if error is not None]
        for _, error in failed:
            if not isinstance(error, EtudeError | OSError | RuntimeError):
                raise error
        await asyncio.gather(*(self._exclude(server, error) for server, error in failed))
        if not self.active:
            raise EngineError(
                "No engine was brought to the new weights, and all are out of rotation. "
                + " ".join(f"{url}: {message}" for url, message in self.failed.items())
            )

    async def send_bucket(self, bucket: Bucket) -> None:
        """Have all that still go fetch a parcel; one with nothing in it holds what did not change."""
        if not bucket.pieces:
            return

        async def step(server: WeightReceiver) -> None:
            if bucket.send is None:
                await get_weight_update_endpoints(server).load(server, bucket)
                return
            try:
                async with asyncio.TaskGroup() as both:
                    both.create_task(get_weight_update_endpoints(server).load(server, bucket))
                    both.create_task(bucket.send(server))
            except* (EtudeError, OSError, RuntimeError) as ends:  # either end may say what went wrong, or both
                raise EngineError(" ".join(str(error) for error in ends.exceptions)) from ends

        await self.run_step(step)

    async def fail_all(self, error: BaseException) -> None:
        """Nobody knows what these compute with."""
        why = EngineError(f"The publish was given up half-way: {str(error) or type(error).__name__}")
        await asyncio.gather(*(self._exclude(server, why) for server in list(self.active)))

    async def _with_timeout(self, server: WeightReceiver, step: Coroutine[Any, Any, None]) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                await step
        except TimeoutError as error:
            raise EngineError(
                f"{server.url} took more than {self._timeout:g} s for a part of the update. Is it alive? If it is "
                f"only slow, raise `timeout`."
            ) from error

    async def _exclude(self, server: WeightReceiver, error: BaseException) -> None:
        """Leave it out of rotation. What is under way there ends, before it could go on with a mixture; where that was
        not heard, it stays stopped."""
        self.active.remove(server)
        self.failed[server.url] = str(error) or type(error).__name__
        server.withdraw()
        self._transport.disconnect(server)
        with suppress(EtudeError, OSError, TimeoutError):
            for last in (server.abort, server.resume):
                async with asyncio.timeout(CLEANUP_TIMEOUT):
                    await last()
