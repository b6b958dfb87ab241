"""Sampling: the distributions are those of the parameters, and a row is independent of its batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from etude.records import SamplingParams
from etude.rollout.sampling import SampledTokens, SamplingState, sample_tokens, uniform_numbers
from etude.support import decode_set

V = 300


def drawing(
    prompt: tuple[int, ...] = (1,), ends: tuple[int, ...] = (), vocabulary: int = V, **parameters: Any
) -> SamplingState:
    return SamplingState(SamplingParams(**parameters), np.array(prompt, dtype=np.int32), vocabulary, frozenset(ends))


def many(logits: Tensor, one: SamplingState, count: int = 20000, generated: int = 0) -> SampledTokens:
    """Return the same row sampled at many places."""
    return sample_tokens(logits.expand(count, -1), [one] * count, [generated] * count, range(count))


def frequencies(drawn: SampledTokens, vocabulary: int) -> Tensor:
    return torch.bincount(torch.tensor(drawn.ids), minlength=vocabulary).double() / len(drawn.ids)


def skewed(vocabulary: int = V, seed: int = 0) -> Tensor:
    return torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(seed)) * 2


def assert_draws_from(drawn: SampledTokens, probabilities: Tensor) -> None:
    """Assert by a chi-square test over frequent tokens that samples follow the distribution, without impossible
    tokens."""
    observed, count = frequencies(drawn, len(probabilities)), len(drawn.ids)
    assert not bool(observed[probabilities == 0].any())
    often = probabilities * count > 10
    excess = ((observed - probabilities)[often] ** 2 / probabilities[often]).sum() * count
    cells = int(often.sum())
    assert float(excess) < cells + 5 * math.sqrt(2 * cells) + 5


def test_uniforms_are_functions_of_seed_and_position_alone() -> None:
    together = uniform_numbers([1, 2, 3], [7, 7, 8])
    assert [uniform_numbers([s], [p])[0] for s, p in ((1, 7), (2, 7), (3, 8))] == together.tolist()
    assert len(set(uniform_numbers([5] * 1000, range(1000)).tolist())) == 1000


def test_uniforms_are_even_over_places_and_over_seeds() -> None:
    for numbers in (uniform_numbers([3] * 50000, range(50000)), uniform_numbers(range(50000), [3] * 50000)):
        counts = np.histogram(numbers, 50, (0, 1))[0]
        assert ((counts - 1000) ** 2 / 1000).sum() < 50 + 5 * 10
        assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.02


def test_plain_sampling_draws_from_the_softmax() -> None:
    logits = skewed()
    probabilities = torch.softmax(logits[0].double(), -1)
    drawn = many(logits, drawing(seed=1))
    assert_draws_from(drawn, probabilities)
    assert np.allclose(drawn.logp, probabilities[drawn.ids].log(), atol=1e-6)
    assert drawn.logp == drawn.raw_logp


@pytest.mark.parametrize("vocabulary", [1, 2, 127, 128, 129, 1000])
def test_samples_cover_a_vocabulary_of_any_size(vocabulary: int) -> None:
    logits = torch.zeros(1, vocabulary)
    drawn = many(logits, drawing(vocabulary=vocabulary, prompt=(0,), seed=2))
    assert_draws_from(drawn, torch.full((vocabulary,), 1 / vocabulary, dtype=torch.float64))


def test_temperature_top_k_top_p_and_min_p_restated() -> None:
    logits = skewed() / 4
    scaled = torch.softmax(logits[0].double() / 0.7, -1)
    by_rank = scaled.sort(descending=True)
    allowed = torch.zeros(V, dtype=torch.bool)
    allowed[by_rank.indices[:40]] = True
    after_k = torch.where(allowed, scaled, 0) / scaled[allowed].sum()
    ordered = after_k.sort(descending=True)
    needed = int((ordered.values.cumsum(-1) < 0.8).sum()) + 1
    nucleus = torch.zeros(V, dtype=torch.bool)
    nucleus[ordered.indices[:needed]] = True
    final = torch.where(nucleus & (after_k >= 0.3 * after_k.max()), after_k, 0)
    final = final / final.sum()
    drawn = many(logits, drawing(seed=3, temperature=0.7, top_k=40, top_p=0.8, min_p=0.3))
    assert 2 < int((final > 0).sum()) < needed
    assert_draws_from(drawn, final)
    assert np.allclose(drawn.logp, final[drawn.ids].log(), atol=1e-5)
    assert np.allclose(drawn.raw_logp, torch.log_softmax(logits[0].double(), -1)[drawn.ids], atol=1e-5)


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.97, 0.9999])
def test_a_nucleus_of_any_width_is_found(top_p: float) -> None:
    """A flat distribution needs nearly the whole vocabulary, more than the first narrow search covers."""
    logits = torch.linspace(0, 0.1, 5000)[None].float()
    values = torch.softmax(logits[0].double(), -1).sort(descending=True).values
    needed = int((values.cumsum(-1) < top_p).sum()) + 1
    drawn = many(logits, drawing(vocabulary=5000, seed=4, top_p=top_p), 300)
    mass = values[:needed].sum()
    assert min(drawn.ids) >= 5000 - needed - 1
    exact = (torch.softmax(logits[0].double(), -1) / mass).log()[drawn.ids]
    assert np.allclose(drawn.logp, exact, atol=1e-3)


def test_tokens_tied_at_a_cutoff_are_all_kept() -> None:
    logits = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0]])
    drawn = many(logits, drawing(vocabulary=5, seed=5, top_k=2), 2000)
    assert set(drawn.ids) == {0, 1, 2, 3}


def test_greedy_takes_the_likeliest_and_reports_the_models_log_prob() -> None:
    logits = skewed()
    drawn = many(logits, drawing(temperature=0.0), 3)
    assert drawn.ids == [int(logits.argmax())] * 3 and drawn.logp == [0.0] * 3
    assert np.allclose(drawn.raw_logp, float(torch.log_softmax(logits, -1).max()))


def test_repetition_penalty_applies_to_prompt_and_output() -> None:
    logits = torch.tensor([[2.0, -1.0, 1.5, 0.0]])
    one = drawing(prompt=(0, 1), vocabulary=4, temperature=0.0, repetition_penalty=2.0)
    assert many(logits, one, 1).ids == [2]  # 2.0 counts as 1.0
    one.record_token(2)
    assert many(logits, one, 1).ids == [0]
    sampled = drawing(prompt=(0, 1), vocabulary=4, seed=1, repetition_penalty=2.0)
    assert_draws_from(many(logits, sampled), torch.softmax(torch.tensor([1.0, -2.0, 1.5, 0.0]).double(), -1))


def test_logit_bias_and_banned_end_tokens_apply() -> None:
    logits = torch.zeros(1, 4)
    biased = drawing(vocabulary=4, seed=1, ends=(3,), logit_bias={1: 2.0, 2: -math.inf}, min_tokens=2, max_tokens=9)
    banned = torch.softmax(torch.tensor([0.0, 2.0, -math.inf, -math.inf]).double(), -1)
    allowed = torch.softmax(torch.tensor([0.0, 2.0, -math.inf, 0.0]).double(), -1)
    assert_draws_from(many(logits, biased, generated=1), banned)
    assert_draws_from(many(logits, biased, generated=2), allowed)


def test_the_likeliest_tokens_are_reported_at_the_temperature_before_the_cut() -> None:
    logits = skewed()
    drawn = many(logits, drawing(seed=6, temperature=2.0, top_k=1, top_logprobs=5), 1)
    likeliest = torch.log_softmax(logits[0] / 2, -1).topk(5)
    assert drawn.top[0][0] == likeliest.indices.tolist()
    assert np.allclose(drawn.top[0][1], likeliest.values, atol=1e-6)
    assert drawn.logp == [0.0]


def test_the_tokens_that_could_be_drawn_are_reported() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0, -9.0]])

    def reported(generated: int = 0, ends: tuple[int, ...] = (), **parameters: Any) -> list[int] | None:
        state = drawing(ends=ends, vocabulary=5, support=True, seed=3, **parameters)
        encoded = sample_tokens(logits, [state], [generated], [1]).support.get(0)
        return None if encoded is None else np.flatnonzero(decode_set(encoded, 5)).tolist()

    assert reported() is None
    assert reported(temperature=0.5) is None
    assert reported(top_k=3) == [0, 1, 2]
    assert reported(top_p=0.7) == [0, 1]
    assert reported(min_p=0.1) == [0, 1, 2]
    assert reported(top_p=0.7, temperature=3.0) == [0, 1, 2], "the cut is that of the tempered distribution"
    assert reported(temperature=0.0) == [0]
    assert reported(temperature=0.0, top_k=3, logit_bias={0: -math.inf}) == [1]
    assert reported(logit_bias={1: -math.inf}) == [0, 2, 3, 4]
    assert reported(logit_bias={4: 20.0}, top_k=1) == [4]
    assert reported(min_tokens=2, ends=(0,), generated=1) == [1, 2, 3, 4]
    assert reported(min_tokens=2, ends=(0,), generated=2) is None
    silent = sample_tokens(logits, [drawing(vocabulary=5, top_k=3)], [0], [1])
    assert silent.support == {}, "nobody asked"


def test_a_row_is_sampled_the_same_in_any_batch() -> None:
    """Bit for bit, in both dtypes: plain rows beside greedy, cut, biased and penalized ones."""
    kinds: list[dict[str, Any]] = [
        {"seed": 1},
        {"seed": 2, "temperature": 0.6},
        {"temperature": 0.0},
        {"seed": 3, "top_p": 0.9},
        {"seed": 4, "top_k": 7, "top_logprobs": 3},
        {"seed": 5, "min_p": 0.2, "repetition_penalty": 1.3},
        {"seed": 6, "logit_bias": {5: 1.0}, "top_p": 0.3, "top_k": 50},
    ]
    rows = [dict(kind) for kind in kinds * 5]
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.cat([skewed(3001, seed) for seed in range(len(rows))]).to(dtype)
        drawings = [drawing(vocabulary=3001, **row) for row in rows]
        places = [17 * row % 29 for row in range(len(rows))]
        together = sample_tokens(logits, drawings, [0] * len(rows), places)
        for row in range(len(rows)):
            alone = sample_tokens(logits[row : row + 1], [drawings[row]], [0], [places[row]])
            assert alone.ids[0] == together.ids[row]
            assert alone.logp[0] == together.logp[row] and alone.raw_logp[0] == together.raw_logp[row]
            assert alone.top.get(0) == together.top.get(row)


def test_without_a_seed_two_requests_draw_differently() -> None:
    logits = torch.zeros(1, V)
    assert many(logits, drawing(), 20).ids != many(logits, drawing(), 20).ids


def test_a_row_without_possible_tokens_has_no_log_prob() -> None:
    """Greedy or not, a row without possible tokens has no likeliest one."""
    nothing = dict.fromkeys(range(V), -math.inf)
    for parameters in ({"logit_bias": nothing, "temperature": 0.0}, {"logit_bias": nothing}, {"temperature": 1e-40}):
        drawn = sample_tokens(skewed().expand(2, -1), [drawing(**parameters), drawing()], [0, 0], [5, 5])
        assert math.isnan(drawn.logp[0]) and math.isfinite(drawn.logp[1])
