"""A pool of server engines: started or joined, watched, restarted, and usable from any thread.

A separate thread runs the event loop of all servers. So the loop of a run, that of an endpoint and plain threads can
use the pool alike.

    consumes       requests; weights, from the weight sender
    produces       completions
    waits for      servers: to start, to answer, to come back
    unblocked by   the servers, and bounds: `restarts`, the read timeout of a connection, and `start_timeout`. The last
                   one also bounds how long requests and new weights wait while no server comes back
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from etude.errors import EngineError, EtudeError
from etude.images import PromptImages
from etude.observe import Last, Metrics, Sum, get_logger, progress
from etude.protocols import Ids, RunningPolicy
from etude.records import Completion, PromptScores, SamplingParams
from etude.rollout.failover_router import FailoverRouter
from etude.rollout.replica import NO_SERVER_UP, Replica, wait_for_external_servers
from etude.rollout.request import Delta
from etude.rollout.server_client import NONSENSE
from etude.rollout.server_engine import ServerEngine
from etude.rollout.server_load import BusyTime
from etude.running_time import EventLoop, running_time

CHECK_INTERVAL = 1.0
"""Seconds between two checks of a server."""
CLOSE_TIMEOUT = 60.0
T = TypeVar("T")


class ServerPool:
    """An inference engine over servers. `load` and the methods below it are for the weight sender; all others for any
    caller."""

    def __init__(
        self,
        replicas: Callable[[], Sequence[Replica]],
        *,
        name: str,
        max_num_seqs: int | None,
        max_waiting: int,
        console: Console | None = None,
    ) -> None:
        """Start or join all servers, and return once they are ready.

        `replicas` creates them, on their loop. See `FailoverRouter` for `max_num_seqs` and `max_waiting`.
        """
        self._loop = EventLoop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="etude-servers", daemon=True)
        self._thread.start()
        self._watch: asyncio.Task[None] | None = None
        self.replicas: Sequence[Replica] = ()
        self._busy = BusyTime()
        self._publishing = 0
        self._restart_counts: dict[ServerEngine, int] = {}
        """The restarts of each server when servers were withdrawn last."""
        try:
            started = self._submit(self._start(replicas, max_num_seqs, max_waiting))
            with progress(f"starting {name}", None, console) as bar:
                while True:
                    try:
                        started.result(CHECK_INTERVAL)
                        break
                    except LateError:
                        if started.done():
                            raise
                        bar.advance(0)
        except BaseException:
            self.close()
            raise

    async def _start(
        self, replicas: Callable[[], Sequence[Replica]], max_num_seqs: int | None, max_waiting: int
    ) -> None:
        self.replicas = replicas()
        self.router = FailoverRouter(self.servers, max_num_seqs=max_num_seqs, max_waiting=max_waiting)
        try:
            async with asyncio.TaskGroup() as group:
                for replica in self.replicas:
                    group.create_task(replica.start())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        self._watch = asyncio.create_task(self._watch_replicas())
        self._watch.add_done_callback(self._on_watch_ended)

    # -- for any caller -----------------------------------------------------------------------------------------------

    @property
    def servers(self) -> Sequence[ServerEngine]:
        """All servers of the pool."""
        return [replica.server for replica in self.replicas]

    @property
    def version(self) -> int:
        """The newest policy version of all servers."""
        return self.router.version

    @property
    def oldest_version(self) -> int:
        """The oldest policy version of the servers that are not given up. A server that is behind gets no requests."""
        return min(
            (replica.server.version for replica in self.replicas if not replica.lost_reason), default=self.version
        )

    async def generate(
        self,
        prompt: Ids,
        sampling: SamplingParams,
        *,
        images: PromptImages | None = None,
        on_start: Callable[[], None] | None = None,
    ) -> Completion:
        """Sample one continuation. Cancelling the wait aborts the request. `on_start` is called on the servers'
        thread."""
        return await self._run(
            self._answer(partial(self.router.generate, prompt, sampling, images=images, on_start=on_start))
        )

    def generate_all(self, prompts: Sequence[Ids], samplings: Sequence[SamplingParams]) -> list[Completion]:
        """Sample a continuation of each prompt, and wait for all of them. Not for use on an event loop."""
        calls = [partial(self.router.generate, *pair) for pair in zip(prompts, samplings, strict=True)]
        futures = [self._submit(self._answer(call)) for call in calls]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()

    async def stream(
        self, prompt: Ids, sampling: SamplingParams, *, images: PromptImages | None = None
    ) -> AsyncGenerator[Delta, None]:
        """Do the same for one prompt, and yield the answer as it comes. Leaving the iteration aborts the request."""
        loop = asyncio.get_running_loop()
        deltas: asyncio.Queue[Delta | None] = asyncio.Queue()

        def emit(delta: Delta | None) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(deltas.put_nowait, delta)

        future = self._submit(self._run_stream(prompt, sampling, images, emit))
        future.add_done_callback(lambda _: emit(None))
        try:
            while (delta := await deltas.get()) is not None:
                yield delta
            future.result()
        finally:
            future.cancel()

    async def score(self, prompt: Ids, top: int) -> PromptScores:
        """Return the log-probs of a prompt's tokens, and the `top` likeliest tokens at each place."""
        return await self._run(self._answer(partial(self.router.score, prompt, top)))

    async def abort(self) -> None:
        """End all requests at servers. Every waiting call returns its tokens so far, finished by `abort`."""
        await self.run_on_all(ServerEngine.abort)

    async def pause(self) -> None:
        """Stop between two tokens. Requests under way stay, and continue after `resume`.

        This and the next three methods reach a server that is away once it is back.
        """
        await self._run(self._reconcile(paused=True))

    async def resume(self) -> None:
        """Continue the requests under way."""
        await self._run(self._reconcile(paused=False))

    async def sleep(self) -> None:
        """Have the servers give their memory back. No request may be under way."""
        await self._run(self._reconcile(asleep=True))

    async def wake(self) -> None:
        """Have the servers allocate their memory again; see `ServerBackend.wake`."""
        await self._run(self._reconcile(asleep=False))

    async def wake_cache(self) -> None:
        """Have the servers allocate the rest, once they have new weights."""
        await self._run(self._reconcile(cached=True))

    def stats(self) -> Metrics:
        """Return the metrics since the last call, and the current load."""
        return self._submit(self._stats()).result()

    def close(self) -> None:
        """End the servers that were started here. Waiting calls get an error."""
        if self._loop.is_closed():
            return
        with suppress(EngineError):
            self._submit(self._shut_down()).result(CLOSE_TIMEOUT)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_TIMEOUT)
        if not self._thread.is_alive():
            self._loop.close()

    def __enter__(self) -> ServerPool:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    # -- for the weight sender ----------------------------------------------------------------------------------------

    async def run_on_all(self, action: Callable[[ServerEngine], Coroutine[Any, Any, T]]) -> list[T]:
        """Run this action on every server that is up, all at once, on their loop."""
        return await self._run(self._run_on_all(action))

    def withdraw_servers(
        self, only: ServerEngine | None = None, *, running: RunningPolicy = "continue", timeout: float = 600.0
    ) -> list[ServerEngine]:
        """Take every server that is up, or one alone, out of rotation for new weights; return them. Not for use on an
        event loop.

        running: `finish` waits for the requests under way, and `restart` has them begin anew later. timeout: the most
        seconds of either. A server with requests left stays out until the next publish.
        """
        return self._submit(self._withdraw_servers(only, running, timeout)).result()

    def readmit_servers(self, servers: Mapping[ServerEngine, int | None], version: int) -> None:
        """Put withdrawn servers back into rotation, each with the version of its weights. Not for use on an event loop.

        None in place of a version keeps a server out. `version` is the one that was published.
        """

        async def readmit() -> None:
            restart_counts = {replica.server: replica.restart_count for replica in self.replicas}
            unrestarted = [server for server in servers if restart_counts[server] == self._restart_counts[server]]
            for server in unrestarted:  # the others have the weights that they started with
                held_version = servers[server]
                if held_version is not None:
                    server.record_version(held_version)
            if not servers or version in servers.values():
                self.router.published_version = version
            for replica in self.replicas:
                server = replica.server  # one that is up may have come back meanwhile
                missed = not server.is_up or (server not in servers and not server.withdrawn)
                if missed and server.version != self.router.published_version:
                    replica.mark_stale()
            self._end_publish()
            self.router.admit_waiting()
            for server in unrestarted:
                if servers[server] is None:  # the weight sender has ended its requests, or could not
                    await server.disconnect()

        self._submit(readmit()).result()

    def abort_servers(self, servers: Sequence[ServerEngine]) -> None:
        """End the requests at withdrawn servers, since their weights are unknown. Not for use on an event loop."""

        async def abort() -> None:
            self._end_publish()
            await self._abort_servers(servers)

        self._submit(abort()).result()

    async def load(
        self, directory: Path, version: int, *, running: RunningPolicy = "continue", timeout: float = 600.0
    ) -> None:
        """Have every server load the weights in a directory, and start from it after a restart.

        A server that cannot load them is out of rotation. It is an error if none can. running, timeout: see
        `withdraw_servers`.
        """
        await self._run(self._load(directory, version, running, timeout))

    async def _load(self, directory: Path, version: int, running: RunningPolicy, timeout: float) -> None:
        self._publishing += 1
        try:
            await wait_for_external_servers(self.replicas, self._on_change)
            replicas = [replica for replica in self.replicas if not replica.lost_reason]
            up = sum(replica.server.is_up for replica in replicas)
            loads = (replica.load(directory, version, running, timeout) for replica in replicas)
            results = await asyncio.gather(*loads, return_exceptions=True)
        finally:
            self._end_publish()
        errors = [error for error in results if error is not None]
        for replica, error in zip(replicas, results, strict=True):
            if error is not None:
                url = replica.server.url
                get_logger("rollout").warning("%s is out of rotation until it takes the new weights: %s", url, error)
        if errors and len(errors) >= up:
            raise errors[0]
        self.router.published_version = version
        self.router.admit_waiting()

    def set_weight_reloader(self, reloader: Callable[[ServerEngine], Coroutine[Any, Any, None]]) -> None:
        """Bring servers that restarted to the newest weights by this function, on the servers' loop."""
        for replica in self.replicas:
            replica.weight_reloader = reloader

    async def _withdraw_servers(
        self, only: ServerEngine | None, running: RunningPolicy, timeout: float
    ) -> list[ServerEngine]:
        self._publishing += 1
        try:
            return await self._withdraw_and_settle(only, running, timeout)
        except BaseException:
            self._end_publish()
            raise

    async def _withdraw_and_settle(
        self, only: ServerEngine | None, running: RunningPolicy, timeout: float
    ) -> list[ServerEngine]:
        if only is None:
            await wait_for_external_servers(self.replicas, self._on_change)
        servers_up = [replica.server for replica in self.replicas if not replica.lost_reason and replica.server.is_up]
        servers = [server for server in servers_up if only in (None, server)]
        if not servers and all(replica.is_external for replica in self.replicas):
            raise EngineError(NO_SERVER_UP)
        self._restart_counts = {replica.server: replica.restart_count for replica in self.replicas}
        for server in servers:
            server.withdraw()
        results = await asyncio.gather(*(server.settle(running, timeout) for server in servers), return_exceptions=True)
        late = {server: error for server, error in zip(servers, results, strict=True) if error is not None}
        for server, error in late.items():
            get_logger("rollout").warning("%s is out of rotation until the next publish: %s", server.url, error)
        await self._abort_servers(list(late))
        if late and len(late) == len(servers):
            raise next(iter(late.values()))
        return [server for server in servers if server not in late]

    def _end_publish(self) -> None:
        self._publishing -= 1
        self.router.expect_preemptions()

    async def _abort_servers(self, servers: Sequence[ServerEngine]) -> None:
        await asyncio.gather(*(server.abort_or_disconnect() for server in servers))

    # -- on the servers' thread ---------------------------------------------------------------------------------------

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self._loop.is_closed():
            work.close()
            raise EngineError("The servers were closed: they take no more requests.")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the servers' thread, and wait for its result on the caller's loop."""
        return await asyncio.wrap_future(self._submit(work))

    async def _answer(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        with self._busy.count():
            return await call()

    async def _run_stream(
        self, prompt: Ids, sampling: SamplingParams, images: PromptImages | None, emit: Callable[[Delta], None]
    ) -> None:
        with self._busy.count():
            async for delta in self.router.stream(prompt, sampling, images=images):
                emit(delta)

    async def _run_on_all(self, action: Callable[[ServerEngine], Coroutine[Any, Any, T]]) -> list[T]:
        actions = (action(server) for server in self.servers if server.is_up)
        results = await asyncio.gather(*actions, return_exceptions=True)  # an error of one server interrupts no other
        self.router.admit_waiting()
        if errors := [error for error in results if isinstance(error, BaseException)]:
            raise errors[0]
        return [result for result in results if not isinstance(result, BaseException)]

    async def _reconcile(self, *, paused: bool | None = None, asleep: bool | None = None, cached: bool = False) -> None:
        """Bring every server with a running process to this state; the others when they are back."""
        replicas = [replica for replica in self.replicas if not replica.lost_reason]
        for replica in replicas:
            replica.set_desired_state(paused, asleep, cached)
        reconciling = (replica.reconcile() for replica in replicas if replica.is_running)
        results = await asyncio.gather(*reconciling, return_exceptions=True)
        if errors := [error for error in results if error is not None]:
            raise errors[0]

    async def _watch_replicas(self) -> None:
        """Watch all replicas, side by side, until the pool closes."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._give_up_when_stuck())
            for index, replica in enumerate(self.replicas):
                group.create_task(self._watch_replica(index, replica))

    def _on_watch_ended(self, watch: asyncio.Task[None]) -> None:
        """Fail all requests if the watch ended by an error."""
        error = None if watch.cancelled() else watch.exception()
        if error is not None:
            self.router.fail(EngineError(f"The servers are not watched any more: {error!r}. Start the run again."))

    async def _watch_replica(self, index: int, replica: Replica) -> None:
        while not replica.lost_reason:
            await asyncio.sleep(CHECK_INTERVAL)
            with suppress(EtudeError, *NONSENSE):
                await replica.check_health(self._on_change, publishing=bool(self._publishing))
                paused = self._publishing or replica.wants_paused or replica.wants_asleep
                if replica.server.is_up and not paused:  # else its requests wait for that
                    self.router.report_load(index, await replica.server.backend.get_load(replica.server))

    async def _give_up_when_stuck(self) -> None:
        """Count the remaining servers as lost if requests wait and none has come back for `start_timeout` seconds."""
        since: float | None = None
        timeout = max(replica.start_timeout for replica in self.replicas)
        while since is None or running_time() < since + timeout:
            await asyncio.sleep(CHECK_INTERVAL)
            replicas = (replica for replica in self.replicas if not replica.lost_reason)
            may_return = self._publishing or any(replica.is_recovering or replica.wants_asleep for replica in replicas)
            since = None if may_return or not self.router.is_stuck else since or running_time()
        for replica in (replica for replica in self.replicas if not replica.lost_reason):
            replica.lost_reason = f"{replica.describe_absence()} That was so for {timeout:g} s, while requests waited."
        self._on_change()

    def _on_change(self) -> None:
        """Update the router after a server came or went."""
        lost = [replica.lost_reason for replica in self.replicas]
        if all(lost):
            self.router.fail(EngineError(f"There is no server left. {' '.join(dict.fromkeys(lost))}"))
        self.router.admit_waiting()

    async def _stats(self) -> Metrics:
        servers = self.servers
        metrics = Metrics(
            {
                "engine/prompt_tokens": Sum.of(sum(server.prompt_tokens for server in servers)),
                "engine/new_tokens": Sum.of(sum(server.new_tokens for server in servers)),
                "engine/finished": Sum.of(sum(server.finished for server in servers)),
                "engine/running": Last.of(sum(server.active_requests for server in servers)),
                "engine/replicas": Last.of(sum(server.is_up for server in servers)),
                "engine/restarts": Last.of(sum(replica.restart_count for replica in self.replicas)),
                "engine/busy_seconds": Sum.of(self._busy.pop()),
                **self.router.pop_metrics(),
            }
        )
        for server in servers:
            server.prompt_tokens = server.new_tokens = server.finished = 0
        return metrics

    async def _shut_down(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if self.replicas:
            self.router.fail(EngineError("The servers were closed while this request was under way."))
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        await asyncio.gather(*(replica.close() for replica in self.replicas))
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
