"""Drawing tokens on the device: the tokens of `sampling.sample_tokens`, in operations that a CUDA graph can record.

Nothing is read back, and no shape or loop depends on data. Only the logarithm of a drawn token's probability is left to
the host, where it has the same bits for any company.

Top-k and top-p find a threshold by halving, among the 32-bit patterns of the values. Some thirty reductions replace a
sort, and equal values are kept or dropped together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from etude.rollout.sampling import SamplingState, inverse_cdf

MAX_IDS = 8
"""The most biased tokens, and the most end tokens, of a row that is drawn on the device."""

_SIGN = 1 << 63
_GOLDEN = 0x9E3779B97F4A7C15 - 2 * _SIGN
_FIRST_FACTOR = 0xBF58476D1CE4E5B9 - 2 * _SIGN
_SECOND_FACTOR = 0x94D049BB133111EB - 2 * _SIGN
_BITS_OF_ONE = 0x3F800000


@dataclass(frozen=True, eq=False)
class FilterParameters:
    """The parameters of rows that have more than a temperature. Rows that need less have values without effect."""

    top_k: Tensor  # [N] int64; 0 for none
    top_p: Tensor  # [N] float32; 1 for none
    log_min_p: Tensor  # [N] float32; −∞ for none
    penalty: Tensor  # [N] float32; 1 for none
    seen: Tensor  # [N, V] bool: the tokens that the penalty applies to
    biased_ids: Tensor  # [N, 8] int64; the rest names a token with the bias 0
    bias: Tensor  # [N, 8] float32
    end_ids: Tensor  # [N, 8] int64; the rest repeats one
    ban_end: Tensor  # [N] int64: end tokens cannot be drawn at positions before this one

    @classmethod
    def of(cls, states: Sequence[SamplingState], prompt_lengths: Sequence[int], vocab_size: int) -> FilterParameters:
        """Return the parameters of requests; see `DrawParameters.of`."""
        settings = [state.sampling for state in states]
        biased_ids = torch.zeros(len(states), MAX_IDS, dtype=torch.int64)
        bias = torch.zeros(len(states), MAX_IDS)
        end_ids = torch.zeros(len(states), MAX_IDS, dtype=torch.int64)
        ban_end = torch.zeros(len(states), dtype=torch.int64)
        for row, state in enumerate(states):
            biased_ids[row, : len(state.biased_ids)] = state.biased_ids
            bias[row, : len(state.bias)] = state.bias
            if len(state.stop_ids):
                end_ids[row] = state.stop_ids[0]
                end_ids[row, : len(state.stop_ids)] = state.stop_ids
                ban_end[row] = prompt_lengths[row] + state.sampling.min_tokens
        return cls(
            top_k=torch.tensor([each.top_k for each in settings]),
            top_p=_column([each.top_p for each in settings]),
            log_min_p=_column([math.log(each.min_p) if each.min_p > 0 else -math.inf for each in settings]),
            penalty=_column([each.repetition_penalty for each in settings]),
            seen=_seen_tokens(states, vocab_size),
            biased_ids=biased_ids,
            bias=bias,
            end_ids=end_ids,
            ban_end=ban_end,
        )

    def map(self, change: Callable[[Tensor], Tensor]) -> FilterParameters:
        """Return the parameters, each changed."""
        return FilterParameters(
            top_k=change(self.top_k),
            top_p=change(self.top_p),
            log_min_p=change(self.log_min_p),
            penalty=change(self.penalty),
            seen=change(self.seen),
            biased_ids=change(self.biased_ids),
            bias=change(self.bias),
            end_ids=change(self.end_ids),
            ban_end=change(self.ban_end),
        )

    def tensors(self) -> list[Tensor]:
        """Return the parameters, in the order of the class."""
        return [getattr(self, field.name) for field in fields(self)]


@dataclass(frozen=True, eq=False)
class DrawParameters:
    """The parameters of each row."""

    seeds: Tensor  # [N] int64: the bits of an unsigned seed
    temperature: Tensor  # [N] float32
    filters: FilterParameters | None
    """None if no row has more than a temperature. Else all rows pass through all filters."""

    @classmethod
    def of(cls, states: Sequence[SamplingState], prompt_lengths: Sequence[int], vocab_size: int) -> DrawParameters:
        """Return the parameters of requests, of which each `can_draw_on_device`."""
        return cls(
            seeds=torch.tensor([_as_signed(state.seed) for state in states]),
            temperature=_column([state.sampling.temperature for state in states]),
            filters=FilterParameters.of(states, prompt_lengths, vocab_size),
        )

    def map(self, change: Callable[[Tensor], Tensor], *, filtered: bool = True) -> DrawParameters:
        """Return the parameters, each changed. filtered: with those of filters."""
        return DrawParameters(
            seeds=change(self.seeds),
            temperature=change(self.temperature),
            filters=self.filters.map(change) if filtered and self.filters is not None else None,
        )

    def select(self, rows: Tensor, *, filtered: bool) -> DrawParameters:
        """Return the parameters of these rows. filtered: with those of filters."""
        return self.map(lambda values: values.index_select(0, rows), filtered=filtered)

    def tensors(self) -> list[Tensor]:
        """Return the parameters, in the order of the classes."""
        return [self.seeds, self.temperature, *(self.filters.tensors() if self.filters is not None else ())]


@dataclass(frozen=True, eq=False)
class Drawn:
    """The drawn tokens, on the device."""

    ids: Tensor  # [N] int64
    probability: Tensor  # [N] float32: under the sampling distribution; 1 if the temperature is 0
    raw_logp: Tensor  # [N] float32: log-probs under the model's own distribution


def _seen_tokens(states: Sequence[SamplingState], vocab_size: int) -> Tensor:
    """[N, V]: the tokens that each request's penalty applies to; without memory if there is no penalty."""
    nothing = torch.zeros(1, 1, dtype=torch.bool).expand(len(states), vocab_size)
    if all(state.seen is None for state in states):
        return nothing
    return torch.stack([nothing[0] if state.seen is None else state.seen for state in states])


def can_draw_on_device(state: SamplingState) -> bool:
    """Return true if the rows of a request can be drawn on the device. The others report more than a token."""
    sampling = state.sampling
    few_ids = len(state.biased_ids) <= MAX_IDS and len(state.stop_ids) <= MAX_IDS
    whole_vocabulary = state.never_modified and not sampling.min_tokens
    return (
        few_ids
        and state.matcher is None
        and not sampling.top_logprobs
        and not sampling.alternatives
        and (not sampling.support or whole_vocabulary)
    )


def needs_filters(state: SamplingState, generated: int) -> bool:
    """Return true if a request's next token, after so many, is drawn by more than a temperature."""
    return state.cut or state.needs_adjustment or generated < state.sampling.min_tokens


def draw(logits: Tensor, parameters: DrawParameters, positions: Tensor) -> Drawn:
    """[N, V] → draw one token for each row. positions: [N] int64, of these tokens."""
    filters = parameters.filters
    raw = logits.float()
    adjusted = raw if filters is None else _adjust(raw, filters, positions)
    temperature = parameters.temperature
    scaled = adjusted / torch.where(temperature > 0, temperature, 1.0)[:, None]
    if filters is not None:
        scaled = _filter(scaled, filters)
    probabilities = torch.softmax(scaled, -1)
    ids = inverse_cdf(probabilities, uniform(parameters.seeds, positions))
    greedy = temperature == 0
    ids = torch.where(greedy, adjusted.argmax(-1), ids)
    certain = greedy & (adjusted.amax(-1) > -math.inf)
    probability = torch.where(certain, 1.0, probabilities.gather(1, ids[:, None])[:, 0])
    return Drawn(ids, probability, torch.log_softmax(raw, -1).gather(1, ids[:, None])[:, 0])


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """[N] int64, [N] int64 → [N] float64: the bits of `sampling.uniform_numbers`, computed in signed integers."""
    keys = _finish(seeds + _GOLDEN)
    counters = (positions + 1) * _GOLDEN
    return _shift_right(_finish(_finish(keys + counters)), 11).double() * 2.0**-53


def kth_largest(values: Tensor, k: Tensor) -> Tensor:
    """[N, V] float32, [N] from 1 to V → [N] int64: the k-th largest value of each row, as `ordered_bits`."""
    keys = ordered_bits(values)
    low = torch.full_like(k, -(1 << 31))
    high = torch.full_like(k, (1 << 31) - 1)
    for _ in range(32):
        middle = (low + high + 1) >> 1
        enough = (keys >= middle[:, None]).sum(-1) >= k
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle - 1)
    return low


def nucleus_floor(probabilities: Tensor, top_p: Tensor) -> Tensor:
    """[N, V], [N] → [N] int64: the least bit pattern above which the probabilities sum to less than top_p.

    The tokens with this pattern or a greater one are the smallest set of mass top_p.
    """
    bits = probabilities.contiguous().view(torch.int32)
    wide = probabilities.double()
    wanted = top_p.double()
    low = torch.zeros(len(bits), dtype=torch.int64, device=bits.device)
    high = torch.full_like(low, _BITS_OF_ONE)
    for _ in range(31):
        middle = (low + high) >> 1
        is_above = torch.where(bits > middle[:, None], wide, 0.0).sum(-1) < wanted
        low, high = torch.where(is_above, low, middle + 1), torch.where(is_above, middle, high)
    return high


def ordered_bits(values: Tensor) -> Tensor:
    """[…] float32 → […] int32: integers in the order of the values; both zeros are equal."""
    bits = (values + 0.0).view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _adjust(logits: Tensor, filters: FilterParameters, positions: Tensor) -> Tensor:
    """Apply penalty, bias, and ban of end tokens."""
    penalty = filters.penalty[:, None]
    punished = torch.where(logits > 0, logits / penalty, logits * penalty)
    logits = torch.where(filters.seen & (penalty != 1), punished, logits)
    logits = logits.scatter_add(1, filters.biased_ids, filters.bias)
    banned = positions < filters.ban_end
    limit = torch.where(banned, -math.inf, math.inf)[:, None].expand(-1, MAX_IDS)
    return logits.scatter_reduce(1, filters.end_ids, limit, "amin")


def _filter(logits: Tensor, filters: FilterParameters) -> Tensor:
    """Return the logits with −∞ for the tokens that top-k, top-p and min-p drop."""
    top_k = filters.top_k
    last_kept = kth_largest(logits, top_k.clamp(1, logits.shape[1]))
    dropped = (top_k > 0)[:, None] & (ordered_bits(logits) < last_kept[:, None])
    logits = logits.masked_fill(dropped, -math.inf)
    top_p = filters.top_p
    probabilities = torch.softmax(logits, -1)
    floor = nucleus_floor(probabilities, top_p)
    dropped = (top_p < 1)[:, None] & (probabilities.view(torch.int32) < floor[:, None])
    logits = logits.masked_fill(dropped, -math.inf)
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + filters.log_min_p[:, None], -math.inf)


def _finish(value: Tensor) -> Tensor:
    """Apply SplitMix64's finisher. Products and sums of signed integers have the bits of unsigned ones."""
    value = (value ^ _shift_right(value, 30)) * _FIRST_FACTOR
    value = (value ^ _shift_right(value, 27)) * _SECOND_FACTOR
    return value ^ _shift_right(value, 31)


def _shift_right(value: Tensor, by: int) -> Tensor:
    """Shift as unsigned integers are shifted: zeros come in."""
    return (value >> by) & ((1 << (64 - by)) - 1)


def _column(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def _as_signed(value: int) -> int:
    return value - 2 * _SIGN if value >= _SIGN else value
