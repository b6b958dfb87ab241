"""From logits to tokens, many rows at once, each row as if it were alone.

A token is drawn by inverting its row's cumulative distribution at one uniform number. That number comes from a
counter-based generator keyed by (seed, position of the token in its context). So a row's draws depend on nothing that
shares its batch, on no earlier call, and on no global state. The logits are changed in this order: repetition penalty,
bias, grammar, ban of end tokens up to `min_tokens`, temperature, top-k, top-p, min-p. The last three keep every token
that is as likely as the last one kept, so that the outcome depends on no order among equals.

Exponentials are computed by softmax kernels, which treat all rows the same, and logarithms of single numbers one by
one. Torch's elementwise kernels round the last few elements of a tensor differently, whichever rows those are.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.chat.grammar import GrammarMatcher
from etude.errors import DataError
from etude.records import SamplingParams
from etude.support import EncodedSet, encode_ids, encode_set

SUM_CHUNK = 128
"""The inverse is looked up first among sums of so many weights, then among the weights of one sum."""

_GOLDEN = 0x9E3779B97F4A7C15
_FULL = (1 << 64) - 1


def _splitmix64_finish(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply SplitMix64's finisher: a bijection of 64 bits that spreads every bit."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def uniform_numbers(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """Return one number in [0, 1) for each (seed, position), a function of those two alone."""
    keys = _splitmix64_finish(np.array(seeds, dtype=np.uint64) + np.uint64(_GOLDEN))
    counters = (np.array(positions, dtype=np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    return (_splitmix64_finish(_splitmix64_finish(keys + counters)) >> np.uint64(11)).astype(np.float64) * 2.0**-53


class SamplingState:
    """The sampling state of one request: its parameters, its seed, and the seen tokens if repetition is penalized."""

    def __init__(
        self,
        sampling: SamplingParams,
        prompt: NDArray[np.int32],
        vocab_size: int,
        stop_ids: frozenset[int],
        matcher: GrammarMatcher | None = None,
    ) -> None:
        """matcher: that of the request's grammar."""
        self.sampling = sampling
        self.matcher = matcher
        self.seed = (secrets.randbits(64) if sampling.seed is None else sampling.seed) & _FULL
        self.stop_ids = torch.tensor(sorted(token for token in stop_ids if token < vocab_size), dtype=torch.int64)
        self.seen = None if sampling.repetition_penalty == 1.0 else torch.zeros(vocab_size, dtype=torch.bool)
        self.restart(prompt)
        self.biased_ids = torch.tensor(list(sampling.logit_bias), dtype=torch.int64)
        self.bias = torch.tensor(list(sampling.logit_bias.values()), dtype=torch.float32)
        self.cut = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
        self.needs_adjustment = self.seen is not None or len(self.biased_ids) > 0 or matcher is not None
        self.never_modified = (
            not (self.cut or self.needs_adjustment or sampling.top_logprobs or sampling.alternatives)
            and sampling.temperature == 1.0
        )

    def restart(self, prompt: NDArray[np.int32]) -> None:
        """Drop the seen tokens after the prompt. The seed stays, so the same random numbers come again."""
        if self.matcher is not None:
            self.matcher.reset()
        if self.seen is not None:
            self.seen.zero_()
            self.seen[torch.from_numpy(prompt.astype(np.int64))] = True

    def is_unmodified(self, generated: int) -> bool:
        """Return True if the next token is drawn from the model's own distribution, with nothing else to report."""
        return self.never_modified and generated >= self.sampling.min_tokens

    def adjust_logits(self, logits: Tensor, generated: int) -> None:
        """Apply penalty, bias, grammar and banned end tokens to its own row [V], in place."""
        if self.seen is not None:
            seen = self.seen.to(logits.device)
            penalty = self.sampling.repetition_penalty
            logits.copy_(torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits))
        if len(self.biased_ids):
            logits[self.biased_ids.to(logits.device)] += self.bias.to(logits.device)
        may_end = generated >= self.sampling.min_tokens or not len(self.stop_ids)
        if self.matcher is not None:
            allowed = self.matcher.mask(len(logits))
            logits.masked_fill_(torch.from_numpy(~allowed).to(logits.device), -math.inf)
            allowed[self.stop_ids.numpy()] = False
            may_end = may_end or not allowed.any()  # the grammar has ended
        if not may_end:
            logits[self.stop_ids.to(logits.device)] = -math.inf

    def check_drawn(self, drawn: DrawnToken) -> None:
        """Raise the reason if there was no token to draw."""
        if self.matcher is not None:
            self.matcher.check()
        if math.isnan(drawn.logp):
            raise DataError(
                "There is no token to draw. logit_bias and the banned end tokens leave none, or they or a tiny "
                "temperature take the logits beyond float32. For greedy sampling set temperature to 0."
            )

    def record_token(self, token: int) -> None:
        """Record that this token was drawn."""
        if self.matcher is not None:
            self.matcher.push(token)
        if self.seen is not None:
            self.seen[token] = True


Likeliest: TypeAlias = tuple[list[int], list[float]]
"""Ids and log-probs, the likeliest first."""


class DrawnToken(NamedTuple):
    """A drawn token, with what was asked about it."""

    id: int
    logp: float
    raw_logp: float
    top: Likeliest | None
    allowed: EncodedSet | None
    """The tokens that could be drawn. None: the whole vocabulary, or nobody asked."""
    alternatives: Likeliest | None


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The drawn token of each row. These are lists, because each entry goes to another request."""

    ids: list[int]
    logp: list[float]
    """Log-probs under the sampling distribution; 0 (certain) if the temperature is 0."""
    raw_logp: list[float]
    """Log-probs under the model's own distribution."""
    top: dict[int, Likeliest]
    """For the rows that ask for them: the most likely tokens and their log-probs at the temperature, before any
    filter."""
    support: dict[int, EncodedSet | None]
    """For the rows that ask for them and are not drawn from the model's own distribution: the tokens that could be
    drawn. None: the whole vocabulary."""
    alternatives: dict[int, Likeliest]
    """For the rows that ask for them: the tokens that were likeliest to be drawn, and their log-probs."""

    def tokens(self) -> Iterator[DrawnToken]:
        """Yield all that is known of each row's token."""
        for row, (token, logp, raw_logp) in enumerate(zip(self.ids, self.logp, self.raw_logp, strict=True)):
            yield DrawnToken(
                token, logp, raw_logp, self.top.get(row), self.support.get(row), self.alternatives.get(row)
            )


def sample_tokens(
    logits: Tensor, states: Sequence[SamplingState], generated: Sequence[int], positions: Sequence[int]
) -> SampledTokens:
    """Draw one token for each row of logits [N, V].

    `generated` counts the new tokens of each request; `positions` are those of the tokens to draw.
    """
    uniform = torch.from_numpy(uniform_numbers([state.seed for state in states], positions)).to(logits.device)
    unmodified = [row for row, state in enumerate(states) if state.is_unmodified(generated[row])]
    if len(unmodified) == len(states):
        ids, probabilities = _sample_unmodified(logits, uniform)
        return SampledTokens(ids.tolist(), log_probs := log_probabilities(probabilities), log_probs, {}, {}, {})
    adjusted = sorted(set(range(len(states))) - set(unmodified))
    ids = torch.empty(len(states), dtype=torch.int64, device=logits.device)
    logp, raw_logp = torch.empty(2, len(states), device=logits.device)
    if unmodified:
        index = torch.tensor(unmodified, device=logits.device)
        ids[index], probabilities = _sample_unmodified(logits[index], uniform[index])
        logp[index] = raw_logp[index] = torch.tensor(log_probabilities(probabilities), device=logits.device)
    index = torch.tensor(adjusted, device=logits.device)
    rows = _AdjustedRows(logits[index].float(), [states[row] for row in adjusted], [generated[row] for row in adjusted])
    ids[index], logp[index], raw_logp[index] = rows.sample(uniform[index])
    top = {adjusted[row]: likeliest for row, likeliest in rows.top.items()}
    support = {adjusted[row]: encoded for row, encoded in rows.support.items()}
    alternatives = {adjusted[row]: likeliest for row, likeliest in rows.alternatives.items()}
    return SampledTokens(ids.tolist(), logp.tolist(), raw_logp.tolist(), top, support, alternatives)


def _sample_unmodified(logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    probabilities = torch.softmax(logits.float(), -1)
    ids = inverse_cdf(probabilities, uniform)
    return ids, probabilities.gather(1, ids[:, None])[:, 0]


def log_probabilities(probabilities: Tensor) -> list[float]:
    """Return their logarithms, rounded to float32; nan for a probability that is not positive."""
    exact = [math.log(probability) if probability > 0 else math.nan for probability in probabilities.tolist()]
    rounded: list[float] = np.array(exact, dtype=np.float32).tolist()
    return rounded


class _AdjustedRows:
    """Rows that are drawn from something other than the model's own distribution."""

    def __init__(self, raw: Tensor, states: list[SamplingState], generated: list[int]) -> None:
        self.raw = raw
        self.states = states
        logits = raw
        if any(d.needs_adjustment or count < d.sampling.min_tokens for d, count in zip(states, generated, strict=True)):
            logits = raw.clone()
            for row, state in enumerate(states):
                state.adjust_logits(logits[row], generated[row])
        self.logits = logits
        self.top: dict[int, Likeliest] = {}
        self.support: dict[int, EncodedSet | None] = {}
        self.alternatives: dict[int, Likeliest] = {}

    def sample(self, uniform: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens, log-probs under the sampling distribution, and log-probs under the model."""
        samplings = [state.sampling for state in self.states]
        temperature = self._column([params.temperature for params in samplings])
        logits = self.logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
        for row, params in enumerate(samplings):
            if params.top_logprobs:
                self.top[row] = _likeliest(logits[row], params.top_logprobs)
        filtered = [row for row, state in enumerate(self.states) if state.cut]
        if filtered:
            index, kept = torch.tensor(filtered, device=logits.device), [samplings[row] for row in filtered]
            logits[index] = _filter_logits(
                logits[index],
                self._column([params.top_k for params in kept]),
                self._column([params.top_p for params in kept]),
                self._column([math.log(params.min_p) if params.min_p > 0 else -math.inf for params in kept]),
            )
        for row, params in enumerate(samplings):
            if params.alternatives:
                self.alternatives[row] = _likeliest(logits[row], params.alternatives)
        probabilities = torch.softmax(logits, -1)
        ids = inverse_cdf(probabilities, uniform)
        greedy = temperature == 0
        if bool(greedy.any()):
            ids = torch.where(greedy, self.logits.argmax(-1), ids)
        self._read_support(logits, ids, greedy)
        certain = greedy & (self.logits.amax(-1) > -math.inf)  # false too if the greatest is not a number
        chosen = torch.where(certain, 1.0, probabilities.gather(1, ids[:, None])[:, 0])
        return (
            ids,
            self._column(log_probabilities(chosen)),
            torch.log_softmax(self.raw, -1).gather(1, ids[:, None])[:, 0],
        )

    def _read_support(self, filtered: Tensor, ids: Tensor, greedy: Tensor) -> None:
        """Keep which tokens could be drawn, for the rows that ask. A greedy row could only give the token it gave."""
        asking = [row for row, state in enumerate(self.states) if state.sampling.support]
        if not asking:
            return
        masks = (filtered[asking] > -math.inf).cpu().numpy()
        drawn = ids[asking].tolist()
        certain = greedy[asking].tolist()
        for place, row in enumerate(asking):
            kept = encode_ids([drawn[place]], masks.shape[1]) if certain[place] else encode_set(masks[place])
            self.support[row] = kept

    def _column(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self.raw.device)


def _likeliest(logits: Tensor, count: int) -> Likeliest:
    """Return the likeliest tokens of a row [V], and their log-probs."""
    found = torch.log_softmax(logits, -1).topk(min(count, len(logits)))
    return found.indices.tolist(), found.values.tolist()


def _filter_logits(logits: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor) -> Tensor:
    """Return the logits [n, V] with -inf for the tokens that top-k, top-p and min-p drop."""
    max_top_k = int(top_k.max())
    if max_top_k:
        last_kept = (torch.where(top_k > 0, top_k, 1) - 1).clamp(max=logits.shape[1] - 1).long()
        values = logits.topk(min(max_top_k, logits.shape[1])).values.gather(1, last_kept[:, None])
        logits = logits.masked_fill((top_k[:, None] > 0) & (logits < values), -math.inf)
    if bool((top_p < 1).any()):
        probabilities = torch.softmax(logits, -1)
        floor = torch.where(top_p < 1, _nucleus_floor(probabilities, top_p), 0.0)
        logits = logits.masked_fill(probabilities < floor[:, None], -math.inf)
    if bool((log_min_p > -math.inf).any()):
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + log_min_p[:, None], -math.inf)
    return logits


def _nucleus_floor(probabilities: Tensor, top_p: Tensor) -> Tensor:
    """[n, V] → [n]: the probability of the least likely token in the smallest set of mass `top_p`."""
    floor = torch.empty_like(top_p)
    todo = torch.arange(len(top_p), device=top_p.device)
    width = min(SUM_CHUNK, probabilities.shape[1])
    while len(todo):
        values = probabilities[todo].topk(width).values
        mass = values.double().cumsum(-1) - values
        needed = mass < top_p[todo].double()[:, None]
        floor[todo] = torch.where(needed, values, math.inf).amin(-1)
        if width == probabilities.shape[1]:
            break
        todo = todo[needed.all(-1)]
        width = min(16 * width, probabilities.shape[1])
    return floor


def inverse_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """[N, V] weights, [N] in [0, 1) → [N]: the first token at which the running sum passes that share of the total.

    Each row goes through the same sums for any other rows. A token of weight zero is never returned.
    """
    vocab_size = weights.shape[1]
    num_chunked = vocab_size // SUM_CHUNK * SUM_CHUNK
    sums = weights[:, :num_chunked].view(len(weights), -1, SUM_CHUNK).sum(-1)
    if num_chunked < vocab_size:
        sums = torch.cat([sums, weights[:, num_chunked:].sum(-1, keepdim=True)], 1)
    running = sums.double().cumsum(-1)
    chunk, share = _first_passing(running, uniform)
    places = chunk[:, None] * SUM_CHUNK + torch.arange(SUM_CHUNK, device=weights.device)
    inside = weights.gather(1, places.clamp(max=vocab_size - 1)).masked_fill_(places >= vocab_size, 0.0)
    within, _ = _first_passing(inside.double().cumsum(-1), share)
    return chunk * SUM_CHUNK + within


def _first_passing(running: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Return where a running sum [N, m] first passes a share [N] of its end, and the share of that entry then left
    over."""
    end = running[:, -1]
    target = torch.minimum(share * end, torch.nextafter(end, torch.zeros_like(end)))
    index = (running <= target[:, None]).sum(-1, keepdim=True)
    sum_after = running.gather(1, index)
    sum_before = torch.where(index > 0, running.gather(1, (index - 1).clamp(min=0)), 0.0)
    remainder = (target[:, None] - sum_before) / (sum_after - sum_before)
    return index[:, 0], remainder[:, 0].clamp(0.0, 1.0)
