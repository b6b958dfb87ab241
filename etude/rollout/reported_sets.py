"""The tokens that could be drawn at each place of an answer that a server writes.

Which tokens `top_p`, `top_k` and `min_p` leave depends on the server's own logits, so the server alone can report them.
Other sets follow from the request: end tokens before `min_tokens`, banned tokens, and greedy answers, which leave one
token. These are filled in here, and taken out of what a server reports. The sets of a grammar follow from the tokens of
the answer. The server's llguidance may be of another version: a token that it allows and this one does not is an error
of the server.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from etude.chat.grammar import GrammarCompiler, GrammarMatcher
from etude.errors import DataError, EngineError
from etude.records import SamplingParams
from etude.support import EncodedSet, SetKind, encode_ids, encode_set
from etude.token_routes import ServedRoutes

BAN = -100.0
"""The logit bias that servers take for a ban: no token is ever drawn with it."""
Likeliest: TypeAlias = list[tuple[int, float]]
"""Tokens and their log-probs, the likeliest first."""


@dataclass(frozen=True)
class Recording:
    """The report of servers about each token of a run, besides its log-prob."""

    top_k: int = 0
    """The `top_k` of answers that are trained on, if the tokens that could be drawn are reported; else 0."""
    alternatives: int = 0
    """The number of likeliest tokens, with their log-probs."""
    routes: ServedRoutes | None = None
    """The form of the experts that each token went through, if they are reported."""

    @classmethod
    def of(cls, sampling: SamplingParams, routes: ServedRoutes | None = None) -> Recording:
        """Return what is reported for a run whose answers are sampled so. routes: their form, if they are replayed."""
        return cls(sampling.top_k if needs_report(sampling) else 0, sampling.alternatives, routes)

    @property
    def has_sets(self) -> bool:
        """True if the tokens that could be drawn are reported."""
        return self.top_k > 0


LOGPROBS_ALONE = Recording()
"""The recording of a run whose answers are drawn from all tokens."""


def active_filters(sampling: SamplingParams) -> dict[str, float]:
    """Return the options, by name, whose sets depend on the logits. A greedy answer has none."""
    values = {"top_p": sampling.top_p, "top_k": sampling.top_k, "min_p": sampling.min_p}
    neutral = SamplingParams()
    on = sampling.temperature > 0
    return {name: value for name, value in values.items() if on and value != getattr(neutral, name)}


def needs_report(sampling: SamplingParams) -> bool:
    """Return True if the request asks for sets that only the server knows."""
    return sampling.support and bool(active_filters(sampling))


class TokenRules:
    """The tokens that the rules of a request leave at each place of its answer."""

    def __init__(self, sampling: SamplingParams, stop_ids: Sequence[int], vocab_size: int) -> None:
        self._sampling = sampling
        self._vocab_size = vocab_size
        self._banned = {token for token, bias in sampling.logit_bias.items() if bias <= BAN}
        self._stop_ids = set(stop_ids)

    def allowed(self, position: int, token: int, reported: Sequence[int] | None) -> EncodedSet | None:
        """Return the set at a place of the answer. None: the whole vocabulary, or the request asks for none.

        token: the drawn token. reported: the set of the server, before bans.
        """
        if not self._sampling.support:
            return None
        if self._sampling.temperature == 0:
            return SetKind.KEPT, np.array([token], np.int32)
        banned = self._banned_at(position)
        if reported is not None:
            return encode_ids([id for id in reported if id not in banned], self._vocab_size)
        left = np.ones(self._vocab_size, np.bool_)
        left[list(banned)] = False
        return encode_set(left)

    def alternatives(self, position: int, token: int, reported: Likeliest) -> Likeliest:
        """Return the likeliest tokens at a place of the answer: those that cannot be drawn have log-prob -inf."""
        width = self._sampling.alternatives
        if self._sampling.temperature == 0:
            return [(token, 0.0), *[(token, -math.inf)] * (width - 1)]
        banned = self._banned_at(position)
        ruled = [(id, -math.inf if id in banned else logp) for id, logp in reported]
        return sorted(ruled, key=lambda entry: -entry[1])

    def _banned_at(self, position: int) -> set[int]:
        return self._banned | self._stop_ids if position < self._sampling.min_tokens else self._banned


class GrammarSets:
    """The sets that a grammar leaves at the places of one answer, found as its tokens come.

    A token takes 0.13 ms of a core with a vocabulary of 151,000. Any thread may be used, one at a time.
    """

    def __init__(self, grammars: GrammarCompiler, grammar: str, vocab_size: int) -> None:
        self._grammars = grammars
        self._grammar = grammar
        self._vocab_size = vocab_size
        self._matcher: GrammarMatcher | None = None
        self._places = 0

    def extend(self, ids: Sequence[int]) -> list[EncodedSet | None]:
        """Return the sets at the places of the next tokens; raise if a token is not in its set."""
        self._matcher = self._matcher or self._grammars.matcher(self._grammar)
        sets: list[EncodedSet | None] = []
        for token in ids:
            allowed = self._matcher.mask(self._vocab_size)
            if not allowed[token]:
                raise EngineError(
                    f"The server's grammar engine allows token {token} at place {self._places} of an answer, and the "
                    "grammar does not. Use the tested version of the server, or choose `rollout=embedded`."
                )
            sets.append(encode_set(allowed))
            self._matcher.push(token)
            self._places += 1
        return sets


def check_drawn(server: str, ids: Sequence[int], sets: Sequence[Sequence[int]], position: int) -> None:
    """Refuse a drawn token that is not in the set that the server reports. position: the place of the first token."""
    for place, (token, allowed) in enumerate(zip(ids, sets, strict=True), position):
        if token not in allowed:
            raise DataError(
                f"{server} reports {len(allowed)} tokens that could be drawn at token {place} of an answer, and drew "
                f"{token}, which is not among them. Leave `top_p`, `top_k` and `min_p` out, or choose "
                "`rollout=embedded`."
            )
