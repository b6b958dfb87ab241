"""One replica: a server, and the process that it runs in where it was started here."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from etude.errors import EngineError, EtudeError
from etude.observe import format_seconds, get_log
from etude.rollout import pulse
from etude.rollout.connection import AwayError
from etude.rollout.dialect import Launch
from etude.rollout.server import Server
from etude.rollout.warden import Warden, free_port

__all__ = ["Replica"]

GLANCE = 0.25
"""Seconds between two looks at what starts."""
SICK = 3
"""Looks at a server that does not answer, before it is taken to hang."""
AGAIN, AGAIN_AT_MOST = 1.0, 60.0
"""Seconds until one that did not take weights is offered them again, at first and after many times."""
PARTING = 30.0
"""Seconds that one which is not ours has to be awake again when it is left."""
UNKNOWN = -1
"""The version of weights that nobody here has brought."""
MISSED = "It was away when the newest weights came."


class Replica:
    """A server that was started here, or one that was there."""

    def __init__(self, server: Server, launch: Launch | None, log: Path, *, restarts: int, patience: float) -> None:
        """launch: how it is started; None for one that was there. patience: seconds that a start may take."""
        self.server = server
        self.restarts, self.started = restarts, 0
        self.home: tuple[Path, int] | None = None if launch is None else (launch.model, 0)
        """The directory that it would be started from now, and the version of the weights there."""
        self.lost = ""
        """Why it is gone for good."""
        self.renew: Callable[[Server], Coroutine[Any, Any, None]] | None = None
        """Brings it to the newest weights when it was started again or was away, where no directory has them."""
        self.patience = patience
        self.coming = False
        """Whether it is being brought back."""
        self.paused = self.asleep = False
        """How it is to be: what it misses while it is away it is told when it is back."""
        self.stale = ""
        """Why it does not hold the newest weights, though it was to. It is brought to them when it is well."""
        self._is_paused = self._is_asleep = False
        self._loads, self._turns = asyncio.Lock(), asyncio.Lock()
        self._again, self._wait = 0.0, AGAIN
        self._launch = launch
        self._warden = Warden(f"{server.dialect.package} server {log.stem}", log)
        self._pulse = pulse.Pulse(server)
        self._sick = self._port = 0

    @property
    def joined(self) -> bool:
        """Whether it was there, and is not ours to end."""
        return self._launch is None

    @property
    def runs(self) -> bool:
        """Whether there is a process to speak with, for all that is known."""
        return self.joined or self._warden.running

    async def load(self, directory: Path, version: int) -> None:
        """Have it compute with the weights in a directory, and start from there from now on. Where that fails it is
        tried again now and then, and where it is away once it is back."""
        self.home = directory, version
        if not self.server.up:
            self.behind()
            return
        async with self._loads:
            await self._take()
        await self.settle()

    async def _take(self) -> None:
        try:
            if self.renew is not None:
                await self.renew(self.server)
            else:
                assert self.home is not None, "whoever takes weights was given some"
                await self.server.load(*self.home)
        except EtudeError as error:
            self.stale = str(error)
            self._again = time.monotonic() + self._wait
            self._wait = min(2 * self._wait, AGAIN_AT_MOST)
            raise
        finally:
            self._is_paused = False  # as it goes on after taking them
        self.stale, self._wait = "", AGAIN

    def have(self, paused: bool | None, asleep: bool | None) -> None:
        """How it is to be, where that is said; `settle` brings it about."""
        if paused is not None:
            self.paused, self._is_paused = paused, not paused  # whoever brings weights may have gone on
        if asleep is not None:
            self.asleep = asleep

    async def settle(self) -> None:
        """Have it be as it is to be. One that does not answer is told when it does."""
        async with self._turns:
            if (self.paused, self.asleep) == (self._is_paused, self._is_asleep):
                return
            if not self.server.up and not await self.server.healthy():
                return
            try:
                if self._is_asleep and not self.asleep:
                    await self.server.wake()
                    self._is_asleep = False
                if self._is_paused != self.paused:
                    await (self.server.pause() if self.paused else self.server.resume())
                    self._is_paused = self.paused
                if self.asleep and not self._is_asleep:
                    await self.server.sleep()
                    self._is_asleep = True
            except AwayError:
                return
            except EtudeError:
                self.paused, self.asleep = self._is_paused, self._is_asleep  # it will not, and that is told now
                raise

    async def start(self) -> None:
        """Start it, and return once it is ready; of one that is there, see that it is."""
        begins = self.home
        if self._launch is not None and begins is not None:
            self.server.withdraw()
            dialect = self.server.dialect
            if dialect.adapters:
                begins = self._launch.model, 0
            self._port = free_port(self._port)
            self.server.moves(f"http://127.0.0.1:{self._port}")
            with self._keyed(replace(self._launch, model=begins[0], port=self._port)) as launch:
                self._warden.start(dialect.command(launch), dialect.environment(launch), hidden=launch.key)
                for node in range(1, launch.nodes):
                    told = " ".join(dialect.command(launch, node))
                    get_log("rollout").info("Start node %d of the replica on its machine: %s", node, told)
                await self._ready()
            self._is_paused = self._is_asleep = False
        async with self._loads:
            await self._met()
            if begins is not None:
                await self.server.stamped(begins[1])
            if begins is not None and self.home is not None and begins != self.home:  # newer weights came meanwhile
                await self._take()
            else:
                self.stale = ""
        if self.joined:  # and left as it is by somebody who was ended at once
            self._is_paused = self._is_asleep = await self.server.rests()
        await self.settle()
        self._sick = 0

    async def _met(self) -> None:
        try:
            await self.server.meet()
        except AwayError as error:
            if not self.joined:
                raise
            raise EngineError(
                f"{error} Start one there, correct `rollout.url`, or leave it out to have one started here."
            ) from error

    async def _ready(self) -> None:
        until = time.monotonic() + self.patience
        while not (await self.server.healthy() and self._warden.running):  # else it is another's that answers there
            if not self._warden.running:
                raise EngineError(f"A server did not start: {self._warden.ending()}")
            if time.monotonic() > until:
                tail = self._warden.ending()
                await self.end()
                raise EngineError(
                    f"A server was not ready {self.patience:g} s after it was started. Raise `rollout.start_timeout`, "
                    f"or see what it waits for: {tail}"
                )
            await asyncio.sleep(GLANCE)
        self._warden.hush()

    @contextmanager
    def _keyed(self, launch: Launch) -> Iterator[Launch]:
        """Where a server takes its key from a file, that is there while it starts, for its owner alone."""
        told = self.server.dialect.keyed(launch)
        if not told:
            yield launch
            return
        file = self._warden.log.with_suffix(".key.yaml")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        try:
            with os.fdopen(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as said:
                said.write(told)
            yield replace(launch, keyed=file.absolute())
        finally:
            file.unlink(missing_ok=True)

    async def look(self, changed: Callable[[], None], *, busy: bool = False) -> None:
        """See how it is, and have it back where it is not well. `changed` is called when it comes or goes. busy:
        whether somebody brings weights, which may keep its engine from answering."""
        if self.lost:
            return
        if not self.runs:
            if self.asleep:  # its memory is another's until it is to wake
                self.server.up = False
                changed()
            else:
                await self._revive(self._warden.ending(), changed)
            return
        well = await self.server.healthy()
        why = f"{self._warden.name} does not answer any more."
        if busy or self.asleep:
            self._pulse.rest()
        elif well and self._pulse.stopped():
            well, self._sick = False, SICK
            why = f"The engine of {self._warden.name} has said nothing for {pulse.SILENT:g} s, though that answers."
        if well and self.joined and (self._sick or not self.server.up):
            await self._returned()
        if well and not self.server.up:
            await self.settle()
        self._sick = 0 if well else self._sick + 1
        if well != self.server.up and (well or self._sick >= SICK):
            self.server.up = well
            if self.joined and not well:
                get_log("rollout").warning("%s It is asked nothing until it does. It is at %s.", why, self.server.url)
            changed()
        if self._sick >= SICK and not self.joined:
            await self._revive(why, changed)
        elif well and self.stale and self._renewable and not self.asleep and time.monotonic() >= self._again:
            await self._retake()
            changed()

    @property
    def _renewable(self) -> bool:
        """Whether there is a way to bring it to the newest weights."""
        return self.home is not None or self.renew is not None

    async def _returned(self) -> None:
        """One that is not ours was away. Somebody may have started it again, with weights that are not the newest."""
        given = self.server.version or self._renewable
        if not given or await self.server.labelled() == str(self.server.version):
            return
        self.server.withdraw()
        self.server.moves(self.server.url)
        self.server.version = UNKNOWN
        self._is_paused = self._is_asleep = False
        told = "The server at %s was away, and holds other weights than it was given. It is asked nothing with them."
        get_log("rollout").warning(told, self.server.url)
        self.behind("It holds other weights than it was given.")

    def behind(self, why: str = MISSED) -> None:
        """It does not hold the newest weights. When it is well it is brought to them."""
        self.stale, self._again = why, 0.0

    async def _retake(self) -> None:
        """Take the newest weights once more."""
        self.coming = True
        try:
            async with self._loads:
                await self._take()
            await self.settle()
        finally:
            self.coming = False

    def absence(self) -> str:
        """Why nobody can ask it anything."""
        if self.lost or self.stale:
            return self.lost or self.stale
        why = "is out of rotation, without the newest weights" if self.server.up else "does not answer any more"
        return f"The server at {self.server.url} {why}."

    async def _revive(self, why: str, changed: Callable[[], None]) -> None:
        """Start it once more, from the newest weights that it was given as files."""
        self.server.up = False
        self.coming = True
        changed()
        self._pulse.rest()
        await self.end()
        while self.started < self.restarts:
            self.started += 1
            told = "A server is started again (%d of %d times): %s"
            get_log("rollout").warning(told, self.started, self.restarts, why)
            began = time.monotonic()
            try:
                await self.start()
                if self.renew is not None:
                    await self.renew(self.server)
            except (EtudeError, OSError, ValueError, KeyError) as error:
                why = str(error) or repr(error)
                await self.end()
            else:
                self.coming = False
                changed()
                get_log("rollout").warning("It is back, after %s.", format_seconds(time.monotonic() - began))
                return
        self.coming = False
        self.lost = f"{why} It was started {1 + self.started} times, as often as `rollout.restarts` allows."
        get_log("rollout").error("%s", self.lost)
        changed()

    async def end(self) -> None:
        """End the process, if there is one of ours."""
        await asyncio.to_thread(self._warden.stop)

    async def close(self) -> None:
        """Let go of all of it. One that is not ours is left awake, and going on."""
        self._pulse.rest()
        if self.joined:
            self.paused = self.asleep = False
            with suppress(EtudeError, TimeoutError):
                async with asyncio.timeout(PARTING):
                    await self.settle()
        await self.end()
        await self.server.close()
