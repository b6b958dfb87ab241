"""Law 1: loss and gradient do not depend on micro-batch size, order, packing, or the number of ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from etude.algorithms import ADVANTAGES, LOSSES, AlgorithmConfig, AlgorithmState, EstimatedBatch
from etude.algorithms.view import Ranks
from etude.batch import Batch
from tests.conformance.laws import (
    every_algorithm,
    few_examples,
    fixture,
    gradient,
    model_outputs,
    of_every_algorithm,
)
from tests.thread_ranks import on_ranks

ALGORITHMS = every_algorithm()
TOLERANCE = 1e-10
ESTIMATED_COLUMNS = ("advantage", "returns", "weight", "keep", "chosen")


Columns = tuple[Tensor, Tensor]


def estimated_columns(*parts: EstimatedBatch) -> Columns:
    """Return the estimated columns [A, C], and the rollout and index of each action [A, 2].

    Both are sorted by rollout and index, so that the order of rollouts does not matter.
    """
    names, values = [], []
    for batch in (ready.batch for ready in parts):
        unit = torch.repeat_interleave(torch.arange(batch.num_rollouts), torch.diff(batch.rollout_token_offsets))[
            batch.action
        ]
        counts = torch.bincount(unit, minlength=batch.num_rollouts)
        index = torch.arange(len(unit)) - (counts.cumsum(0) - counts)[unit]
        names.append(torch.stack([batch.require("rollout_id")[unit], index], 1))
        columns = [batch.__dict__[name] for name in ESTIMATED_COLUMNS if batch.__dict__[name] is not None]
        values.append(torch.stack([column[batch.action].double() for column in columns], 1))
    name = torch.cat(names)
    order = (name[:, 0] * 10_000 + name[:, 1]).argsort()
    return name[order], torch.cat(values)[order]


def assert_same_columns(a: Columns, b: Columns) -> None:
    assert torch.equal(a[0], b[0])
    torch.testing.assert_close(a[1], b[1], rtol=1e-9, atol=1e-9)


@of_every_algorithm
@few_examples
@given(data=st.data())
def test_any_micro_batches_give_the_gradient_of_the_whole(name: str, data: st.DataObject) -> None:
    algorithm, batch = ALGORITHMS[name], fixture(data.draw(st.integers(0, 50)))
    ready, leaves = algorithm.estimate(batch, AlgorithmState(), seed=3, step=2), model_outputs(batch)
    order = data.draw(st.permutations(range(batch.num_rollouts)))
    cuts = sorted(data.draw(st.sets(st.integers(1, batch.num_rollouts - 1), max_size=5)))
    parts = [order[a:b] for a, b in zip([0, *cuts], [*cuts, batch.num_rollouts], strict=True)]
    assert gradient(algorithm, ready, leaves, parts).close_to(gradient(algorithm, ready, leaves), TOLERANCE)


@of_every_algorithm
@few_examples
@given(data=st.data())
def test_the_order_of_rollouts_does_not_matter(name: str, data: st.DataObject) -> None:
    algorithm, batch = ALGORITHMS[name], fixture(data.draw(st.integers(0, 50)))
    order = data.draw(st.permutations(range(batch.num_rollouts)))
    in_order = algorithm.estimate(batch, AlgorithmState(), seed=3, step=2)
    shuffled = algorithm.estimate(batch.select(order), AlgorithmState(), seed=3, step=2)
    assert_same_columns(estimated_columns(in_order), estimated_columns(shuffled))
    leaves = model_outputs(batch)
    assert gradient(algorithm, shuffled, leaves).close_to(gradient(algorithm, in_order, leaves), TOLERANCE)


def of_groups(batch: Batch, groups: list[int]) -> list[int]:
    return [u for u in range(batch.num_rollouts) if int(batch.group[u]) in groups]


@of_every_algorithm
@few_examples
@given(seed=st.integers(0, 50), ranks=st.integers(2, 3))
def test_ranks_with_some_groups_each_estimate_the_same_as_one_rank(name: str, seed: int, ranks: int) -> None:
    algorithm, batch = ALGORITHMS[name], fixture(seed)
    one_rank = algorithm.estimate(batch, AlgorithmState(), seed=3, step=2)
    shares = [of_groups(batch, list(range(rank, batch.num_groups, ranks))) for rank in range(ranks)]
    shares.insert(1, [])  # a rank without a group still takes part in collective calls
    ranks += 1

    def work(rank: int, ranks_of_call: Ranks) -> EstimatedBatch:
        return algorithm.estimate(batch.select(shares[rank]), AlgorithmState(), seed=3, step=2, ranks=ranks_of_call)

    several_ranks = on_ranks(ranks, work)
    for ready in several_ranks:
        assert ready.next_state.kl_value == pytest.approx(one_rank.next_state.kl_value)
        assert ready.next_state.role_means == pytest.approx(one_rank.next_state.role_means)
    assert_same_columns(estimated_columns(one_rank), estimated_columns(*several_ranks))


def test_random_picks_depend_on_seed_and_step() -> None:
    batch = fixture(4, (8, 8, 8), longest=40)
    algorithm = AlgorithmConfig(
        advantage=ADVANTAGES["rloo"](), loss=LOSSES["clip_cov"](share=0.05, cov_low=0.0, cov_high=99.0)
    )
    chosen = [
        algorithm.estimate(batch, AlgorithmState(), seed=seed, step=step).batch.require("chosen")
        for seed, step in ((1, 1), (1, 1), (2, 1), (1, 2), (2, 2))
    ]
    assert all(0 < int(column.sum()) < int(batch.action.sum()) for column in chosen)
    assert torch.equal(chosen[0], chosen[1])
    others = chosen[1:]
    assert not any(torch.equal(first, second) for i, first in enumerate(others) for second in others[:i])
    renamed = batch.replace(rollout_id=batch.require("rollout_id") + 1)
    assert not torch.equal(
        algorithm.estimate(renamed, AlgorithmState(), seed=1, step=1).batch.require("chosen"), chosen[0]
    )
