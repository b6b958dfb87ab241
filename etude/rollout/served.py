"""Rollout engines that are servers, as one: started or joined, watched, restarted, and asked from anywhere.

A thread of its own has an event loop on which all of it happens, so that the loop of a run, that of an endpoint and
plain threads may ask alike.

    consumes       requests; weights, by whoever carries them
    produces       completions
    waits for      servers: to start, to answer, to come back
    unblocked by   them, and by bounds: `restarts`, the silence of a connection, and `start_timeout`, also where
                   somebody waits and no server comes back
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from etude.errors import EngineError, EtudeError
from etude.observe import Last, Mean, Metrics, Sum, get_log, progress
from etude.protocols import Ids
from etude.records import Completion, SamplingParams
from etude.rollout.replica import Replica
from etude.rollout.request import Delta
from etude.rollout.rotation import Rotation
from etude.rollout.server import Server

__all__ = ["Served"]

NOBODY = "No server answers that new weights could be given to. Start them, and publish again."
BEAT = 1.0
"""Seconds between two looks at a server."""
CLOSING = 60.0
T = TypeVar("T")


class Served:
    """A `RolloutEngine` over servers. `load` and `each` are for whoever carries weights; all else is for anybody."""

    def __init__(
        self,
        replicas: Callable[[], Sequence[Replica]],
        *,
        name: str,
        most: int,
        line: int,
        console: Console | None = None,
    ) -> None:
        """Start or join all of them, and return once they are ready. `replicas` makes them, on their loop; of `most`
        and `line`, see `Rotation`."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="etude-servers", daemon=True)
        self._thread.start()
        self._watch: asyncio.Task[None] | None = None
        self.replicas: Sequence[Replica] = ()
        self._busy, self._since = 0.0, 0.0
        self._under_way = self._bringing = 0
        self._starts: dict[Server, int] = {}
        """How often each had been started when servers were withheld last."""
        try:
            begun = self._post(self._begin(replicas, most, line))
            with progress(f"starting {name}", None, console) as bar:
                while True:
                    try:
                        begun.result(BEAT)
                        break
                    except LateError:
                        if begun.done():
                            raise
                        bar.advance(0)
        except BaseException:
            self.close()
            raise

    async def _begin(self, replicas: Callable[[], Sequence[Replica]], most: int, line: int) -> None:
        self.replicas = replicas()
        self.rotation = Rotation(self.servers, most=most, line=line)
        try:
            async with asyncio.TaskGroup() as group:
                for replica in self.replicas:
                    group.create_task(replica.start())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        self._watch = asyncio.create_task(self._watched())
        self._watch.add_done_callback(self._unwatched)

    # -- what anybody may call ----------------------------------------------------------------------------------------

    @property
    def servers(self) -> Sequence[Server]:
        """Those behind it."""
        return [replica.server for replica in self.replicas]

    @property
    def version(self) -> int:
        """The newest policy version that any of them computes with."""
        return self.rotation.version

    async def generate(
        self, prompt: Ids, sampling: SamplingParams, *, begun: Callable[[], None] | None = None
    ) -> Completion:
        """Sample one continuation. Cancelling the wait aborts the request. `begun` is called on the servers' thread."""
        return await asyncio.wrap_future(self._post(self._generate(prompt, sampling, begun)))

    def generate_all(self, prompts: Sequence[Ids], samplings: Sequence[SamplingParams]) -> list[Completion]:
        """Sample a continuation of each prompt, and wait for all of them. Not for use on an event loop."""
        pairs = zip(prompts, samplings, strict=True)
        asked = [self._post(self._generate(prompt, sampling, None)) for prompt, sampling in pairs]
        try:
            return [future.result() for future in asked]
        finally:
            for future in asked:
                future.cancel()

    async def stream(self, prompt: Ids, sampling: SamplingParams) -> AsyncGenerator[Delta, None]:
        """The same, as it comes. Leaving the iteration aborts the request."""
        here = asyncio.get_running_loop()
        deltas: asyncio.Queue[Delta | None] = asyncio.Queue()

        def tell(delta: Delta | None) -> None:
            if not here.is_closed():
                here.call_soon_threadsafe(deltas.put_nowait, delta)

        asked = self._post(self._streamed(prompt, sampling, tell))
        asked.add_done_callback(lambda _: tell(None))
        try:
            while (delta := await deltas.get()) is not None:
                yield delta
            asked.result()
        finally:
            asked.cancel()

    async def abort(self) -> None:
        """End all that is under way at servers: each such call returns what it has, finished by `abort`."""
        await self.each(Server.abort)

    async def pause(self) -> None:
        """Stop between two tokens. Requests under way stay, and go on after `resume`. What a server misses of this and
        the next while it is away it does when it is back."""
        await self._have(paused=True)

    async def resume(self) -> None:
        """Go on with what is under way."""
        await self._have(paused=False)

    async def sleep(self) -> None:
        """Have them give their memory back. Nothing may be under way."""
        await self._have(asleep=True)

    async def wake(self) -> None:
        """Have them take their memory again."""
        await self._have(asleep=False)

    def stats(self) -> Metrics:
        """What was done since it was last asked, and what is under way."""
        return self._post(self._stats()).result()

    def close(self) -> None:
        """End what was started here; whoever still waits is told."""
        if self._loop.is_closed():
            return
        with suppress(EngineError):
            self._post(self._end()).result(CLOSING)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSING)
        if not self._thread.is_alive():
            self._loop.close()

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    # -- for whoever carries weights ----------------------------------------------------------------------------------

    async def each(self, do: Callable[[Server], Coroutine[Any, Any, T]]) -> list[T]:
        """Do this with every server that is there, all at once, on their loop."""
        return await asyncio.wrap_future(self._post(self._each(do)))

    def withhold(self, only: Server | None = None, *, drained: float | None = None) -> list[Server]:
        """Take every server that is there out of rotation, for whoever brings them weights, or one alone; returns them.
        Not for use on an event loop.

        drained: have what is under way end first, which may take so many seconds; a server where it does not is left
        out, until the next publish.
        """
        return self._post(self._withhold(only, drained)).result()

    def admit(self, servers: Mapping[Server, int | None], version: int) -> None:
        """Ask servers again that were withheld, of which each is said to hold weights of a version; None for one that
        stays out. `version` is the one that was published. Not for use on an event loop."""

        async def done() -> None:
            starts = {replica.server: replica.started for replica in self.replicas}
            same = [server for server in servers if starts[server] == self._starts[server]]
            for server in same:  # others hold what they began with
                holds = servers[server]
                if holds is not None:
                    server.holds(holds)
            if not servers or version in servers.values():
                self.rotation.wanted = version
            for replica in self.replicas:
                if not replica.server.up and replica.server.version != self.rotation.wanted:
                    replica.behind()
            self._bringing -= 1
            self.rotation.admit()
            for server in same:
                if servers[server] is None:  # whoever brought weights has ended what was under way, or could not
                    await server.cut()

        self._post(done()).result()

    def forsake(self, servers: Sequence[Server]) -> None:
        """End what is under way at servers that are out of rotation, as nobody knows what they compute with. Not for
        use on an event loop."""

        async def done() -> None:
            self._bringing -= 1
            await self._forsake(servers)

        self._post(done()).result()

    async def load(self, directory: Path, version: int) -> None:
        """Have every server compute with the weights in a directory, and start from it if it is started again. One that
        cannot is out of rotation; if none can, that is an error."""
        await asyncio.wrap_future(self._post(self._load(directory, version)))

    async def _load(self, directory: Path, version: int) -> None:
        there = [replica for replica in self.replicas if not replica.lost]
        up = sum(replica.server.up for replica in there)
        self._bringing += 1
        try:
            loads = (replica.load(directory, version) for replica in there)
            failed = [error for error in await asyncio.gather(*loads, return_exceptions=True) if error is not None]
        finally:
            self._bringing -= 1
        if failed and len(failed) >= up:
            raise failed[0]
        if not up and all(replica.joined for replica in there):
            raise EngineError(NOBODY)
        self.rotation.wanted = version
        self.rotation.admit()

    def renewed_by(self, renew: Callable[[Server], Coroutine[Any, Any, None]]) -> None:
        """Have a server that was started again brought to the newest weights by this, on the servers' loop."""
        for replica in self.replicas:
            replica.renew = renew

    async def _withhold(self, only: Server | None, drained: float | None) -> list[Server]:
        self._bringing += 1
        try:
            return await self._withheld(only, drained)
        except BaseException:
            self._bringing -= 1
            raise

    async def _withheld(self, only: Server | None, drained: float | None) -> list[Server]:
        there = [replica.server for replica in self.replicas if not replica.lost and replica.server.up]
        servers = [server for server in there if only in (None, server)]
        if not servers and all(replica.joined for replica in self.replicas):
            raise EngineError(NOBODY)
        self._starts = {replica.server: replica.started for replica in self.replicas}
        for server in servers:
            server.withdraw()
        if drained is None:
            return servers
        done = await asyncio.gather(*(server.drain(drained) for server in servers), return_exceptions=True)
        late = {server: error for server, error in zip(servers, done, strict=True) if error is not None}
        for server, error in late.items():
            get_log("rollout").warning("%s is out of rotation until the next publish: %s", server.url, error)
        await self._forsake(list(late))
        if late and len(late) == len(servers):
            raise next(iter(late.values()))
        return [server for server in servers if server not in late]

    async def _forsake(self, servers: Sequence[Server]) -> None:
        await asyncio.gather(*(server.drop() for server in servers))

    # -- on the servers' thread ---------------------------------------------------------------------------------------

    def _post(self, what: Coroutine[Any, Any, T]) -> Future[T]:
        if self._loop.is_closed():
            what.close()
            raise EngineError("The servers were closed: nothing can be asked of them any more.")
        return asyncio.run_coroutine_threadsafe(what, self._loop)

    async def _generate(self, prompt: Ids, sampling: SamplingParams, begun: Callable[[], None] | None) -> Completion:
        self._enter()
        try:
            return await self.rotation.generate(prompt, sampling, begun=begun)
        finally:
            self._exit()

    async def _streamed(self, prompt: Ids, sampling: SamplingParams, tell: Callable[[Delta], None]) -> None:
        self._enter()
        try:
            async for delta in self.rotation.stream(prompt, sampling):
                tell(delta)
        finally:
            self._exit()

    def _enter(self) -> None:
        if not self._under_way:
            self._since = time.perf_counter()
        self._under_way += 1

    def _exit(self) -> None:
        self._under_way -= 1
        if not self._under_way:
            self._busy += time.perf_counter() - self._since

    async def _each(self, do: Callable[[Server], Coroutine[Any, Any, T]]) -> list[T]:
        asked = (do(server) for server in self.servers if server.up)
        found = await asyncio.gather(*asked, return_exceptions=True)  # none is left half-way because of another
        self.rotation.admit()
        if failed := [error for error in found if isinstance(error, BaseException)]:
            raise failed[0]
        return [each for each in found if not isinstance(each, BaseException)]

    async def _have(self, *, paused: bool | None = None, asleep: bool | None = None) -> None:
        """Have every server be so, whose process runs; the others when they are back."""
        await asyncio.wrap_future(self._post(self._settled(paused, asleep)))

    async def _settled(self, paused: bool | None, asleep: bool | None) -> None:
        there = [replica for replica in self.replicas if not replica.lost]
        for replica in there:
            replica.have(paused, asleep)
        found = await asyncio.gather(*(each.settle() for each in there if each.runs), return_exceptions=True)
        if failed := [error for error in found if error is not None]:
            raise failed[0]

    async def _watched(self) -> None:
        """Look after each of them, side by side, until it is over."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._despair())
            for place, replica in enumerate(self.replicas):
                group.create_task(self._look_after(place, replica))

    def _unwatched(self, watch: asyncio.Task[None]) -> None:
        """Nobody looks after them any more. Where that was an error, whoever waits for one is told."""
        error = None if watch.cancelled() else watch.exception()
        if error is not None:
            self.rotation.fail(EngineError(f"The servers are not watched any more: {error!r}. Start the run again."))

    async def _look_after(self, place: int, replica: Replica) -> None:
        while not replica.lost:
            await asyncio.sleep(BEAT)
            with suppress(EtudeError, ValueError, KeyError):  # it may have said what makes no sense
                await replica.look(self._changed, busy=bool(self._bringing))
                if replica.server.up:
                    self.rotation.paces[place].see(await replica.server.figures())
                    self.rotation.admit()

    async def _despair(self) -> None:
        """Where somebody waits, and no server has been there to wait for in so long a time as one may take to start,
        those that there were count as lost."""
        since: float | None = None
        patience = max(replica.patience for replica in self.replicas)
        while since is None or time.monotonic() < since + patience:
            await asyncio.sleep(BEAT)
            here = (replica for replica in self.replicas if not replica.lost)
            comes = self._bringing or any(replica.coming or replica.asleep for replica in here)
            since = None if comes or not self.rotation.stuck else since or time.monotonic()
        for replica in (replica for replica in self.replicas if not replica.lost):
            replica.lost = f"{replica.absence()} That was so for {patience:g} s, while requests waited."
        self._changed()

    def _changed(self) -> None:
        """A server came or went."""
        lost = [replica.lost for replica in self.replicas]
        if all(lost):
            self.rotation.fail(EngineError(f"There is no server left. {' '.join(dict.fromkeys(lost))}"))
        self.rotation.admit()

    async def _stats(self) -> Metrics:
        now, servers = time.perf_counter(), self.servers
        if self._under_way:
            self._busy, self._since = self._busy + now - self._since, now
        metrics = Metrics(
            {
                "engine/prompt_tokens": Sum.of(sum(server.prompt_tokens for server in servers)),
                "engine/new_tokens": Sum.of(sum(server.new_tokens for server in servers)),
                "engine/finished": Sum.of(sum(server.finished for server in servers)),
                "engine/running": Last.of(sum(server.under_way for server in servers)),
                "engine/waiting": Last.of(self.rotation.waiting),
                "engine/at_once": Mean.over(sum(pace.limit for pace in self.rotation.paces), len(servers)),
                "engine/replicas": Last.of(sum(server.up for server in servers)),
                "engine/restarts": Last.of(sum(replica.started for replica in self.replicas)),
                "engine/resumed": Sum.of(self.rotation.resumed),
                "engine/begun_anew": Sum.of(self.rotation.restarted),
                "engine/busy_seconds": Sum.of(self._busy),
            }
        )
        for server in servers:
            server.prompt_tokens = server.new_tokens = server.finished = 0
        self.rotation.resumed = self.rotation.restarted = 0
        self._busy = 0.0
        return metrics

    async def _end(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if self.replicas:
            self.rotation.fail(EngineError("The servers were closed while this request was under way."))
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        await asyncio.gather(*(replica.close() for replica in self.replicas))
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
