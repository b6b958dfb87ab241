"""One request inside the embedded engine: its prompt, its tokens so far, and its place in the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from etude.chat.stop_strings import StopStringFilter
from etude.errors import ConfigError, DataError
from etude.images import PromptImages
from etude.records import Completion, SamplingParams
from etude.rollout.block_pool import NO_SLOT, ROOT
from etude.rollout.sampling import DrawnToken, Likeliest, SamplingState
from etude.rollout.served_images import TEXT_ALONE
from etude.support import Support
from etude.token_routes import TokenRoutes

if TYPE_CHECKING:
    from etude.chat import Tokenizer

Ids = NDArray[np.int32]
MAX_RESTARTS = 3
"""The most times that new weights begin an answer anew. After that it continues with later ones, so that it ends."""


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """The new tokens of a streamed request. The last delta has the finish reason."""

    ids: Ids  # [t] new tokens
    logp: NDArray[np.float32]  # [t]
    version: Ids  # [t] of the weights that drew each
    text: str
    """New text. It may lag behind the tokens by the part that could still become a stop string or a character."""
    finish_reason: str | None = None
    completion: Completion | None = None
    """The whole completion, in the last delta."""
    support: Support | None = None
    """The sets of tokens that could be drawn, if the request asks for them."""
    alternative_ids: Ids | None = None
    """[t, k]: the tokens that were likeliest to be drawn, if the request asks for them."""
    alternative_logp: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RequestImages:
    """The images of a prompt, as the engine computes them."""

    digests: tuple[str, ...]
    contents: tuple[bytes, ...]
    """The bytes of each image as they were encoded, to read its pixels from when they are needed."""
    pixel_bytes: tuple[int, ...]
    """The bytes of each image once it is resized."""
    image: NDArray[np.int64]  # [P]: the place of each token's image among the digests, −1 for none
    feature: NDArray[np.int64]  # [P]: its place among the image's features
    numbers: NDArray[np.int32]
    """A number below 0 for each image, which no other image of the engine has."""
    axes: NDArray[np.int64] | None = None  # [3, P]: the time, row and column of each token, for models that have them
    shift: int = 0
    """The difference between the position of a token after the prompt and its place."""
    reach: NDArray[np.int64] | None = None
    """[P]: the number of tokens that each token sees, where those of an image see all of it; None if none sees later
    tokens."""
    in_windows: bool = False
    """Only in layers with a window a token sees later ones."""

    def keys(self, prompt: Ids) -> Ids:
        """[P] → [P]: return the ids, of image tokens the image's number."""
        return np.where(self.image >= 0, self.numbers[self.image], prompt)

    def positions(self, start: int, stop: int) -> NDArray[np.int64]:
        """[3, stop − start]: return the positions of these tokens of the prompt and its answer, in three axes."""
        places = np.arange(start, stop)
        if self.axes is None:
            return np.stack([places] * 3)
        prompt = self.axes[:, start:stop]
        return np.concatenate([prompt, np.stack([places[prompt.shape[1] :] + self.shift] * 3)], 1)

    def end_whole(self, start: int, stop: int, *, room: bool) -> int:
        """Return the end of a part of the prompt, `stop` or before, so that it cuts no image that must be whole.

        room: the part may go beyond `stop` if the image that it begins with does.
        """
        if self.reach is None or not start < stop < len(self.reach) or self.reach[stop - 1] == stop:
            return stop
        whole = np.flatnonzero(self.reach[start:stop] <= stop)
        if len(whole):
            return start + int(whole[-1]) + 1
        return int(self.reach[start]) if room else start


class Request:
    """A prompt that is being continued. After it was submitted, only the engine's thread uses it."""

    def __init__(
        self,
        prompt: Ids,
        sampling: SamplingParams,
        *,
        limit: int,
        vocab_size: int,
        tokenizer: Tokenizer | None,
        images: RequestImages | None = None,
        listener: Callable[[Delta], None] | None = None,
        on_start: Callable[[], None] | None = None,
    ) -> None:
        self.sampling = sampling
        self.images = images
        self.prompt_length = len(prompt)
        self.limit = min(limit, len(prompt) + sampling.max_tokens)
        """The length at which it is cut off."""
        self.tokens = np.empty(self.limit, dtype=np.int32)  # its context, of which the first `length` are set
        self.tokens[: self.prompt_length] = prompt
        self.keys = self.tokens
        """The numbers that its blocks in the cache are found by: its tokens, but numbers of images for image tokens."""
        if images is not None:
            self.keys = self.tokens.copy()
            self.keys[: self.prompt_length] = images.keys(prompt)
        self.computed = 0  # tokens whose keys and values are in the cache
        self.blocks: list[int] = []  # of the cache, in order
        self.registered_blocks = 0  # how many of its blocks are registered
        self.node = ROOT  # where its registered blocks end
        self.version = -1  # of the weights with which its first block was computed
        self.slot = -1  # its row in the engine's block table while it runs, and the slot of its states
        self.state_slot = NO_SLOT  # where its states are when its next work begins
        self.stop_ids = frozenset(sampling.stop_ids) | frozenset(tokenizer.eos_ids if tokenizer else ())
        matcher = None
        if sampling.grammar is not None:
            if tokenizer is None:
                raise ConfigError("An engine without a tokenizer cannot hold an answer to a grammar.")
            matcher = tokenizer.grammars.matcher(sampling.grammar)
        self.sampling_state = SamplingState(sampling, prompt, vocab_size, self.stop_ids, matcher)
        self.future: Future[Completion] = Future()
        self.future.set_running_or_notify_cancel()
        self._tokenizer = tokenizer
        self._listener = listener
        self._on_start = on_start
        self._restarts = 0
        self._drop_tokens()

    def _drop_tokens(self) -> None:
        """Begin with the prompt alone."""
        self.length = self.prompt_length
        self._drawn: list[DrawnToken] = []
        self._versions: list[int] = []
        self._text = ""
        self._emitted = 0, 0  # tokens and characters in earlier deltas
        self._stops = StopStringFilter(self.sampling.stop)
        needs_text = self._tokenizer is not None and (bool(self.sampling.stop) or self._listener is not None)
        self._stream = self._tokenizer.decode_stream() if self._tokenizer is not None and needs_text else None

    def restart(self) -> bool:
        """Drop its tokens, to draw them anew by the same random numbers. Return False if it must keep them.

        It keeps them after `MAX_RESTARTS`, or if a reader has some of them already.
        """
        if self._restarts == MAX_RESTARTS or self._emitted[0]:
            return False
        if self.generated:
            self._restarts += 1
            self._drop_tokens()
            self.sampling_state.restart(self.tokens[: self.prompt_length])
        return True

    @property
    def has_started(self) -> bool:
        """True once it had blocks in the cache, also while it waits after a preemption."""
        return self.version >= 0

    @property
    def reads_images(self) -> bool:
        """True while it needs the pixels of images: until its whole prompt is in the cache."""
        return self.images is not None and self.computed < self.prompt_length

    @property
    def generated(self) -> int:
        """The number of tokens that were drawn for it."""
        return self.length - self.prompt_length

    def mark_started(self) -> None:
        """Report that it has blocks in the cache, for the first time or after a preemption."""
        on_start = self._on_start
        self._on_start = None
        if on_start is not None:
            on_start()

    def append_token(self, drawn: DrawnToken, version: int) -> str | None:
        """Add a token. Return the finish reason if the request finished with it."""
        self.sampling_state.check_drawn(drawn)
        token = drawn.id
        self.tokens[self.length] = token
        self.keys[self.length] = token
        self.length += 1
        self._drawn.append(drawn)
        self._versions.append(version)
        self.sampling_state.record_token(token)
        finish_reason: str | None = None
        if token in self.stop_ids and self.generated > self.sampling.min_tokens:
            finish_reason = "stop"
        if self._stream is not None:
            self._add_text(self._stream.push([token]) if token not in self.stop_ids else "")
        if self._stops.stopped:
            finish_reason = "stop"
        elif finish_reason is None and self.length == self.limit:
            finish_reason = "length"
        if finish_reason is None:
            self._emit_delta(None)
        return finish_reason

    def finish(self, reason: str, routes: TokenRoutes | None = None) -> None:
        """Set the completion as the result. routes: the experts of its tokens, if it asks for them."""
        if self._stream is not None and not self._stops.stopped:
            self._add_text(self._stream.finish())
            self._text += self._stops.finish()
        elif self._stream is None and self._tokenizer is not None:
            has_stop_id = self.generated > 0 and int(self.tokens[self.length - 1]) in self.stop_ids
            self._text = self._tokenizer.decode(self.tokens[self.prompt_length : self.length - has_stop_id])
        top_ids, top_logp = _likeliest_columns([drawn.top for drawn in self._drawn])
        alternative_ids, alternative_logp = _likeliest_columns([drawn.alternatives for drawn in self._drawn])
        completion = Completion(
            ids=self.tokens[self.prompt_length : self.length],
            logp=np.array([drawn.logp for drawn in self._drawn], dtype=np.float32),
            raw_logp=np.array([drawn.raw_logp for drawn in self._drawn], dtype=np.float32),
            version=np.array(self._versions, dtype=np.int32),
            finish_reason=reason,
            text=self._text,
            top_ids=top_ids,
            top_logp=top_logp,
            support=Support.build([drawn.allowed for drawn in self._drawn]),
            alternative_ids=alternative_ids,
            alternative_logp=alternative_logp,
            routes=routes,
        )
        self._emit_delta(completion)
        self.future.set_result(completion)

    def fail(self, error: BaseException) -> None:
        """Set the error as the result, unless there is a result already."""
        if not self.future.done():
            self.future.set_exception(error)

    def _add_text(self, text: str) -> None:
        """Add this text, up to a stop string. A stop string that ends within `min_tokens` does not count."""
        self._text += self._stops.push(text, can_stop=self.generated > self.sampling.min_tokens)

    def _emit_delta(self, completion: Completion | None) -> None:
        """Pass the tokens since the last delta to the listener."""
        if self._listener is None:
            return
        tokens, text = self.generated, len(self._text)
        ids = self.tokens[self.prompt_length + self._emitted[0] : self.length].copy()
        since = self._drawn[self._emitted[0] :]
        alternative_ids, alternative_logp = _likeliest_columns([drawn.alternatives for drawn in since])
        self._listener(
            Delta(
                ids,
                np.array([drawn.logp for drawn in since], dtype=np.float32),
                np.array(self._versions[self._emitted[0] :], dtype=np.int32),
                self._text[self._emitted[1] :],
                completion.finish_reason if completion else None,
                completion,
                Support.build([drawn.allowed for drawn in since]),
                alternative_ids,
                alternative_logp,
            )
        )
        self._emitted = tokens, text


def _likeliest_columns(entries: Sequence[Likeliest | None]) -> tuple[Ids | None, NDArray[np.float32] | None]:
    """[t] → [t, k], [t, k]: return the ids and the log-probs of all tokens; None if they were not asked for."""
    asked = [entry for entry in entries if entry is not None]
    if not asked:
        return None, None
    return np.array([ids for ids, _ in asked], np.int32), np.array([logp for _, logp in asked], np.float32)


def check_request(
    prompt: Ids,
    sampling: SamplingParams,
    *,
    vocab_size: int,
    context_length: int,
    cache_tokens: int,
    keeps_versions: bool = False,
    keeps_routes: bool = False,
    images: PromptImages | None = None,
) -> None:
    """Refuse, in a sentence, a request that does not fit the vocabulary, the context or the cache (in tokens).

    keeps_versions: the engine has an adapter for each version that a request may name. keeps_routes: it has the experts
    of each token.
    """
    if sampling.routes_start is not None and not keeps_routes:
        raise DataError(
            "The experts of each token were asked for (`routes_start`), and this engine does not record them. An "
            "embedded engine does if it was made with `records_routes=True`, servers if the run replays routes."
        )
    if sampling.version is not None and not keeps_versions:
        raise DataError(
            f"Policy version {sampling.version} was asked for, and this engine has its newest weights only. Only "
            "servers with `rollout.adapters=only` have several versions."
        )
    if len(prompt) == 0:
        raise DataError("The prompt is empty. A model continues at least one token.")
    unknown = {
        "The prompt": prompt[(prompt < 0) | (prompt >= vocab_size)].tolist(),
        "logit_bias": [token for token in sampling.logit_bias if not 0 <= token < vocab_size],
    }
    for source, tokens in unknown.items():
        if tokens:
            raise DataError(f"{source} has the token id {tokens[0]}; the model knows 0 to {vocab_size - 1}.")
    image_tokens = 0 if images is None else sum(span.stop - span.start for span in images.spans)
    if image_tokens and len(prompt) >= context_length:
        raise DataError(
            f"The prompt has {len(prompt):,} tokens, {image_tokens:,} of them of images, and the model's context is "
            f"{context_length:,}. Lower `vision.max_pixels`, or send fewer images."
        )
    if len(prompt) >= context_length:
        raise DataError(
            f"The prompt has {len(prompt)} tokens, and the model's context is {context_length}: nothing could follow "
            f"it. Filter or truncate long prompts."
        )
    if min(len(prompt) + sampling.max_tokens, context_length) > cache_tokens:
        raise DataError(
            f"A prompt of {len(prompt)} tokens and up to {sampling.max_tokens} new ones do not fit into the cache, "
            f"which holds {cache_tokens} tokens. Raise the engine's kv_gib, or ask for fewer tokens."
        )


def refuse_images(images: PromptImages | None, reason: str = TEXT_ALONE) -> None:
    """Refuse images in a sentence, which is for a model that takes text alone by default."""
    if images is not None and images.spans:
        raise DataError(reason)


def check_scored_prompt(ids: Ids, *, vocab_size: int, context_length: int) -> None:
    """Refuse, in a sentence, a prompt that does not fit the vocabulary or the context."""
    if not 1 <= len(ids) <= context_length:
        raise DataError(
            f"The prompt has {len(ids)} tokens, and this model scores 1 to {context_length}. Send a shorter one."
        )
    unknown = ids[(ids < 0) | (ids >= vocab_size)]
    if len(unknown):
        raise DataError(f"The prompt has the token id {unknown[0]}; the model knows 0 to {vocab_size - 1}.")
