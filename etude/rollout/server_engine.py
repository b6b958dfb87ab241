"""A server as a rollout engine: asked over its public endpoints, on one event loop.

    consumes       prompts and sampling parameters, checked before they are sent: a server may end over a bad id
    produces       answers, each token with its log-prob and the version of the weights that drew it
    waits for      the server
    unblocked by   its answer, or its silence: the connection bounds that

Whoever carries weights there is its only writer: it takes the server out of rotation (`withdraw`), brings the weights
by whatever endpoint (`post`), and says which version they are (`set_version`), which puts it back.
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
from etude.rollout.model_shape import ModelShape
from etude.rollout.partial_completion import PartialCompletion
from etude.rollout.request import Delta, check_request
from etude.rollout.server_backend import ServerBackend
from etude.rollout.server_client import ServerClient
from etude.rollout.server_load import ServerLoad

if TYPE_CHECKING:
    from etude.chat import Tokenizer

__all__ = ["ServerEngine", "StreamInterruptedError"]

CLEANUP_TIMEOUT = 10.0
"""Seconds for each of the last things that are asked of a server that failed."""
HEALTH_TIMEOUT = 5.0
"""Seconds in which a healthy server says so."""


class StreamInterruptedError(EngineError):
    """A server that broke off an answer, or could not begin it; the answer is as it left it."""


class ServerEngine(ServerClient):
    """One server. It is `up` while it is known to answer, and takes part while it is not withdrawn."""

    def __init__(
        self,
        url: str,
        backend: ServerBackend,
        shape: ModelShape,
        *,
        tokenizer: Tokenizer | None = None,
        ranks: int = 1,
        key: str = "",
    ) -> None:
        """ranks: how many processes of it hold a share of the weights. key: what it asks for."""
        super().__init__(url, backend, ranks=ranks, key=key)
        self.shape, self.tokenizer = shape, tokenizer
        self.is_up = False
        self.last_token_time = 0.0
        """When it drew something last."""
        self.active_requests = self.new_tokens = self.prompt_tokens = self.finished = 0
        self._context_length = shape.context_length
        self._abort_count = 0
        self._idle = asyncio.Event()
        self._idle.set()

    # -- what anybody may call ----------------------------------------------------------------------------------------

    async def connect(self) -> str:
        """See that it is there, and of a version that can be spoken with; returns that."""
        server_version = await self.backend.check_version(self._client)
        context_length = self.backend.context_length(json.loads(await self._client.get("/v1/models")))
        self._context_length = min(self.shape.context_length, context_length)
        self.is_up = True
        return server_version

    async def is_healthy(self) -> bool:
        """Whether it says that it is well, in good time."""
        try:
            await self._client.get(self.backend.health_path, timeout=HEALTH_TIMEOUT)
        except (EngineError, DataError):
            return False
        return True

    def begin_completion(
        self, prompt: Ids, sampling: SamplingParams, on_start: Callable[[], None] | None = None
    ) -> PartialCompletion:
        """An answer that can be asked for here, or the sentence that says why not."""
        ids = np.asarray(prompt, dtype=np.int32)
        check_request(
            ids,
            sampling,
            vocab_size=self.shape.vocab_size,
            context_length=self._context_length,
            cache_tokens=self._context_length,
        )
        if sampling.stop and self.tokenizer is None:
            raise ConfigError("An engine without a tokenizer cannot look for stop strings: give stop_ids instead.")
        self.backend.check_sampling(sampling)
        return PartialCompletion(ids, sampling, limit=self._context_length, tokenizer=self.tokenizer, on_start=on_start)

    async def continue_completion(self, answer: PartialCompletion) -> AsyncGenerator[Delta, None]:
        """Have the answer written, from where it stands; leaving the iteration ends that. `StreamInterruptedError` if
        the server breaks off, or gives up what nobody here has aborted: for want of memory, or because weights came in
        part."""
        ids, sampling = answer.remaining_request()
        aborts = self._abort_count
        self.prompt_tokens += len(ids)
        with self._track_active():
            try:
                async with aclosing(
                    self.backend.stream(self._client, ids.tolist(), sampling, answer.stop_ids)
                ) as chunks:
                    async for chunk in chunks:
                        self.last_token_time = time.monotonic()
                        answer.append(chunk, self.version, version_known=not self.withdrawn)
                        self.new_tokens += len(chunk.ids)
                        if answer.finish == "abort" and aborts == self._abort_count:
                            answer.finish = None
                            raise StreamInterruptedError(f"The server at {self.url} gave an answer up.")
                        if chunk.ids or answer.finish:
                            yield answer.take_delta()
                        if answer.finish:
                            self.finished += 1
                            return
            except EngineError as error:
                raise StreamInterruptedError(str(error)) from error
        raise StreamInterruptedError(f"The server at {self.url} ended an answer without saying how it finished.")

    async def generate(
        self, prompt: Ids, sampling: SamplingParams, *, on_start: Callable[[], None] | None = None
    ) -> Completion:
        """Sample one continuation. Cancelling the wait aborts the request."""
        completion: Completion | None = None
        async with aclosing(self.continue_completion(self.begin_completion(prompt, sampling, on_start))) as deltas:
            async for delta in deltas:
                completion = delta.completion
        assert completion is not None, "what does not end whole is an error"
        return completion

    async def stream(self, prompt: Ids, sampling: SamplingParams) -> AsyncGenerator[Delta, None]:
        """The same, as it comes."""
        async with aclosing(self.continue_completion(self.begin_completion(prompt, sampling))) as deltas:
            async for delta in deltas:
                yield delta

    async def abort(self) -> None:
        """End all that is under way: every waiting call returns what it has, finished by `abort`."""
        self._abort_count += 1
        await super().abort()

    async def get_version_label(self) -> str:
        """Which version of the weights it says that it holds."""
        return await self.backend.get_version_label(self._client)

    async def pause(self) -> None:
        """Stop between two tokens. Requests under way stay, and go on after `resume`."""
        await self.backend.pause(self._client)

    async def sleep(self) -> None:
        """Give the memory back. Nothing may be under way."""
        if self.active_requests:
            raise EngineError(f"The server cannot sleep while {self.active_requests} requests are under way.")
        await self.backend.sleep(self._client)

    async def wake(self) -> None:
        """Take the memory again."""
        await self.backend.wake(self._client)

    async def reset_prefix_cache(self) -> None:
        """Use no keys and values again that were computed before."""
        await self.backend.reset_prefix_cache(self._client)

    async def is_suspended(self) -> bool:
        """Whether its engine sleeps or is paused, as that says itself, when it comes to it."""
        return await self.backend.is_suspended(self._client)

    async def get_load(self) -> ServerLoad:
        """How much it has to do, as it says."""
        return await self.backend.get_load(self._client)

    # -- for whoever carries weights there ----------------------------------------------------------------------------

    async def drain(self, timeout: float = 600.0) -> None:
        """Wait until nothing is under way there."""
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            raise EngineError(
                f"{self.active_requests} requests are still under way at {self.url} after {timeout:g} s. Abort them, "
                f"or wait longer."
            ) from None

    async def load(self, directory: Path, version: int) -> None:
        """Have it compute with the weights in a directory that it can read. If that fails, it is out of rotation: which
        weights it has is not known."""
        self.withdraw()
        try:
            await self.backend.load(self._client, directory, version)
        except EtudeError:
            await self.abort_or_disconnect()
            raise
        self.record_version(version)

    async def abort_or_disconnect(self) -> None:
        """End what is under way there, as nobody knows what it computes with. A server that does not hear of that stays
        stopped, and who waits for it waits no longer."""
        try:
            for action in (
                partial(ServerClient.abort, self),
                self.resume,
            ):  # which nobody who waits there has asked for
                async with asyncio.timeout(CLEANUP_TIMEOUT):
                    await action()
        except (EtudeError, TimeoutError):
            await self.disconnect()

    async def disconnect(self) -> None:
        """Have done with what is under way there; another goes on with it."""
        await self._client.disconnect()

    # -- inside -------------------------------------------------------------------------------------------------------

    @contextmanager
    def _track_active(self) -> Iterator[None]:
        self.active_requests += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.active_requests -= 1
            if not self.active_requests:
                self._idle.set()
