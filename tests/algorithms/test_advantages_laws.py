"""The laws of every estimator: ranks, rows and context do not matter, and it reads exactly the declared columns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from etude.algorithms.advantages import ADVANTAGES
from etude.algorithms.base import AlgorithmState
from etude.algorithms.view import Ranks, View
from etude.batch import COLUMNS, Batch, ColumnKind
from tests.algorithms.advantages_plain import close, estimate, irregular_batch
from tests.sweeps import sweep
from tests.thread_ranks import on_ranks

OPTIONS: dict[str, dict[str, Any]] = {"gae": {"whiten": True, "bootstrap_truncated": True, "lam": 0.9}}
STATE = AlgorithmState(role_means={0: 0.5, 4: 1.0})
NAMES = sorted(ADVANTAGES)


def batch_for(name: str, seed: int) -> Batch:
    """Return a batch with rewards that the estimator accepts."""
    batch = irregular_batch(seed, (3, 2, 4, 2))
    if name == "maxrl":
        return batch.replace(reward=batch.require("reward").abs(), token_reward=batch.require("token_reward").abs())
    return batch


@sweep("name", NAMES)
def test_two_ranks_compute_what_one_rank_computes(name: str) -> None:
    batch = batch_for(name, 6)
    estimator = ADVANTAGES[name](**OPTIONS.get(name, {}))
    one = estimator(View(batch), STATE)
    shares = [batch.select([u for u in range(batch.num_rollouts) if (batch.group[u] == 2) == rank]) for rank in (0, 1)]
    order = [u for rank in (0, 1) for u in range(batch.num_rollouts) if (batch.group[u] == 2) == rank]

    def work(rank: int, ranks: Ranks) -> Any:
        return estimator(View(shares[rank], ranks=ranks), STATE)

    results = on_ranks(2, work)
    expected = View(batch).scatter(one.advantage)
    joined = [View(share).scatter(part.advantage) for share, part in zip(shares, results, strict=True)]
    bounds = batch.rollout_token_offsets
    close(torch.cat(joined), torch.cat([expected[bounds[u] : bounds[u + 1]] for u in order]))
    for part in results:
        if one.state is not None:
            assert part.state.role_means == pytest.approx(one.state.role_means)
    assert one.metrics.keys() == results[0].metrics.keys()
    metrics = results[0].metrics
    metrics.merge(results[1].metrics)
    assert metrics.reduce() == pytest.approx(one.metrics.reduce(), abs=1e-12)


@sweep("name", NAMES)
def test_an_estimator_reads_its_declared_columns_and_nothing_else(name: str) -> None:
    """Remove all columns that the estimator does not require, except token rewards, which it reads if present."""
    batch, estimator = batch_for(name, 2), ADVANTAGES[name](**OPTIONS.get(name, {}))
    keep = estimator.required_columns() | {"ids", "action", "token_reward", "old_logp"}
    bare = batch.replace(
        **{column: None for column in COLUMNS if column not in keep},
        extra={key: column for key, column in batch.extra.items() if key in keep},
    )
    close(estimator(View(bare), STATE).advantage, estimator(View(batch), STATE).advantage)


@sweep("name", NAMES)
def test_context_and_rows_do_not_matter(name: str) -> None:
    batch = batch_for(name, 3)
    expected = estimate(name, batch, STATE, **OPTIONS.get(name, {})).advantage
    merged = batch.replace(offsets=batch.rollout_token_offsets, unit=torch.arange(batch.num_rollouts))
    close(estimate(name, merged, STATE, **OPTIONS.get(name, {})).advantage, expected)
    noisy = batch.replace(
        **{
            column: torch.where(batch.action, batch.require(column), 7.5)
            for column, kind in COLUMNS.items()
            if kind is ColumnKind.TOKEN and column != "token_reward" and batch.__dict__[column] is not None
            if batch.require(column).is_floating_point()
        }
    )
    close(estimate(name, noisy, STATE, **OPTIONS.get(name, {})).advantage, expected)


@sweep("name", NAMES)
def test_a_batch_without_actions_is_no_error(name: str) -> None:
    batch = batch_for(name, 4)
    without_actions = batch.replace(action=torch.zeros_like(batch.action), token_reward=torch.zeros(batch.num_tokens))
    unknown = {"behavior_logp", "version"} - ADVANTAGES[name]().required_columns()
    without_actions = without_actions.replace(**dict.fromkeys(unknown))
    results = estimate(name, without_actions, STATE, **OPTIONS.get(name, {}))
    assert results.advantage.shape == (0,)
    assert "advantage_max" not in results.metrics.reduce()


@sweep("name", NAMES)
def test_every_option_of_an_estimator_is_described(name: str) -> None:
    assert all(field.description for field in ADVANTAGES[name].model_fields.values())
    assert ADVANTAGES[name].__doc__
