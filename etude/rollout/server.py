"""A server as a rollout engine: asked over its public endpoints, on one event loop.

    consumes       prompts and sampling parameters, checked before they are sent: a server may end over a bad id
    produces       answers, each token with its log-prob and the version of the weights that drew it
    waits for      the server
    unblocked by   its answer, or its silence: the connection bounds that

Whoever carries weights there is its only writer: it takes the server out of rotation (`withdraw`), brings the weights
by whatever endpoint (`post`), and says which version they are (`stamped`), which puts it back.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from etude.errors import ConfigError, DataError, EngineError, EtudeError
from etude.protocols import Ids
from etude.records import Completion, SamplingParams
from etude.rollout.answer import Answer
from etude.rollout.dialect import Dialect
from etude.rollout.figures import Figures
from etude.rollout.remote import Remote
from etude.rollout.request import Delta, check
from etude.rollout.shape import Shape

if TYPE_CHECKING:
    from etude.chat import Tokenizer

__all__ = ["CutOffError", "Server"]

LAST = 10.0
"""Seconds for each of the last things that are asked of a server that failed."""
HEALTH = 5.0
"""Seconds in which a healthy server says so."""


class CutOffError(EngineError):
    """A server that broke off an answer, or could not begin it; the answer is as it left it."""


class Server(Remote):
    """One server. It is `up` while it is known to answer, and takes part while it is not withdrawn."""

    def __init__(
        self,
        url: str,
        dialect: Dialect,
        shape: Shape,
        *,
        tokenizer: Tokenizer | None = None,
        ranks: int = 1,
        key: str = "",
    ) -> None:
        """ranks: how many processes of it hold a share of the weights. key: what it asks for."""
        super().__init__(url, dialect, ranks=ranks, key=key)
        self.shape, self.tokenizer = shape, tokenizer
        self.up = False
        self.heard = 0.0
        """When it drew something last."""
        self.under_way = self.new_tokens = self.prompt_tokens = self.finished = 0
        self._context = shape.context
        self._aborts = 0
        self._idle = asyncio.Event()
        self._idle.set()

    # -- what anybody may call ----------------------------------------------------------------------------------------

    async def meet(self) -> str:
        """See that it is there, and of a version that can be spoken with; returns that."""
        found = await self.dialect.check(self._to)
        told = self.dialect.context(json.loads(await self._to.get("/v1/models")))
        self._context = min(self.shape.context, told)
        self.up = True
        return found

    async def healthy(self) -> bool:
        """Whether it says that it is well, in good time."""
        try:
            await self._to.get(self.dialect.health, within=HEALTH)
        except (EngineError, DataError):
            return False
        return True

    def answer(self, prompt: Ids, sampling: SamplingParams, begun: Callable[[], None] | None = None) -> Answer:
        """An answer that can be asked for here, or the sentence that says why not."""
        ids = np.asarray(prompt, dtype=np.int32)
        check(ids, sampling, vocabulary=self.shape.vocabulary, context=self._context, held=self._context)
        if sampling.stop and self.tokenizer is None:
            raise ConfigError("An engine without a tokenizer cannot look for stop strings: give stop_ids instead.")
        self.dialect.refuse(sampling)
        return Answer(ids, sampling, limit=self._context, tokenizer=self.tokenizer, begun=begun)

    async def advance(self, answer: Answer) -> AsyncGenerator[Delta, None]:
        """Have the answer written, from where it stands; leaving the iteration ends that. `CutOffError` if the server
        breaks off, or gives up what nobody here has aborted: for want of memory, or because weights came in part."""
        ids, sampling = answer.rest()
        aborts = self._aborts
        self.prompt_tokens += len(ids)
        with self._counted():
            try:
                async with aclosing(self.dialect.ask(self._to, ids.tolist(), sampling, answer.ends)) as pieces:
                    async for piece in pieces:
                        self.heard = time.monotonic()
                        answer.gain(piece, self.version, sure=not self.withdrawn)
                        self.new_tokens += len(piece.ids)
                        if answer.finish == "abort" and aborts == self._aborts:
                            answer.finish = None
                            raise CutOffError(f"The server at {self.url} gave an answer up.")
                        if piece.ids or answer.finish:
                            yield answer.delta()
                        if answer.finish:
                            self.finished += 1
                            return
            except EngineError as error:
                raise CutOffError(str(error)) from error
        raise CutOffError(f"The server at {self.url} ended an answer without saying how it finished.")

    async def generate(
        self, prompt: Ids, sampling: SamplingParams, *, begun: Callable[[], None] | None = None
    ) -> Completion:
        """Sample one continuation. Cancelling the wait aborts the request."""
        done: Completion | None = None
        async with aclosing(self.advance(self.answer(prompt, sampling, begun))) as deltas:
            async for delta in deltas:
                done = delta.completion
        assert done is not None, "what does not end whole is an error"
        return done

    async def stream(self, prompt: Ids, sampling: SamplingParams) -> AsyncGenerator[Delta, None]:
        """The same, as it comes."""
        async with aclosing(self.advance(self.answer(prompt, sampling))) as deltas:
            async for delta in deltas:
                yield delta

    async def abort(self) -> None:
        """End all that is under way: every waiting call returns what it has, finished by `abort`."""
        self._aborts += 1
        await super().abort()

    async def labelled(self) -> str:
        """Which version of the weights it says that it holds."""
        return await self.dialect.labelled(self._to)

    async def pause(self) -> None:
        """Stop between two tokens. Requests under way stay, and go on after `resume`."""
        await self.dialect.pause(self._to)

    async def sleep(self) -> None:
        """Give the memory back. Nothing may be under way."""
        if self.under_way:
            raise EngineError(f"The server cannot sleep while {self.under_way} requests are under way.")
        await self.dialect.sleep(self._to)

    async def wake(self) -> None:
        """Take the memory again."""
        await self.dialect.wake(self._to)

    async def forget(self) -> None:
        """Use no keys and values again that were computed before."""
        await self.dialect.forget(self._to)

    async def rests(self) -> bool:
        """Whether its engine sleeps or is paused, as that says itself, when it comes to it."""
        return await self.dialect.rests(self._to)

    async def figures(self) -> Figures:
        """How much it has to do, as it says."""
        return await self.dialect.figures(self._to)

    # -- for whoever carries weights there ----------------------------------------------------------------------------

    async def drain(self, patience: float = 600.0) -> None:
        """Wait until nothing is under way there."""
        try:
            async with asyncio.timeout(patience):
                await self._idle.wait()
        except TimeoutError:
            raise EngineError(
                f"{self.under_way} requests are still under way at {self.url} after {patience:g} s. Abort them, or "
                f"wait longer."
            ) from None

    async def load(self, directory: Path, version: int) -> None:
        """Have it compute with the weights in a directory that it can read. If that fails, it is out of rotation: which
        weights it has is not known."""
        self.withdraw()
        try:
            await self.dialect.load(self._to, directory, version)
        except EtudeError:
            await self.drop()
            raise
        self.holds(version)

    async def drop(self) -> None:
        """End what is under way there, as nobody knows what it computes with. A server that does not hear of that stays
        stopped, and who waits for it waits no longer."""
        try:
            for last in (partial(Remote.abort, self), self.resume):  # which nobody who waits there has asked for
                async with asyncio.timeout(LAST):
                    await last()
        except (EtudeError, TimeoutError):
            await self.cut()

    async def cut(self) -> None:
        """Have done with what is under way there; another goes on with it."""
        await self._to.cut()

    # -- inside -------------------------------------------------------------------------------------------------------

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self.under_way += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.under_way -= 1
            if not self.under_way:
                self._idle.set()
