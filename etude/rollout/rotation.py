"""Servers that share the work, and fill in for each other.

A request waits in one line for all of them until one has room: as much as `Pace` finds good for it. Then it goes where
its prompt's beginning went (`Router`), or where there is room if there is none at that one. Should its server break
off, another goes on from the tokens that are there, if it holds the same weights; otherwise, and where nobody can say
which weights drew them, the answer is begun anew, unless somebody has been shown its beginning already.
Only servers that are up, not withdrawn, and of the newest version take requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress

from etude.errors import EngineError
from etude.observe import get_log
from etude.protocols import Ids
from etude.records import Completion, SamplingParams
from etude.rollout.answer import Answer
from etude.rollout.figures import Pace
from etude.rollout.request import Delta
from etude.rollout.router import Router
from etude.rollout.server import CutOffError, Server

__all__ = ["Rotation"]

TRIES = 4
"""Servers that are asked for one answer, before it fails as the last one did."""


class Rotation(Router):
    """A `Generate` over servers. All requests come from one event loop."""

    def __init__(self, servers: Sequence[Server], *, most: int, line: int) -> None:
        """most: requests that one server has at once. line: requests that may wait for their turn."""
        super().__init__(servers)
        self.servers = servers
        self.paces = [Pace(most) for _ in servers]
        self.failure: EngineError | None = None
        """Why there will be no server any more."""
        self.resumed = self.restarted = 0
        """Answers that another server went on with, and that were begun anew."""
        self.wanted = 0
        """The version that was published last: a server that holds an older one is asked nothing."""
        self._most_waiting = line
        self._line: deque[asyncio.Future[None]] = deque()
        self._places = 0

    @property
    def version(self) -> int:
        """The newest version that was published to them."""
        return max(self.wanted, *(server.version for server in self.servers))

    @property
    def waiting(self) -> int:
        """How many requests wait for their turn."""
        return len(self._line)

    @property
    def stuck(self) -> bool:
        """Whether somebody waits, and no server is there to wait for."""
        return bool(self._line) and not any(map(self.open, range(len(self.servers))))

    async def generate(
        self, prompt: Ids, sampling: SamplingParams, *, begun: Callable[[], None] | None = None
    ) -> Completion:
        """Sample one continuation, by one server or by several that followed each other."""
        done: Completion | None = None
        async with aclosing(self._written(self._answer(prompt, sampling, begun), shown=False)) as deltas:
            async for delta in deltas:
                done = delta.completion
        assert done is not None, "what does not end whole is an error"
        return done

    async def stream(self, prompt: Ids, sampling: SamplingParams) -> AsyncGenerator[Delta, None]:
        """The same, as it comes."""
        async with aclosing(self._written(self._answer(prompt, sampling), shown=True)) as deltas:
            async for delta in deltas:
                yield delta

    def admit(self) -> None:
        """Let in whoever waits and has room now. To be called when a server came, went, or was given more room."""
        while self._line and (self.failure is not None or self._room()):
            future = self._line.popleft()
            if not future.done():
                self._places += 1
                future.set_result(None)

    def fail(self, failure: EngineError) -> None:
        """There will be no server any more."""
        self.failure = failure
        self.admit()

    def open(self, engine: int) -> bool:
        """Whether this one takes requests at all."""
        server = self.servers[engine]
        return server.up and not server.withdrawn and server.version == self.version

    def _takes(self, engine: int) -> bool:
        return self.open(engine) and self._load[engine] < self.paces[engine].limit

    def _room(self) -> bool:
        there = [engine for engine in range(len(self.servers)) if self.open(engine)]
        free = sum(max(0, self.paces[engine].limit - self._load[engine]) for engine in there)
        return self._places - sum(self._load) < free  # of those let in, some are on their way yet

    def _answer(self, prompt: Ids, sampling: SamplingParams, begun: Callable[[], None] | None = None) -> Answer:
        return next((each for each in self.servers if each.up), self.servers[0]).answer(prompt, sampling, begun)

    async def _written(self, answer: Answer, *, shown: bool) -> AsyncGenerator[Delta, None]:
        """The answer as it comes. shown: whether somebody reads along, so that nothing can be taken back."""
        for tried in range(1, TRIES + 1):
            async with self._place(again=tried > 1):
                with self._chosen(answer.prompt) as chosen:
                    server = self.servers[chosen]
                    if not shown and (answer.unsure or answer.version not in (None, server.version)):
                        answer.restart()
                        self.restarted += 1
                    elif tried > 1 and answer.ids:
                        self.resumed += 1
                    try:
                        async with aclosing(server.advance(answer)) as deltas:
                            async for delta in deltas:
                                yield delta
                        return
                    except CutOffError as error:
                        if (shown or not answer.unsure) and answer.settle():
                            yield answer.delta()
                            return
                        if tried == TRIES:
                            raise
                        self._broke_off(server, error, len(answer.ids))

    def _broke_off(self, server: Server, error: CutOffError, gained: int) -> None:
        """Ask this one no more, until it is known to be well."""
        first, server.up = server.up, False
        told = "%s Its answers go on elsewhere, or once it is back; of this one there are %d tokens."
        get_log("rollout").log(logging.WARNING if first else logging.DEBUG, told, error, gained)

    @asynccontextmanager
    async def _place(self, *, again: bool) -> AsyncIterator[None]:
        """A place among the requests that the servers have room for. again: for an answer that was begun, which is
        never refused, and waits before those that were not."""
        if self._line or not self._room():
            if not again and self.failure is None and len(self._line) >= self._most_waiting:
                raise EngineError(
                    f"{len(self._line)} requests wait for a server already, which is as many as may. Ask for fewer at "
                    f"once, or raise `rollout.line`."
                )
            await self._turn(first=again, placed=False)
        else:
            self._places += 1
        try:
            while self.failure is None and not any(map(self._takes, range(len(self.servers)))):
                self._places -= 1  # the last of them went, or was given less, between the turn and its use
                await self._turn(first=True, placed=True)
            if self.failure is not None:
                raise self.failure
            yield
        finally:
            self._places -= 1
            self.admit()

    async def _turn(self, *, first: bool, placed: bool) -> None:
        """Wait in the line, and have a place. placed: whether whoever waits once more gives back one it has not."""
        future = asyncio.get_running_loop().create_future()
        (self._line.appendleft if first else self._line.append)(future)
        self.admit()
        try:
            await future
        except asyncio.CancelledError:
            if future.cancelled():
                with suppress(ValueError):
                    self._line.remove(future)
                if placed:
                    self._places += 1
            elif not placed:
                self._places -= 1
                self.admit()
            raise
