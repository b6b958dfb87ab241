"""Several ranks learn what one learns: the same loss, gradient and weights, up to the order of sums."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor

from etude.algorithms import AlgorithmConfig
from etude.algorithms.advantages import ADVANTAGES
from etude.algorithms.entropy import EntropyConfig
from etude.algorithms.losses import LOSSES
from etude.algorithms.losses.clip import PPO
from etude.dispatch import LocalCrew
from etude.dispatch.process_crew import ProcessCrew
from etude.protocols import Crew
from tests.recipes.ranked import RankPolicy, crew_of
from tests.train.tasks import answered, model, rollouts

pytestmark = pytest.mark.xdist_group("ranks")  # what its tests share takes long to make

EVERYTHING = AlgorithmConfig(
    loss=PPO(reduction="seq-mean-token-mean"),
    advantage=ADVANTAGES["reinforce++"](),
    entropy=EntropyConfig(coefficient=0.1, top_share=0.8),
    correction={"weight": "truncate", "high": 2.0, "normalize": "tokens"},
    echo=0.3,
)
COVARIANCE = AlgorithmConfig(loss=LOSSES["clip_cov"](share=0.2), advantage=ADVANTAGES["gpg"]())
TOLERANCE = {"fp64": 1e-12, "fp32": 2e-5}
"""How far a weight may be off after five steps of four updates at a rate of 1e-2: each moves it by up to as much."""
TIMES = {"update_seconds", "trained_tokens_per_second", "exchange_seconds", "peak_memory_gb", "mfu", "micro_batches"}
"""Metrics that say how it was computed."""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCrew]:
    with closing(crew_of(2, tmp_path_factory.mktemp("two"))) as made:
        yield made


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCrew]:
    with closing(crew_of(3, tmp_path_factory.mktemp("three"))) as made:
        yield made


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCrew]:
    with closing(crew_of(4, tmp_path_factory.mktemp("four"))) as made:
        yield made


@pytest.fixture(params=["two", pytest.param("four", marks=pytest.mark.soak)])
def many(request: pytest.FixtureRequest) -> ProcessCrew:
    result: ProcessCrew = request.getfixturevalue(request.param)
    return result


def alone(*args: Any, **options: Any) -> LocalCrew:
    """One rank, here."""
    crew = LocalCrew(RankPolicy())
    crew.call(RankPolicy.begin, *args, **options)
    return crew


def practised(
    crew: Crew, steps: int = 5, *, updates: int = 2, groups: int = 3, first: int = 0
) -> list[dict[str, float]]:
    """What some steps measure, on batches of unequal groups."""
    results = []
    for step in range(first, first + steps):
        batch = crew.call(RankPolicy.ready, rollouts(seed=step, groups=groups))
        results.append(crew.call(RankPolicy.update, batch.split(updates, by="rollout")).reduce())
    return results


def apart(one: Crew, other: Crew) -> float:
    """The largest difference of two weights; every rank has the same ones."""
    mine, theirs = one.call(RankPolicy.weights), other.call(RankPolicy.weights)
    for weights in (mine, theirs):
        assert all(same(weights[0], each) for each in weights)
    return max(float((weight - theirs[0][name]).abs().max()) for name, weight in mine[0].items())


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.skipif(sys.platform != "linux", reason="the system's own count of memory is read")
def test_an_exchange_takes_two_buckets_at_most(many: ProcessCrew) -> None:
    """By the system's own count, everything that torch and the transport do inside included."""
    bucket = 32 * 2**20
    for _ in range(2):  # the first time round, pages are still being found
        result = many.call(RankPolicy.spent, 192, bucket)
    for each in result:
        assert each["gradients"] <= 2.3 and each["weights"] <= 2, result


def test_imbalance_is_what_the_busiest_rank_has_beyond_the_mean(two: ProcessCrew) -> None:
    even, asked, short_answers = (5, [4, 4]), (40, [2] * 4), (2, [40] * 4)
    long, short = work(*short_answers), work(*asked)
    assert 3.4 * short < long < 20 * short, "both have as many tokens"
    expected = [
        ([even], 1.0),
        ([even] * 2, 0.0),
        ([even] * 3, 1 / 3),
        ([asked, short_answers], 2 * long / (long + short) - 1),
    ]
    for groups, imbalance in expected:
        two.call(RankPolicy.begin)
        metrics = two.call(RankPolicy.update, [two.call(RankPolicy.ready, answered(*groups))]).reduce()
        assert metrics["imbalance"] == pytest.approx(imbalance, abs=1e-9), groups


def work(prompt: int, answers: list[int]) -> float:
    """What a pass over a group costs, in products: of weights with each token, of logits with each action token, and of
    each token with those that it attends to."""
    policy = model()
    head = policy.head_weight.numel()
    layers = sum(weight.numel() for _, weight in policy.named_weights() if weight.ndim == 2) - head
    pairs = prompt * (prompt + 1) / 2 + sum(answer * prompt + answer * (answer + 1) / 2 for answer in answers)
    attended = 2 * policy.num_layers * policy.query_heads * policy.head_dim * pairs
    return layers * (prompt + sum(answers)) + head * sum(answers) + attended
