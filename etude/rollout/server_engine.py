"""A server as a rollout engine: requests over its public endpoints, on one event loop.

    consumes       prompts and sampling parameters, checked before they are sent: a server may crash on a bad id
    produces       answers, each token with its log-prob and the version of the weights that drew it
    waits for      the server
    unblocked by   its answer, or its silence, which the read timeout bounds

The weight sender is the only writer of its weights. It takes the server out of rotation (`withdraw`), sends the weights
to any endpoint (`post`), and labels their version (`set_version`), which puts the server back.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from etude.errors import ConfigError, DataError, EngineError, EtudeError
from etude.images import PromptImages, check_spans
from etude.protocols import Ids, RunningPolicy
from etude.records import Completion, PromptScores, SamplingParams
from etude.rollout.grammar_trial import GrammarTrial
from etude.rollout.held_adapters import HeldAdapters
from etude.rollout.partial_completion import PartialCompletion
from etude.rollout.reported_sets import check_drawn
from etude.rollout.request import Delta, check_request, check_scored_prompt, refuse_images
from etude.rollout.served_images import SentImages, ServedImages
from etude.rollout.server_backend import ServerBackend
from etude.rollout.server_client import ServerClient
from etude.running_time import running_time

if TYPE_CHECKING:
    from etude.chat import Tokenizer

ABORT_INTERVAL = 0.1
"""Seconds after which requests that reached the server late are ended too."""

CLEANUP_TIMEOUT = 10.0
"""Seconds for each cleanup request to a server that failed."""
HEALTH_TIMEOUT = 5.0
"""Seconds for the reply to a health check."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a served model, read from its `config.json`. No weights are loaded."""

    vocab_size: int
    """The model knows ids from 0 to one below this. A server may crash on any other."""
    context_length: int
    kv_values_per_token: int
    """The count of numbers in the keys and values of one token."""

    @classmethod
    def read(cls, directory: Path) -> ModelShape:
        """Read the shape of the model in a directory."""
        try:
            config: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
            config = config.get("text_config") or config
            heads = int(config["num_attention_heads"])
            values = 2 * int(config.get("num_key_value_heads") or heads) * _head_dim(config)
            if config.get("kv_lora_rank"):  # latent attention: a server keeps the latent keys alone
                values = int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"])
            return cls(
                int(config["vocab_size"]), int(config["max_position_embeddings"]), _attending_layers(config) * values
            )
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(
                f"{directory / 'config.json'} does not have the sizes of a model ({error!r}). Name a Hugging "
                f"Face model directory."
            ) from error

    def tokens_in(self, gib: float, bytes_of_value: int) -> int:
        """Return how many tokens have their keys and values in `gib` GiB."""
        return int(gib * 2**30) // (self.kv_values_per_token * bytes_of_value)


def _head_dim(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _attending_layers(config: dict[str, Any]) -> int:
    """Return the number of layers that keep keys and values; other kinds have states of one size."""
    kinds = config.get("layer_types") or [""] * int(config["num_hidden_layers"])
    return sum(kind not in ("linear_attention", "conv", "mamba", "mlp", "moe") for kind in kinds)


class StreamInterruptedError(EngineError):
    """A server that broke off an answer, or could not begin it. The answer keeps its tokens so far."""


class RequestWithdrawnError(StreamInterruptedError):
    """A request that was ended for new weights, and is to begin anew."""


class ServerEngine(ServerClient):
    """One server. `is_up` is true while it is known to answer; `withdrawn` while it is out of rotation."""

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
        """ranks: the server processes that hold a share of the weights. key: its API key."""
        super().__init__(url, backend, ranks=ranks, key=key)
        self.shape = shape
        self.tokenizer = tokenizer
        self.adapters = HeldAdapters(self)
        self._grammar_trial = GrammarTrial(self)
        self._sent_images = SentImages()
        self.is_up = False
        self.last_token_time = 0.0
        """The time of the last drawn token."""
        self.active_requests = self.new_tokens = self.prompt_tokens = self.finished = 0
        self._context_length = shape.context_length
        self._abort_count = 0
        self._interrupting = False
        self._salt = _make_salt(0)
        self._idle = asyncio.Event()
        self._idle.set()

    # -- for any caller -----------------------------------------------------------------------------------------------

    async def connect(self) -> str:
        """Check that the server answers and has a supported version; return the version."""
        server_version = await self.backend.check_version(self)
        context_length = self.backend.context_length(json.loads(await self.get("/v1/models")))
        self._context_length = min(self.shape.context_length, context_length)
        if self.backend.images is not None and self.backend.images.is_joined:
            await self.backend.check_images(self)
        self.is_up = True
        return server_version

    async def is_healthy(self) -> bool:
        """Return True if the server reports health in time."""
        try:
            await self.get(self.backend.health_path, timeout=HEALTH_TIMEOUT)
        except (EngineError, DataError):
            return False
        return True

    def begin_completion(
        self,
        prompt: Ids,
        sampling: SamplingParams,
        images: PromptImages | None = None,
        on_start: Callable[[], None] | None = None,
    ) -> PartialCompletion:
        """Return an empty answer to this request; raise if the server cannot compute it."""
        ids = np.asarray(prompt, dtype=np.int32)
        if self.backend.images is None:
            refuse_images(images, self.backend.refusal)
        elif images is not None:
            check_spans("The prompt", images.spans, len(ids))
        check_request(
            ids,
            sampling,
            vocab_size=self.shape.vocab_size,
            context_length=self._context_length,
            cache_tokens=self._context_length,
            keeps_versions=self.backend.adapters > 0,
            keeps_routes=self.backend.recording.routes is not None,
            images=images,
        )
        if sampling.stop and self.tokenizer is None:
            raise ConfigError("An engine without a tokenizer cannot look for stop strings: give stop_ids instead.")
        self.backend.check_sampling(sampling)
        return PartialCompletion(
            ids,
            sampling,
            images=images,
            limit=self._context_length,
            vocab_size=self.shape.vocab_size,
            tokenizer=self.tokenizer,
            grammar_end_ids=self.backend.grammar_end_ids,
            on_start=on_start,
        )

    async def continue_completion(self, answer: PartialCompletion) -> AsyncGenerator[Delta, None]:
        """Continue an answer from its last token. Leaving the iteration aborts the request.

        Raises `StreamInterruptedError` if the server breaks off. That includes an answer that the server aborts by
        itself, for want of memory, or because weights arrived in part.
        """
        if answer.sampling.grammar is not None:
            await self._try_grammars(answer)
        version, salt = self.version, self._salt
        if self.backend.adapters:
            version = self.version if answer.kept_version is None else answer.kept_version
            answer.kept_version = version
            salt = self.adapters.salt(version)
        ids, sampling = answer.remaining_request(version)
        aborts = self._abort_count
        self.prompt_tokens += len(ids)
        with self._track_active():
            try:
                stream = self.backend.stream(
                    self, ids.tolist(), sampling, answer.stop_ids, salt, self._served_images(answer, salt)
                )
                async with aclosing(stream) as chunks:
                    async for chunk in chunks:
                        self.last_token_time = running_time()
                        if chunk.sets is not None:
                            server_name = f"{self.backend.package} at {self.url}"
                            check_drawn(server_name, chunk.ids, chunk.sets, len(answer.ids))
                        answer.append(chunk, self.version, version_known=not self.withdrawn)
                        self.new_tokens += len(chunk.ids)
                        if answer.finish == "abort" and aborts == self._abort_count:
                            answer.finish = None
                            reason = RequestWithdrawnError if self._interrupting else StreamInterruptedError
                            raise reason(f"The server at {self.url} aborted an answer.")
                        if answer.finish:
                            break
                        if chunk.ids:
                            yield await answer.next_delta()
            except StreamInterruptedError:
                raise
            except EngineError as error:
                raise StreamInterruptedError(str(error)) from error
        if not answer.finish:
            raise StreamInterruptedError(f"The server at {self.url} ended an answer without saying how it finished.")
        self.finished += 1
        yield await answer.next_delta()

    async def generate(
        self,
        prompt: Ids,
        sampling: SamplingParams,
        *,
        images: PromptImages | None = None,
        on_start: Callable[[], None] | None = None,
    ) -> Completion:
        """Sample one continuation. Cancelling the wait aborts the request."""
        completion: Completion | None = None
        partial = self.begin_completion(prompt, sampling, images, on_start)
        async with aclosing(self.continue_completion(partial)) as deltas:
            async for delta in deltas:
                completion = delta.completion
        assert completion is not None, "an answer that does not end whole is an error"
        return completion

    async def stream(
        self, prompt: Ids, sampling: SamplingParams, *, images: PromptImages | None = None
    ) -> AsyncGenerator[Delta, None]:
        """Do the same, and yield the answer as it comes."""
        answer = self.begin_completion(prompt, sampling, images)
        answer.is_streamed = True
        async with aclosing(self.continue_completion(answer)) as deltas:
            async for delta in deltas:
                yield delta

    async def score(self, prompt: Ids, top: int) -> PromptScores:
        """Return the log-probs of a prompt's tokens, and the `top` likeliest tokens at each place."""
        ids = np.asarray(prompt, dtype=np.int32)
        # a server samples a token behind every prompt
        check_scored_prompt(ids, vocab_size=self.shape.vocab_size, context_length=self._context_length - 1)
        with self._track_active():
            scored = await self.backend.score(self, ids.tolist(), top)
        if len(scored.logp) != len(ids) - 1:
            raise EngineError(f"The server at {self.url} scored {len(scored.logp)} of {len(ids) - 1} tokens.")
        shape = (len(ids) - 1, top)
        top_ids = [[token for token, _ in each] for each in scored.likeliest]
        top_logp = [[logp for _, logp in each] for each in scored.likeliest]
        return PromptScores(
            np.array(scored.logp, np.float32),
            np.array(top_ids, np.int32).reshape(shape),
            np.array(top_logp, np.float32).reshape(shape),
        )

    async def abort(self) -> None:
        self._abort_count += 1
        await super().abort()

    async def pause(self) -> None:
        """Stop between two tokens. Requests under way stay, and continue after `resume`."""
        await self.backend.pause(self)

    async def sleep(self) -> None:
        """Give the memory back. No request may be under way."""
        if self.active_requests:
            raise EngineError(f"The server cannot sleep while {self.active_requests} requests are under way.")
        await self.backend.sleep(self)

    async def wake(self) -> None:
        """Allocate the memory again."""
        await self.backend.wake(self)

    async def wake_cache(self) -> None:
        """Allocate the memory of keys and values again; see `ServerBackend.wake_cache`."""
        await self.backend.wake_cache(self)

    # -- for the weight sender ----------------------------------------------------------------------------------------

    async def drain(self, timeout: float = 600.0) -> None:
        """Wait until no request is under way."""
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            raise EngineError(
                f"{self.active_requests} requests are still under way at {self.url} after {timeout:g} s. Abort them, "
                f"or raise the timeout."
            ) from None

    async def interrupt(self, timeout: float = 600.0) -> None:
        """End all requests under way, and wait until they have ended. The router has them begin anew.

        The server must be out of rotation. A request may still be on its way there, so the server is asked again.
        """
        self._interrupting = True
        try:
            async with asyncio.timeout(timeout):
                while self.active_requests:
                    await super().abort()
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._idle.wait(), ABORT_INTERVAL)
        except TimeoutError:
            raise EngineError(
                f"{self.active_requests} requests are still under way at {self.url}, {timeout:g} s after they were "
                f"ended. Look at the server's log, or raise the timeout."
            ) from None
        finally:
            self._interrupting = False

    async def settle(self, running: RunningPolicy, timeout: float) -> None:
        """Have the requests under way end before new weights, if that is the policy."""
        if running == "finish":
            await self.drain(timeout)
        elif running == "restart":
            await self.interrupt(timeout)

    def record_version(self, version: int) -> None:
        """Do as the base class, and share nothing cached with earlier requests, also those of an earlier run."""
        super().record_version(version)
        self._salt = _make_salt(version)

    async def load(
        self, directory: Path, version: int, running: RunningPolicy = "continue", timeout: float = 600.0
    ) -> None:
        """Load the weights in a directory that the server can read.

        If that fails, the server stays out of rotation: its weights are unknown. running, timeout: see `settle`.
        """
        self.withdraw()
        try:
            await self.settle(running, timeout)
            await self.backend.load(self, directory, version)
        except EtudeError:
            await self.abort_or_disconnect()
            raise
        self.record_version(version)

    async def load_adapters(self, wanted: Mapping[int, Path]) -> None:
        """Hold exactly these adapters, by version; the newest is the server's version. Requests go on meanwhile.

        If that fails, the server keeps its version, and its requests go on with the adapters that they have.
        """
        await self.adapters.hold(wanted)
        await self.set_version(max(wanted))

    def relocate(self, url: str) -> None:
        super().relocate(url)
        self.adapters.forget()
        self._sent_images.clear()

    async def close(self) -> None:
        """Close the connections, and end the threads that read images."""
        await super().close()
        self.backend.close()

    async def abort_or_disconnect(self) -> None:
        """End the requests under way, since their weights are unknown.

        If the server does not reply, it stays paused, and the connections are broken off, so that no caller waits.
        """
        try:
            # no caller asked for this abort, so it is not counted
            for action in (partial(ServerClient.abort, self), self.resume):
                async with asyncio.timeout(CLEANUP_TIMEOUT):
                    await action()
        except (EtudeError, TimeoutError):
            await self.disconnect()

    # -- private ------------------------------------------------------------------------------------------------------

    def _served_images(self, answer: PartialCompletion, salt: str) -> ServedImages | None:
        """Return the images of an answer's prompt. salt: a text for the weights that draw it."""
        support = self.backend.images
        if support is None or answer.images is None or not answer.images.spans:
            return None
        weights = f"-{salt}" if support.options.trains_tower else ""
        return ServedImages(answer.images, support, weights, self._sent_images)

    async def _try_grammars(self, answer: PartialCompletion) -> None:
        """Find out once whether the server holds answers to grammars; raise if it does not."""
        try:
            with self._track_active():
                await self._grammar_trial.run(answer.grammars)
        except EngineError as error:
            raise StreamInterruptedError(str(error)) from error

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


def _make_salt(version: int) -> str:
    """Return a text that no other weights have: also an earlier run may have sent a version of this number."""
    return f"version-{version}-{secrets.token_hex(8)}"
