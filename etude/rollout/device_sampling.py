"""Drawing tokens on the device: the tokens of `sampling.sample_tokens`, in operations that a CUDA graph can record.

Nothing is read back, and no shape or loop depends on data. Only the logarithm of a drawn token's probability is left to
the host, where it has the same bits for any company.

Top-k and top-p find a threshold by halving, among the 32-bit patterns of the values. Some thirty reductions replace a
sort, and equal values are kept or dropped together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
class DrawParameters:
    """The parameters of each row. Rows that need less have values without effect."""

    seeds: Tensor  # [N] int64: the bits of an unsigned seed
    positions: Tensor  # [N] int64: of the tokens to draw
    temperature: Tensor  # [N] float32
    top_k: Tensor  # [N] int64; 0 for none
    top_p: Tensor  # [N] float32; 1 for none
    log_min_p: Tensor  # [N] float32; −∞ for none
    penalty: Tensor  # [N] float32; 1 for none
    seen: Tensor  # [N, V] bool: the tokens that the penalty applies to
    biased_ids: Tensor  # [N, 8] int64; the rest names a token with the bias 0
    bias: Tensor  # [N, 8] float32
    end_ids: Tensor  # [N, 8] int64; the rest repeats one
    banned: Tensor  # [N] bool: end tokens cannot be drawn

    @classmethod
    def of(
        cls, states: Sequence[SamplingState], generated: Sequence[int], positions: Sequence[int], vocab_size: int
    ) -> DrawParameters:
        """Return the parameters of requests, of which each `can_draw_on_device`. generated: their new tokens."""
        settings = [state.sampling for state in states]
        biased_ids = torch.zeros(len(states), MAX_IDS, dtype=torch.int64)
        bias = torch.zeros(len(states), MAX_IDS)
        end_ids = torch.zeros(len(states), MAX_IDS, dtype=torch.int64)
        seen = torch.zeros(len(states), vocab_size, dtype=torch.bool)
        for row, state in enumerate(states):
            biased_ids[row, : len(state.biased_ids)] = state.biased_ids
            bias[row, : len(state.bias)] = state.bias
            if len(state.stop_ids):
                end_ids[row] = state.stop_ids[0]
                end_ids[row, : len(state.stop_ids)] = state.stop_ids
            if state.seen is not None:
                seen[row] = state.seen
        return cls(
            seeds=torch.tensor([_as_signed(state.seed) for state in states]),
            positions=torch.tensor(positions),
            temperature=torch.tensor([each.temperature for each in settings]),
            top_k=torch.tensor([each.top_k for each in settings]),
            top_p=torch.tensor([each.top_p for each in settings]),
            log_min_p=torch.tensor([math.log(each.min_p) if each.min_p > 0 else -math.inf for each in settings]),
            penalty=torch.tensor([each.repetition_penalty for each in settings]),
            seen=seen,
            biased_ids=biased_ids,
            bias=bias,
            end_ids=end_ids,
            banned=torch.tensor(
                [
                    count < each.min_tokens and len(state.stop_ids) > 0
                    for count, each, state in zip(generated, settings, states, strict=True)
                ]
            ),
        )


@dataclass(frozen=True, eq=False)
class Drawn:
    """The drawn tokens, on the device."""

    ids: Tensor  # [N] int64
    probability: Tensor  # [N] float32: under the sampling distribution; 1 if the temperature is 0
    raw_logp: Tensor  # [N] float32: log-probs under the model's own distribution


def can_draw_on_device(state: SamplingState) -> bool:
    """Return true if the rows of a request can be drawn on the device. The others report more than a token."""
    sampling = state.sampling
    few_ids = len(state.biased_ids) <= MAX_IDS and len(state.stop_ids) <= MAX_IDS
    return few_ids and not sampling.top_logprobs and not sampling.support


def draw(logits: Tensor, parameters: DrawParameters, *, filtered: bool) -> Drawn:
    """[N, V] → draw one token for each row.

    filtered: true if a row has more than a temperature. Then all rows pass through all filters, which leave the rows
    without parameters as they are.
    """
    raw = logits.float()
    adjusted = _adjust(raw, parameters) if filtered else raw
    temperature = parameters.temperature
    scaled = adjusted / torch.where(temperature > 0, temperature, 1.0)[:, None]
    if filtered:
        scaled = _filter(scaled, parameters)
    probabilities = torch.softmax(scaled, -1)
    ids = inverse_cdf(probabilities, uniform(parameters.seeds, parameters.positions))
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


def _adjust(logits: Tensor, parameters: DrawParameters) -> Tensor:
    """Apply penalty, bias, and ban of end tokens."""
    penalty = parameters.penalty[:, None]
    punished = torch.where(logits > 0, logits / penalty, logits * penalty)
    logits = torch.where(parameters.seen & (penalty != 1), punished, logits)
    logits = logits.scatter_add(1, parameters.biased_ids, parameters.bias)
    limit = torch.where(parameters.banned, -math.inf, math.inf)[:, None].expand(-1, MAX_IDS)
    return logits.scatter_reduce(1, parameters.end_ids, limit, "amin")


def _filter(logits: Tensor, parameters: DrawParameters) -> Tensor:
    """Return the logits with −∞ for the tokens that top-k, top-p and min-p drop."""
    top_k = parameters.top_k
    last_kept = kth_largest(logits, top_k.clamp(1, logits.shape[1]))
    dropped = (top_k > 0)[:, None] & (ordered_bits(logits) < last_kept[:, None])
    logits = logits.masked_fill(dropped, -math.inf)
    top_p = parameters.top_p
    probabilities = torch.softmax(logits, -1)
    floor = nucleus_floor(probabilities, top_p)
    dropped = (top_p < 1)[:, None] & (probabilities.view(torch.int32) < floor[:, None])
    logits = logits.masked_fill(dropped, -math.inf)
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + parameters.log_min_p[:, None], -math.inf)


def _finish(value: Tensor) -> Tensor:
    """Apply SplitMix64's finisher. Products and sums of signed integers have the bits of unsigned ones."""
    value = (value ^ _shift_right(value, 30)) * _FIRST_FACTOR
    value = (value ^ _shift_right(value, 27)) * _SECOND_FACTOR
    return value ^ _shift_right(value, 31)


def _shift_right(value: Tensor, by: int) -> Tensor:
    """Shift as unsigned integers are shifted: zeros come in."""
    return (value >> by) & ((1 << (64 - by)) - 1)


def _as_signed(value: int) -> int:
    return value - 2 * _SIGN if value >= _SIGN else value
