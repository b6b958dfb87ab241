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
from etude.observe import Metrics, Sum, get_log
from etude.sync.dialects import dialect
from etude.sync.plan import Plan
from etude.sync.server import Carrier, Parcel, Parcels, Server

__all__ = ["Fleet", "Running"]

Running = Literal["finish", "continue"]
"""What becomes of requests that are under way."""

LOG = get_log("sync")
LAST = 10.0
"""Seconds for each of the last things that are asked of a server that failed."""


class Fleet:
    """A `WeightCarrier` to servers."""

    def __init__(
        self, servers: Sequence[Server], carrier: Carrier, *, running: Running = "continue", timeout: float = 300.0
    ) -> None:
        if not servers:
            raise ConfigError("There is no engine to publish to. Start one, or name one that runs.")
        for server in servers:
            dialect(server)
        self._servers = tuple(servers)
        self._carrier = carrier
        self._running = running
        self._timeout = timeout
        self._plan = Plan()
        self._last: int | None = None  # the version that was published last
        self._one = asyncio.Lock()
        self.failed: dict[str, str] = {}
        """Who fell out of the publish that was last, by URL, and why."""

    def close(self) -> None:
        """Let go of what the carrier holds."""
        self._carrier.close()

    async def publish(
        self,
        weights: Iterable[tuple[str, Tensor]],
        version: int,
        servers: Sequence[Server] | None = None,
        *,
        anew: Sequence[Server] = (),
    ) -> Metrics:
        """Bring replicas to these weights, by default all of them; returns the bytes that travelled, the time it took,
        for how much of it nothing was sampled, and how many replicas were withdrawn.

        anew: those that were started again, and know nothing of what was carried to them before.
        """
        async with self._one:
            to = self._servers if servers is None else tuple(servers)
            for server in anew:
                self._carrier.leave(server)
            return await self._publish(weights, version, to)

    async def _publish(
        self, weights: Iterable[tuple[str, Tensor]], version: int, servers: tuple[Server, ...]
    ) -> Metrics:
        begun = time.perf_counter()
        self.failed = {}
        last, self._last = self._last, None  # unless this succeeds nobody is known to have what was carried last
        behind = any(server.version != last for server in servers)
        parcels = _Ahead(self._carrier.parcels(self._plan.checked(weights), behind))
        await parcels.begin()
        trip = _Trip(servers, self._carrier, self._timeout)
        self.failed = trip.failed
        held = time.perf_counter()
        try:
            await trip.each(self._hold)
            await trip.each(lambda server: dialect(server).begin(server))
            written = await self._carried(trip, parcels)
            await trip.each(lambda server: dialect(server).finish(server))
            await trip.each(lambda server: server.stamped(version))
            await trip.each(lambda server: server.resume())
        except BaseException as error:
            await trip.give_up(error)
            raise
        ended = time.perf_counter()
        self._last = version
        for url, said in trip.failed.items():
            LOG.warning("The replica %s is out of rotation until the next publish: %s", url, said)
        return Metrics(
            {
                "publish_bytes": Sum.of(written),
                "publish_ms": Sum.of(1e3 * (ended - begun)),
                "publish_hold_ms": Sum.of(1e3 * (ended - held)),
                "publish_withdrawn": Sum.of(len(trip.failed)),
            }
        )

    async def _hold(self, server: Server) -> None:
        """Have it stop as configured, and be ready to bring it something."""
        server.withdraw()
        await self._carrier.join(server)
        if self._running == "finish":
            await server.drain()
        await dialect(server).hold(server)

    async def _carried(self, trip: _Trip, parcels: Parcels) -> int:
        """Have all of them fetch every parcel, the next of which is made meanwhile; returns the bytes of them all."""
        parcel = await parcels.next()
        written = 0
        while parcel is not None:
            written += sum(piece.nbytes for piece in parcel.pieces)
            fetching = asyncio.create_task(trip.fetch(parcel))
            try:
                parcel = await parcels.next()
                await fetching
            finally:
                fetching.cancel()
                with suppress(asyncio.CancelledError, EtudeError):
                    await fetching
        return written


class _Ahead:
    """Parcels, the first of which is made before anybody asks for it. It is held no longer than until then: beside the
    one that is fetched and the one that is made there is to be no third."""

    def __init__(self, parcels: Parcels) -> None:
        self._parcels = parcels
        self._first: Parcel | None = None

    async def begin(self) -> None:
        """Make the first."""
        self._first = await self._parcels.next()
        assert self._first is not None, "a plan refuses to publish nothing"

    async def next(self) -> Parcel | None:
        """The next one; none at the end."""
        first, self._first = self._first, None
        return first or await self._parcels.next()


class _Trip:
    """One publish under way: who still goes, and who fell out and why."""

    def __init__(self, servers: tuple[Server, ...], carrier: Carrier, timeout: float) -> None:
        self.going = list(servers)
        self.failed: dict[str, str] = {}
        self._carrier = carrier
        self._timeout = timeout

    async def each(self, step: Callable[[Server], Coroutine[Any, Any, None]]) -> None:
        """Take a step with all that still go; who fails falls out. If none is left that is an error."""
        going = list(self.going)
        done = await asyncio.gather(*(self._bounded(server, step(server)) for server in going), return_exceptions=True)
        failed = [(server, error) for server, error in zip(going, done, strict=True) if error is not None]
        for _, error in failed:
            if not isinstance(error, EtudeError | OSError | RuntimeError):
                raise error
        await asyncio.gather(*(self._fell_out(server, error) for server, error in failed))
        if not self.going:
            raise EngineError(
                "No engine was brought to the new weights, and all are out of rotation. "
                + " ".join(f"{url}: {said}" for url, said in self.failed.items())
            )

    async def fetch(self, parcel: Parcel) -> None:
        """Have all that still go fetch a parcel; one with nothing in it holds what did not change."""
        if not parcel.pieces:
            return

        async def step(server: Server) -> None:
            if parcel.sent is None:
                await dialect(server).load(server, parcel)
                return
            try:
                async with asyncio.TaskGroup() as both:
                    both.create_task(dialect(server).load(server, parcel))
                    both.create_task(parcel.sent(server))
            except* (EtudeError, OSError, RuntimeError) as ends:  # either end may say what went wrong, or both
                raise EngineError(" ".join(str(error) for error in ends.exceptions)) from ends

        await self.each(step)

    async def give_up(self, error: BaseException) -> None:
        """Nobody knows what these compute with."""
        why = EngineError(f"The publish was given up half-way: {str(error) or type(error).__name__}")
        await asyncio.gather(*(self._fell_out(server, why) for server in list(self.going)))

    async def _bounded(self, server: Server, step: Coroutine[Any, Any, None]) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                await step
        except TimeoutError as error:
            raise EngineError(
                f"{server.url} took more than {self._timeout:g} s for a part of the update. Is it alive? If it is "
                f"only slow, raise `timeout`."
            ) from error

    async def _fell_out(self, server: Server, error: BaseException) -> None:
        """Leave it out of rotation. What is under way there ends, before it could go on with a mixture; where that was
        not heard, it stays stopped."""
        self.going.remove(server)
        self.failed[server.url] = str(error) or type(error).__name__
        server.withdraw()
        self._carrier.leave(server)
        with suppress(EtudeError, OSError, TimeoutError):
            for last in (server.abort, server.resume):
                async with asyncio.timeout(LAST):
                    await last()
