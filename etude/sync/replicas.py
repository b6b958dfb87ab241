"""Publishing to many replicas: all of them get the same weights, and a replica that fails stops serving.

    consumes       the trainer's weights, and replicas that serve the previous version
    produces       replicas that compute with exactly these weights, with their version set
    waits for      running requests, if they are to end first; each reply of a server, at most `timeout`
    unblocked by   the slowest replica, or its failure

The first bucket is built before any replica pauses, so a failure to get the weights changes nothing.
After that, replicas load one bucket while the next is built. A replica that fails now is taken out of rotation, because
its weights may be a mixture. The others go on. A later publish that sends all weights restores the replica. If no
replica is left, the publish fails with every replica's error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor

from etude.errors import ConfigError, EngineError, EtudeError
from etude.observe import Metrics, Sum, get_logger
from etude.protocols import RunningPolicy
from etude.sync.transport import Bucket, WeightReceiver, WeightTransport
from etude.sync.weights import WeightManifest

LOG = get_logger("sync")
CLEANUP_TIMEOUT = 10.0
"""Seconds for each of the last requests to a server that failed."""


class ReplicaWeightSync:
    """Sends weights to servers.

    After a failure a server has its old weights, or is out of service. It never has a mixture.
    """

    def __init__(
        self,
        servers: Sequence[WeightReceiver],
        transport: WeightTransport,
        *,
        running: RunningPolicy = "continue",
        timeout: float = 300.0,
    ) -> None:
        if not servers:
            raise ConfigError("There is no engine to publish to. Start one, or name one that runs.")
        self._servers = tuple(servers)
        self._transport = transport
        self._running = running
        self._timeout = timeout
        self._plan = WeightManifest()
        self._last_version: int | None = None  # the version that was published last
        self._publish_lock = asyncio.Lock()
        self.failed: dict[str, str] = {}
        """The servers that failed in the last publish, by URL, with the reason."""

    def close(self) -> None:
        """Release the transport's resources."""
        self._transport.close()

    async def publish(
        self,
        weights: Iterable[tuple[str, Tensor]],
        version: int,
        servers: Sequence[WeightReceiver] | None = None,
        *,
        restarted: Sequence[WeightReceiver] = (),
        partial: bool = False,
    ) -> Metrics:
        """Update replicas to these weights, by default all of them.

        Return the bytes sent, the time taken, the part of it in which sampling was paused, and the number of replicas
        that failed.
        restarted: servers that were started again; they have no connection and none of the earlier weights. partial:
        the weights leave out some that all these servers have.
        """
        async with self._publish_lock:
            servers = self._servers if servers is None else tuple(servers)
            for server in restarted:
                self._transport.disconnect(server)
            begun = time.perf_counter()
            self.failed = {}
            last = self._last_version
            self._last_version = None  # stays unknown unless this publish succeeds
            any_behind = any(server.version != last for server in servers)
            buckets = self._transport.buckets(self._plan.check_weights(weights, partial=partial), any_behind)
            first = [await anext(buckets, None)]
            publish_round = _PublishRound(servers, self._transport, self._timeout)
            self.failed = publish_round.failed
            paused = time.perf_counter()
            try:
                await publish_round.run_step(self._pause_server)
                await publish_round.run_step(lambda server: server.backend.begin_update(server))
                written = await self._send_buckets(publish_round, first, buckets)
                await publish_round.run_step(lambda server: server.backend.finish_update(server))
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
        """Take a server out of rotation, connect to it, and pause it as configured."""
        server.withdraw()
        await self._transport.connect(server)
        if self._running == "finish":
            await server.drain()
        elif self._running == "restart":
            await server.interrupt()
        await server.pause_for_update()

    async def _send_buckets(
        self, publish_round: _PublishRound, first: list[Bucket | None], buckets: AsyncGenerator[Bucket, None]
    ) -> int:
        """Have all servers load every bucket, building the next one meanwhile; return the bytes of all buckets.

        first: a list with the first bucket. It is popped, so that at most two buckets exist.
        """
        bucket = first.pop()
        assert bucket is not None, "a manifest refuses to publish nothing"
        written = 0
        while bucket is not None:
            written += sum(piece.nbytes for piece in bucket.pieces)
            fetching = asyncio.create_task(publish_round.send_bucket(bucket))
            try:
                bucket = await anext(buckets, None)
                await fetching
            finally:
                fetching.cancel()
                with suppress(asyncio.CancelledError, EtudeError):
                    await fetching
        return written


class _PublishRound:
    """One running publish: the servers still active, and those that failed, with the reason."""

    def __init__(self, servers: Sequence[WeightReceiver], transport: WeightTransport, timeout: float) -> None:
        self.active = list(servers)
        self.failed: dict[str, str] = {}
        self._transport = transport
        self._timeout = timeout

    async def run_step(self, step: Callable[[WeightReceiver], Coroutine[Any, Any, None]]) -> None:
        """Run a step for all active servers; exclude those that fail. Raise an error if none is left."""
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
                "No engine got the new weights, and all are out of rotation. "
                + " ".join(f"{url}: {message}" for url, message in self.failed.items())
            )

    async def send_bucket(self, bucket: Bucket) -> None:
        """Have all active servers load a bucket; a bucket without pieces means that nothing changed."""
        if not bucket.pieces:
            return

        async def step(server: WeightReceiver) -> None:
            if bucket.send is None:
                await server.backend.load_bucket(server, bucket)
                return
            try:
                async with asyncio.TaskGroup() as both:
                    both.create_task(server.backend.load_bucket(server, bucket))
                    both.create_task(bucket.send(server))
            except* (EtudeError, OSError, RuntimeError) as ends:  # the server, the sender or both may fail
                raise EngineError(" ".join(str(error) for error in ends.exceptions)) from ends

        await self.run_step(step)

    async def fail_all(self, error: BaseException) -> None:
        """Exclude all active servers: their weights are unknown."""
        why = EngineError(f"The publish was given up half-way: {str(error) or type(error).__name__}")
        await asyncio.gather(*(self._exclude(server, why) for server in list(self.active)))

    async def _with_timeout(self, server: WeightReceiver, step: Coroutine[Any, Any, None]) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                await step
        except TimeoutError as error:
            raise EngineError(
                f"{server.url} took more than {self._timeout:g} s for one step of the update. Check that it is alive. "
                f"If it is only slow, raise `timeout`."
            ) from error

    async def _exclude(self, server: WeightReceiver, error: BaseException) -> None:
        """Take a server out of rotation and end its running requests, so that none continues with mixed weights.

        A server that does not answer stays paused.
        """
        self.active.remove(server)
        self.failed[server.url] = str(error) or type(error).__name__
        server.withdraw()
        self._transport.disconnect(server)
        with suppress(EtudeError, OSError, TimeoutError):
            for last in (server.abort, server.resume):
                async with asyncio.timeout(CLEANUP_TIMEOUT):
                    await last()
