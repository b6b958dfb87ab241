"""Tokens drawn on the device are those of the sampler, for all parameters, and nothing there waits for the host."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from etude.records import SamplingParams
from etude.rollout.device_sampling import (
    DrawParameters,
    can_draw_on_device,
    draw,
    kth_largest,
    nucleus_floor,
    ordered_bits,
    uniform,
)
from etude.rollout.sampling import SamplingState, sample_tokens, uniform_numbers
from tests.rollout.dispatched import NoWaiting

V = 300
SEEDS = 50
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "warm": {"temperature": 0.7},
    "greedy": {"temperature": 0.0},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.05, "temperature": 1.3},
    "penalty": {"repetition_penalty": 1.4},
    "bias": {"logit_bias": {0: 3.0, 7: -100.0, 299: 2.5}},
    "ban": {"min_tokens": 4},
    "all": {
        "temperature": 0.9,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 0.8,
        "logit_bias": {3: 1.5, 8: -1.0},
        "min_tokens": 2,
    },
}
TIED = st.sampled_from([-math.inf, -2.0, -0.0, 0.0, 1.0, 1.0000001, 3.5, math.inf])


def states_of(kind: dict[str, Any], first_seed: int, count: int) -> list[SamplingState]:
    prompt = np.array([1, 5, 9], dtype=np.int32)
    return [
        SamplingState(SamplingParams(seed=first_seed + row, **kind), prompt, V, frozenset({0, 2, 8}))
        for row in range(count)
    ]


def logits_of(count: int, *, tied: bool) -> Tensor:
    """Return random logits; tied: of a few values, so that every filter cuts between equals."""
    values = torch.randn(count, V, generator=torch.Generator().manual_seed(3)) * 2
    return (values * 2).round() / 2 if tied else values


@pytest.mark.parametrize("tied", [False, True])
def test_the_tokens_are_those_of_the_sampler(tied: bool) -> None:
    """Rows of all kinds are drawn together, as an engine would, and all of them pass through all filters."""
    states = [state for index, kind in enumerate(KINDS.values()) for state in states_of(kind, 100 * index, SEEDS)]
    count = len(states)
    logits = logits_of(count, tied=tied)
    generated, positions = [row % 6 for row in range(count)], [3 + row % 6 for row in range(count)]
    assert all(can_draw_on_device(state) for state in states)
    expected = sample_tokens(logits, states, generated, positions)
    drawn = draw(logits, DrawParameters.of(states, [3] * count, V), torch.tensor(positions))
    assert drawn.ids.tolist() == expected.ids
    torch.testing.assert_close(drawn.probability.log(), torch.tensor(expected.logp), atol=2e-6, rtol=0)
    torch.testing.assert_close(drawn.raw_logp, torch.tensor(expected.raw_logp), atol=2e-6, rtol=0)


def test_the_short_way_without_filters_draws_the_same_tokens() -> None:
    states = [state for kind in ("plain", "warm", "greedy") for state in states_of(KINDS[kind], 7, SEEDS)]
    logits, positions = logits_of(len(states), tied=False), list(range(len(states)))
    parameters = DrawParameters.of(states, positions, V)
    rows = torch.arange(len(states))
    short, long = (
        draw(logits, parameters.select(rows, filtered=filtered), torch.tensor(positions)) for filtered in (False, True)
    )
    assert torch.equal(short.ids, long.ids) and torch.equal(short.probability, long.probability)
    assert short.ids.tolist() == sample_tokens(logits, states, [5] * len(states), positions).ids


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**40)), min_size=1, max_size=20))
def test_uniform_numbers_have_the_same_bits(keys: list[tuple[int, int]]) -> None:
    seeds, positions = [seed for seed, _ in keys], [position for _, position in keys]
    signed = torch.from_numpy(np.array(seeds, dtype=np.uint64).view(np.int64))
    assert uniform(signed, torch.tensor(positions)).tolist() == uniform_numbers(seeds, positions).tolist()


@given(st.lists(TIED | st.floats(width=32, allow_nan=False), min_size=1, max_size=30), st.data())
def test_the_kth_largest_value_is_the_one_of_a_sort(values: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(values)))
    row = torch.tensor(values, dtype=torch.float32)
    expected = row.sort(descending=True).values[k - 1]
    assert int(kth_largest(row[None], torch.tensor([k]))) == int(ordered_bits(expected[None]))
    assert torch.equal(ordered_bits(row)[:, None] < ordered_bits(row), row[:, None] < row)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30).filter(any), st.integers(1, 31))
def test_the_nucleus_is_the_smallest_set_of_its_mass(weights: list[int], parts: int) -> None:
    """Probabilities are few 64ths, so that sums are exact and masses are often met exactly."""
    probabilities = torch.tensor(weights, dtype=torch.float32) / 256
    top_p = parts / 32
    floor = int(nucleus_floor(probabilities[None], torch.tensor([top_p])))
    kept = probabilities.view(torch.int32) >= floor
    for value, is_kept in zip(probabilities.tolist(), kept.tolist(), strict=True):
        assert is_kept == (sum(p for p in probabilities.tolist() if p > value) < top_p)


@pytest.mark.parametrize("filtered", [False, True])
def test_nothing_waits_for_the_device(filtered: bool) -> None:
    states = states_of(KINDS["all"], 0, 4)
    parameters = DrawParameters.of(states, [3] * 4, V)
    logits = logits_of(4, tied=True)
    rows, positions = torch.arange(4), torch.full((4,), 3)
    with NoWaiting():
        draw(logits, parameters.select(rows, filtered=filtered), positions)


def test_rows_that_report_more_than_a_token_are_left_to_the_sampler() -> None:
    def possible(ends: int = 0, **parameters: Any) -> bool:
        prompt = np.array([1], dtype=np.int32)
        return can_draw_on_device(SamplingState(SamplingParams(**parameters), prompt, V, frozenset(range(ends))))

    assert possible(8, logit_bias=dict.fromkeys(range(8), 1.0), top_p=0.5)
    assert not possible(9)
    assert not possible(logit_bias=dict.fromkeys(range(9), 1.0))
    assert not possible(top_logprobs=1)
    assert not possible(alternatives=2)
    assert possible(support=True)
    assert not possible(support=True, top_k=5)
    assert not possible(support=True, min_tokens=3)
