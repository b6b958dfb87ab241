"""An answer of servers, as far as it is sampled: its request, its tokens, and the request for the rest.

It belongs to no server. If a server breaks off, another one continues: its prompt is the original prompt with all
tokens so far, and its token limits are that much lower.

No token gets a version that is newer than the weights that drew it. A token that was drawn before new weights came may
arrive after the server has their version. So the first read after a new version gets the older one. A report of the
server replaces these versions.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from etude.chat.stop_strings import StopStringFilter
from etude.errors import DataError
from etude.images import PromptImages
from etude.protocols import Ids
from etude.records import FINISH_REASONS, Completion, SamplingParams
from etude.rollout.reported_sets import GrammarSets, Likeliest, TokenRules, active_filters
from etude.rollout.request import Delta
from etude.rollout.server_backend import StreamChunk, VersionSpan, samples_model_distribution
from etude.support import EncodedSet, Support
from etude.token_routes import TokenRoutes

if TYPE_CHECKING:
    from etude.chat import Tokenizer
    from etude.chat.grammar import GrammarCompiler


class PartialCompletion:
    """One answer. Used on one event loop."""

    def __init__(
        self,
        prompt: Ids,
        sampling: SamplingParams,
        *,
        images: PromptImages | None = None,
        limit: int,
        vocab_size: int,
        tokenizer: Tokenizer | None,
        grammar_end_ids: Sequence[int] = (),
        on_start: Callable[[], None] | None = None,
    ) -> None:
        """limit: the length, prompt included, at which the answer is cut off. vocab_size: the model knows the ids below
        it. grammar_end_ids: see `ServerBackend`."""
        self.prompt = np.asarray(prompt, dtype=np.int32)
        self.sampling = sampling
        self.images = images
        self.kept_version = sampling.version
        """The version of all its tokens, of which servers keep an adapter; None if the newest weights draw."""
        self.max_new_tokens = min(sampling.max_tokens, limit - len(prompt))
        self.stop_ids = sorted({*sampling.stop_ids, *(tokenizer.eos_ids if tokenizer else ())})
        self._rules = TokenRules(sampling, self.stop_ids, vocab_size)
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._grammar_end_ids = grammar_end_ids
        self._on_start = on_start
        self.is_streamed = False
        """True if a reader gets the answer as it comes."""
        self.restart()

    def restart(self) -> None:
        """Drop all tokens, and start again."""
        self.finish: str | None = None
        self.ids: list[int] = []
        self._logp: list[float] = []
        self._versions: list[int] = []
        self.version_uncertain = False
        """True if some tokens came while new weights arrived, or first after that, and no server has reported yet which
        weights drew them."""
        self._top: list[Likeliest] = []
        self._allowed: list[EncodedSet | None] = []
        grammar = self.sampling.grammar
        self._sets = None if grammar is None else GrammarSets(self.grammars, grammar, self._vocab_size)
        self._checked = 0  # tokens that the grammar was found to allow
        self._alternatives: list[Likeliest] = []
        self._routes: TokenRoutes | None = None
        self._knows_raw_logp = True  # false if the server was asked for the likeliest token alone
        self._segment_start = 0
        self._read = 0  # the last read of the connection that brought tokens
        self._read_version = self._last_seen_version = 0  # of tokens in that read; of the server when it came
        self._emitted = 0, 0  # tokens and characters in earlier deltas
        self._text = ""
        self._stops = StopStringFilter(self.sampling.stop)
        self._stream = self._tokenizer.decode_stream() if self._tokenizer is not None else None

    @property
    def version(self) -> int | None:
        """The version of the weights that drew the last token; None before the first."""
        return self._versions[-1] if self._versions else None

    @property
    def grammars(self) -> GrammarCompiler:
        """The grammars, as its servers compile them."""
        assert self._tokenizer is not None, "without a tokenizer a request with a grammar is refused"
        return self._tokenizer.grammars.ending_with(self._grammar_end_ids)

    def remaining_request(self, version: int) -> tuple[Ids, SamplingParams]:
        """Return the prompt and the sampling parameters for the rest. Later tokens belong to the next server, whose
        weights have this version now."""
        self._segment_start = num_generated = len(self.ids)
        self._read = 0
        self._read_version = version
        self._last_seen_version = version
        seed = self.sampling.seed
        sampling = replace(
            self.sampling,
            max_tokens=self.max_new_tokens - num_generated,
            min_tokens=max(0, min(self.sampling.min_tokens, self.max_new_tokens) - num_generated),
            seed=None if seed is None else seed + num_generated,  # else the same random numbers would come again
            version=self.kept_version,
        )
        return np.concatenate([self.prompt, np.array(self.ids, dtype=np.int32)]), sampling

    def append(self, chunk: StreamChunk, version: int, *, version_known: bool = True) -> None:
        """Add a chunk. version: that of its server now. version_known: false if the server is getting other weights."""
        on_start = self._on_start
        self._on_start = None
        if on_start is not None:
            on_start()
        if self.kept_version is not None:  # a server reports the label of its newest adapter
            version = self.kept_version
            version_known = True
            chunk.version_spans = None
        self._append_sets(chunk)
        for token in chunk.ids:
            self.ids.append(token)
            if self._stream is not None:
                self._append_text(self._stream.push([token]) if token not in self.stop_ids else "")
        self._logp += chunk.logp
        self._top += chunk.top_logprobs
        if chunk.ids:
            drawn_by = self._oldest_version(chunk.read, version)
            self._versions += [drawn_by] * len(chunk.ids)
            self.version_uncertain |= not version_known or drawn_by != version
        self._apply_spans(chunk.version_spans or ())
        self._routes = chunk.routes or self._routes
        if chunk.finish_reason is not None:
            self.finish = chunk.finish_reason if chunk.finish_reason in FINISH_REASONS else "abort"
        elif self._stops.stopped:  # a stop string that spans two servers, of which the second does not know
            self.finish = "stop"

    def _append_sets(self, chunk: StreamChunk) -> None:
        """Add what else could have been drawn at the places of a chunk, of which no token is added yet."""
        for place, token in enumerate(chunk.ids):
            position = len(self.ids) + place
            reported = None if chunk.sets is None else chunk.sets[place]
            self._allowed.append(self._rules.allowed(position, token, reported))
            if self.sampling.alternatives:
                likeliest = chunk.alternatives[place]
                self._alternatives.append(self._rules.alternatives(position, token, likeliest))
        if chunk.sets is not None and self.sampling.temperature == 0:
            self._knows_raw_logp = False

    def _oldest_version(self, read: int, version: int) -> int:
        """Return the oldest version that may have drawn the tokens of a read: the server's when the read before came.

        For the first read, it is the server's version when the request was sent.
        """
        if read != self._read:
            self._read = read
            self._read_version = self._last_seen_version
            self._last_seen_version = version
        return self._read_version

    def _apply_spans(self, spans: Sequence[VersionSpan]) -> None:
        """Replace the versions of tokens by those that the server reports. A label without a number tells nothing."""
        for label, start, end in spans:
            if label.isdecimal():
                stop = min(self._segment_start + end, len(self.ids))
                for position in range(self._segment_start + start, stop):
                    self._versions[position] = int(label)
        if spans:
            self.version_uncertain = False

    def finish_if_complete(self) -> bool:
        """Return True if the answer is complete as it stands, though no server has reported that."""
        if (
            self.finish is None
            and self.ids
            and self.ids[-1] in self.stop_ids
            and len(self.ids) > self.sampling.min_tokens
        ):
            self.finish = "stop"
        elif self.finish is None and len(self.ids) >= self.max_new_tokens:
            self.finish = "length"
        return self.finish is not None

    async def next_delta(self) -> Delta:
        """Return the tokens since the last delta, as `take_delta` does; raise if one does not belong to the grammar.

        Nobody reads the sets of an answer before its end unless it is streamed.
        """
        if self.sampling.grammar is not None and (self.is_streamed or self.finish is not None):
            await asyncio.to_thread(self._apply_grammar)
        return self.take_delta()

    def _apply_grammar(self) -> None:
        """Check new tokens by the grammar; fill in its sets where they are asked for and nothing narrower is known."""
        assert self._sets is not None, "the answer has a grammar"
        since = self._checked
        self._checked = len(self.ids)
        sets = self._sets.extend(self.ids[since:])
        if self.sampling.support and self.sampling.temperature > 0 and not active_filters(self.sampling):
            self._allowed[since:] = sets

    def take_delta(self) -> Delta:
        """Return the tokens since the last delta, with the whole completion once it has finished."""
        if self.finish is not None and self._stream is not None and not self._stops.stopped:
            self._append_text(self._stream.finish())
            self._text += self._stops.finish()
        tokens, text = self._emitted
        self._emitted = len(self.ids), len(self._text)
        alternative_ids, alternative_logp = likeliest_columns(self._alternatives[tokens:], self.sampling.alternatives)
        return Delta(
            ids=np.array(self.ids[tokens:], dtype=np.int32),
            logp=np.array(self._behavior_logp(self._logp[tokens:]), dtype=np.float32),
            version=np.array(self._versions[tokens:], dtype=np.int32),
            text=self._text[text:],
            finish_reason=self.finish,
            completion=None if self.finish is None else self._completion(self.finish),
            support=Support.build(self._allowed[tokens:]),
            alternative_ids=alternative_ids,
            alternative_logp=alternative_logp,
        )

    def _append_text(self, text: str) -> None:
        self._text += self._stops.push(text, can_stop=len(self.ids) > self.sampling.min_tokens)

    def _behavior_logp(self, logp: list[float]) -> list[float]:
        """Return log-probs of the distribution that was drawn from: a greedy token has 0."""
        return logp if self.sampling.temperature > 0 else [0.0] * len(logp)

    def _completion(self, finish: str) -> Completion:
        top_ids, top_logp = likeliest_columns(self._top, self.sampling.top_logprobs)
        alternative_ids, alternative_logp = likeliest_columns(self._alternatives, self.sampling.alternatives)
        computed = len(self.prompt) + len(self.ids) - 1
        if self._routes is not None and not self._routes.covers(computed):
            raise DataError(
                f"A server reports routes of {len(self._routes.experts)} tokens from {self._routes.start} on, and "
                f"the prompt and the answer have {computed} computed tokens. Set `train.router_replay=r2`."
            )
        stochastic = replace(self.sampling, temperature=self.sampling.temperature or 1.0)
        knows_raw_logp = self._knows_raw_logp and samples_model_distribution(stochastic)
        return Completion(
            ids=np.array(self.ids, dtype=np.int32),
            logp=np.array(self._behavior_logp(self._logp), dtype=np.float32),
            raw_logp=np.array(self._logp, dtype=np.float32) if knows_raw_logp else None,
            version=np.array(self._versions, dtype=np.int32),
            finish_reason=finish,
            text=self._text,
            top_ids=top_ids,
            top_logp=top_logp,
            support=Support.build(self._allowed),
            alternative_ids=alternative_ids,
            alternative_logp=alternative_logp,
            routes=self._routes,
        )


def likeliest_columns(
    entries: Sequence[Likeliest], width: int
) -> tuple[NDArray[np.int32] | None, NDArray[np.float32] | None]:
    """[T] → [T, k], [T, k]: return the ids and the log-probs, with -inf where there are fewer. None: none are asked."""
    if not width:
        return None, None
    padded = [(entry + [(entry[-1][0], -math.inf)] * width)[:width] for entry in entries]
    ids = [[id for id, _ in entry] for entry in padded]
    logp = [[logp for _, logp in entry] for entry in padded]
    return np.array(ids, np.int32).reshape(-1, width), np.array(logp, np.float32).reshape(-1, width)
