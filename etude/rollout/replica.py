"""One replica: a server, its health, and its process if it was started here."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from etude.errors import EngineError, EtudeError
from etude.observe import format_seconds, get_logger
from etude.protocols import RunningPolicy
from etude.rollout import health_check
from etude.rollout.server_backend import LaunchSpec
from etude.rollout.server_client import NONSENSE, ServerUnreachableError
from etude.rollout.server_engine import ServerEngine
from etude.rollout.server_process import ServerProcess, find_free_port
from etude.running_time import running_time

POLL_INTERVAL = 0.25
"""Seconds between two checks of a server that starts."""
MAX_FAILED_CHECKS = 3
"""Failed health checks after which a server counts as hung."""
RETRY_DELAY, MAX_RETRY_DELAY = 1.0, 60.0
"""Seconds until a server that did not load its weights is tried again: at first, and at most."""
CLOSE_TIMEOUT = 30.0
"""Seconds in which an external server must be awake again when it is left."""
UNKNOWN_VERSION = -1
"""The version of weights that this run has not sent."""
NO_SERVER_UP = "No server is up to take the new weights. Start the servers, and publish again."
MISSED_UPDATE = "It was away when the newest weights arrived."


class Replica:
    """A server that was started here, or an external one that was running already."""

    def __init__(
        self, server: ServerEngine, launch: LaunchSpec | None, log: Path, *, max_restarts: int, start_timeout: float
    ) -> None:
        """launch: how it is started; None for an external server. start_timeout: seconds that a start may take."""
        self.server = server
        self.max_restarts = max_restarts
        self.restart_count = 0
        self.start_source: tuple[Path, int] | None = None if launch is None else (launch.model, 0)
        """The directory from which the server would start now, and the version of its weights."""
        self._adapters: dict[int, Path] = {}
        """The adapters that the server should hold, by version."""
        self.lost_reason = ""
        """The reason that it is gone for good."""
        self.weight_reloader: Callable[[ServerEngine], Coroutine[Any, Any, None]] | None = None
        """Sends the newest weights to a server that restarted or was away, where no directory has them."""
        self.start_timeout = start_timeout
        self.is_recovering = False
        """True while it is being brought back."""
        self.wants_paused = self.wants_asleep = False
        """The desired state. A server that is away gets it when it is back."""
        self.stale_reason = ""
        """The reason that it lacks the newest weights. It is brought to them when it is healthy."""
        # it lacks its cache while it is awake without memory for keys and values, until it has new weights
        self._is_paused = self._is_asleep = self._wants_cache = self._lacks_cache = False
        self._load_lock = asyncio.Lock()
        self._state_lock = asyncio.Lock()
        self._next_retry = 0.0
        self._retry_delay = RETRY_DELAY
        self._launch = launch
        self._process = ServerProcess(f"{server.backend.package} server {log.stem}", log)
        self._health_check = health_check.HealthCheck(server)
        self._failed_checks = self._port = 0

    @property
    def is_external(self) -> bool:
        """True if it was running already, so that it is not stopped here."""
        return self._launch is None

    @property
    def is_running(self) -> bool:
        """True if its process may answer, as far as is known."""
        return self.is_external or self._process.is_running

    async def load(
        self, directory: Path, version: int, running: RunningPolicy = "continue", timeout: float = 600.0
    ) -> None:
        """Load the weights in a directory, and start from there from now on; or load the adapter that is there.

        A failed load is tried again from time to time. A server that is away loads once it is back. running, timeout:
        see `ServerEngine.settle`.
        """
        if count := self.server.backend.adapters:
            self._adapters = dict(sorted((self._adapters | {version: directory}).items())[-count:])
        else:
            self.start_source = directory, version
        if not self.server.is_up:
            self.mark_stale()
            return
        async with self._load_lock:
            await self._load_weights(running, timeout)
        await self.reconcile()

    async def _load_weights(self, running: RunningPolicy = "continue", timeout: float = 600.0) -> None:
        published = self._adapters, self.start_source
        try:
            if self.weight_reloader is not None:
                await self.weight_reloader(self.server)
            elif self._adapters:
                async with asyncio.timeout(timeout):
                    await self.server.load_adapters(self._adapters)
            else:
                assert self.start_source is not None, "a server that loads weights has a source"
                await self.server.load(*self.start_source, running, timeout)
        except (EtudeError, TimeoutError) as error:
            self.stale_reason = str(error) or f"It did not take its adapters in {timeout:g} s."
            self._next_retry = running_time() + self._retry_delay
            self._retry_delay = min(2 * self._retry_delay, MAX_RETRY_DELAY)
            if isinstance(error, TimeoutError):
                raise EngineError(f"{self.server.url}: {self.stale_reason}") from error
            raise
        finally:
            self._is_paused &= bool(self._adapters)  # loading weights resumes the server
        if (self._adapters, self.start_source) == published:  # else newer ones were published meanwhile
            self.stale_reason = ""
        self._retry_delay = RETRY_DELAY

    def set_desired_state(self, paused: bool | None, asleep: bool | None, cached: bool = False) -> None:
        """Set the desired state where it is given; `reconcile` brings it about."""
        if paused is not None:
            self.wants_paused = paused  # a weight sender may have resumed it
            self._is_paused = not paused
        if asleep is not None:
            self.wants_asleep = asleep
        self._wants_cache |= cached

    async def reconcile(self) -> None:
        """Bring the server to its desired state. A server that does not answer is left for later."""
        async with self._state_lock:
            needs_cache = self._wants_cache and self._lacks_cache
            if (self.wants_paused, self.wants_asleep) == (self._is_paused, self._is_asleep) and not needs_cache:
                return
            if not self.server.is_up and not await self.server.is_healthy():
                return
            try:
                if self._is_asleep and not self.wants_asleep:
                    await self.server.wake()
                    self._is_asleep = False
                    self._lacks_cache = self.server.backend.discards_weights
                if self._lacks_cache and self._wants_cache:
                    await self.server.wake_cache()
                    self._lacks_cache = False
                if self._is_paused != self.wants_paused:
                    await (self.server.pause() if self.wants_paused else self.server.resume())
                    self._is_paused = self.wants_paused
                if self.wants_asleep and not self._is_asleep:
                    await self.server.sleep()
                    self._is_asleep = True
                    self._wants_cache = self._lacks_cache = False
            except ServerUnreachableError:
                return
            except EtudeError:
                # the server refuses, and the caller gets the error
                self.wants_paused = self._is_paused
                self.wants_asleep = self._is_asleep
                raise

    async def start(self) -> None:
        """Start the server, and return once it is ready. An external one is only checked."""
        source = self.start_source
        if self._launch is not None and source is not None:
            self.server.withdraw()
            backend = self.server.backend
            self._port = find_free_port(self._port)
            self.server.relocate(f"http://127.0.0.1:{self._port}")
            with self._with_key_file(replace(self._launch, model=source[0], port=self._port)) as launch:
                self._process.start(backend.command(launch), backend.environment_variables(launch), secret=launch.key)
                for node in range(1, launch.config.nodes):
                    command = " ".join(backend.command(launch, node))
                    get_logger("rollout").info("Start node %d of the replica on its machine: %s", node, command)
                await self._wait_until_ready()
            self._is_paused = self._is_asleep = self._lacks_cache = False
        async with self._load_lock:
            await self._connect()
            if source is not None and not self._adapters:
                await self.server.set_version(source[1])
            # newer weights may have come meanwhile
            if self._adapters or (source is not None and source != self.start_source):
                await self._load_weights()
            else:
                self.stale_reason = ""
        if self.is_external:  # an earlier run may have left it paused or asleep
            self._is_paused = self._is_asleep = await self.server.backend.is_suspended(self.server)
        await self.reconcile()
        if not self._adapters:  # at its first start
            await self.server.backend.check_adapters(self.server)
        self._failed_checks = 0

    async def _connect(self) -> None:
        try:
            await self.server.connect()
        except ServerUnreachableError as error:
            if not self.is_external:
                raise
            raise EngineError(
                f"{error} Start a server there, correct `rollout.url`, or leave it out to have one started here."
            ) from error

    async def _wait_until_ready(self) -> None:
        deadline = running_time() + self.start_timeout
        # a healthy reply without a running process comes from another server
        while not (await self.server.is_healthy() and self._process.is_running):
            if not self._process.is_running:
                raise EngineError(f"A server did not start: {self._process.describe_exit()}")
            if running_time() > deadline:
                tail = self._process.describe_exit()
                await self.end()
                raise EngineError(
                    f"A server was not ready {self.start_timeout:g} s after it was started. Raise "
                    f"`rollout.start_timeout`, or see the cause: {tail}"
                )
            await asyncio.sleep(POLL_INTERVAL)
        self._process.redact_log()

    @contextmanager
    def _with_key_file(self, launch: LaunchSpec) -> Iterator[LaunchSpec]:
        """Write the key file, for a server that reads one, readable by its owner only; remove it after the start."""
        content = self.server.backend.key_file_text(launch)
        if not content:
            yield launch
            return
        path = self._process.log.with_suffix(".key.yaml")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        try:
            with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
                file.write(content)
            yield replace(launch, key_file=path.absolute())
        finally:
            path.unlink(missing_ok=True)

    async def check_health(self, on_change: Callable[[], None], *, publishing: bool = False) -> None:
        """Check the server, and recover it if it is not healthy.

        `on_change` is called when the server comes or goes. publishing: weights are being sent, which may keep the
        engine from answering.
        """
        if self.lost_reason:
            return
        if not self.is_running:
            if self.wants_asleep:  # its memory is in use elsewhere until it should wake
                self.server.is_up = False
                on_change()
            else:
                await self._restart(self._process.describe_exit(), on_change)
            return
        is_healthy = await self.server.is_healthy()
        reason = self._silence
        if publishing or self.wants_asleep:
            self._health_check.reset()
        elif is_healthy and self._health_check.is_hung():
            is_healthy = False
            self._failed_checks = MAX_FAILED_CHECKS
            silence = f"{health_check.MAX_SILENCE:g} s"
            reason = f"The engine of {self._process.name} has said nothing for {silence}, though that answers."
        if is_healthy and self.is_external and (self._failed_checks or not self.server.is_up):
            await self._check_returned()
        if is_healthy and not self.server.is_up:
            await self.reconcile()
        self._failed_checks = 0 if is_healthy else self._failed_checks + 1
        if is_healthy != self.server.is_up and (is_healthy or self._failed_checks >= MAX_FAILED_CHECKS):
            self.server.is_up = is_healthy
            if self.is_external and not is_healthy:
                self.warn_of_absence(reason)
            on_change()
        if self._failed_checks >= MAX_FAILED_CHECKS and not self.is_external:
            await self._restart(reason, on_change)
        elif (
            is_healthy
            and self.stale_reason
            and self._can_reload
            and not self.wants_asleep
            and running_time() >= self._next_retry
        ):
            await self._retry_load()
            on_change()

    def warn_of_absence(self, reason: str = "") -> None:
        """Warn that an external server gets no requests, by default since it does not answer."""
        message = "%s It gets no requests until it does. It is at %s."
        get_logger("rollout").warning(message, reason or self._silence, self.server.url)

    @property
    def _silence(self) -> str:
        return f"{self._process.name} does not answer any more."

    @property
    def _can_reload(self) -> bool:
        """True if there is a way to bring it to the newest weights."""
        return self.start_source is not None or self.weight_reloader is not None or bool(self._adapters)

    async def _check_returned(self) -> None:
        """Check the weights of an external server that was away. Its owner may have restarted it with other weights."""
        has_weights = self.server.version or self._can_reload
        server = self.server
        if not has_weights or await server.backend.get_version_label(server) == str(server.version):
            return
        self.server.withdraw()
        self.server.relocate(self.server.url)
        self.server.version = UNKNOWN_VERSION
        self._is_paused = self._is_asleep = False
        message = "The server at %s was away, and has other weights than it was sent. It gets no requests with them."
        get_logger("rollout").warning(message, self.server.url)
        self.mark_stale("It has other weights than it was sent.")

    def mark_stale(self, reason: str = MISSED_UPDATE) -> None:
        """Record that it lacks the newest weights. It is brought to them when it is healthy."""
        self.stale_reason = reason
        self._next_retry = 0.0

    async def _retry_load(self) -> None:
        """Load the newest weights once more."""
        self.is_recovering = True
        try:
            async with self._load_lock:
                await self._load_weights()
            await self.reconcile()
        finally:
            self.is_recovering = False

    def describe_absence(self) -> str:
        """Return the reason that it takes no requests."""
        if self.lost_reason or self.stale_reason:
            return self.lost_reason or self.stale_reason
        state = "is out of rotation, without the newest weights" if self.server.is_up else "does not answer any more"
        return f"The server at {self.server.url} {state}."

    async def _restart(self, reason: str, on_change: Callable[[], None]) -> None:
        """Restart the server from the newest weights in a directory, then bring it to the newest of all."""
        self.server.is_up = False
        self.is_recovering = True
        on_change()
        self._health_check.reset()
        await self.end()
        while self.restart_count < self.max_restarts:
            self.restart_count += 1
            message = "A server is started again (%d of %d times): %s"
            get_logger("rollout").warning(message, self.restart_count, self.max_restarts, reason)
            started_at = running_time()
            try:
                await self.start()
                if self.weight_reloader is not None:
                    await self.weight_reloader(self.server)
            except (EtudeError, OSError, *NONSENSE) as error:
                reason = str(error) or repr(error)
                await self.end()
            else:
                self.is_recovering = False
                on_change()
                get_logger("rollout").warning("It is back, after %s.", format_seconds(running_time() - started_at))
                return
        self.is_recovering = False
        self.lost_reason = (
            f"{reason} It was started {1 + self.restart_count} times, as often as `rollout.restarts` allows."
        )
        get_logger("rollout").error("%s", self.lost_reason)
        on_change()

    async def end(self) -> None:
        """End the process, if it was started here."""
        await asyncio.to_thread(self._process.stop)

    async def close(self) -> None:
        """End the process, and close the connections. An external server is left awake and running."""
        self._health_check.reset()
        if self.is_external:
            self.wants_paused = self.wants_asleep = False
            with suppress(EtudeError, TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT):
                    await self.reconcile()
        await self.end()
        await self.server.close()


async def wait_for_external_servers(replicas: Sequence[Replica], on_change: Callable[[], None]) -> None:
    """Wait until a server answers, at most `start_timeout` seconds, if none does and all were started elsewhere.

    The servers are asked now, twice: the health check notices an absence only after some failures. `on_change` is
    called if they are found to be away.
    """
    if not all(replica.is_external for replica in replicas):
        return
    up = [replica for replica in replicas if replica.server.is_up]
    for _ in range(2):
        if any(await asyncio.gather(*(replica.server.is_healthy() for replica in up))):
            break
    else:
        for replica in up:
            replica.server.is_up = False
            replica.warn_of_absence()
        on_change()

    def all_are_away() -> bool:
        return not any(replica.server.is_up for replica in replicas)

    timeout = max(replica.start_timeout for replica in replicas)
    until = running_time() + timeout
    if all_are_away():
        get_logger("rollout").warning("No server is up to take the new weights. Waiting %g s for one.", timeout)
    while all_are_away():
        if running_time() >= until or all(replica.lost_reason for replica in replicas):
            raise EngineError(NO_SERVER_UP)
        await asyncio.sleep(POLL_INTERVAL)
