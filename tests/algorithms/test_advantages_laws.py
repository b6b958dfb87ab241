"""What every estimator keeps to: ranks, rows and context do not matter, and what it reads is what it declares."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from etude.algorithms.advantages import ADVANTAGES
from etude.algorithms.base import AlgorithmState
from etude.algorithms.view import Ranks, View
from etude.batch import COLUMNS, Batch, ColumnKind
from tests.algorithms.advantages_plain import Meeting, awkward, close, estimate
from tests.sweeps import sweep

KNOBS: dict[str, dict[str, Any]] = {"gae": {"whiten": True, "bootstrap_truncated": True, "lam": 0.9}}
STATE = AlgorithmState(role_means={0: 0.5, 4: 1.0})
EVERY = sorted(ADVANTAGES)


def batch_for(name: str, seed: int) -> Batch:
    """Rewards that every estimator accepts."""
    batch = awkward(seed, (3, 2, 4, 2))
    if name == "maxrl":
        return batch.replace(reward=batch.require("reward").abs(), token_reward=batch.require("token_reward").abs())
    return batch


@sweep("name", EVERY)
def test_two_ranks_of_different_groups_find_what_one_finds(name: str) -> None:
    whole = batch_for(name, 6)
    estimator = ADVANTAGES[name](**KNOBS.get(name, {}))
    one = estimator(View(whole), STATE)
    shares = [whole.select([u for u in range(whole.num_rollouts) if (whole.group[u] == 2) == rank]) for rank in (0, 1)]
    order = [u for rank in (0, 1) for u in range(whole.num_rollouts) if (whole.group[u] == 2) == rank]

    def work(ranks: Ranks, rank: int) -> Any:
        return estimator(View(shares[rank], ranks=ranks), STATE)

    found = Meeting(2).run(work)
    wanted = View(whole).scatter(one.advantage)
    joined = [View(share).scatter(part.advantage) for share, part in zip(shares, found, strict=True)]
    bounds = whole.rollout_token_offsets
    close(torch.cat(joined), torch.cat([wanted[bounds[u] : bounds[u + 1]] for u in order]))
    for part in found:
        if one.state is not None:
            assert part.state.role_means == pytest.approx(one.state.role_means)
    assert one.metrics.keys() == found[0].metrics.keys()
    told = found[0].metrics
    told.merge(found[1].metrics)
    assert told.reduce() == pytest.approx(one.metrics.reduce(), abs=1e-12)


@sweep("name", EVERY)
def test_it_reads_what_it_declares_and_nothing_else(name: str) -> None:
    """Columns it does not need may be missing; token rewards are read wherever there are any."""
    batch, estimator = batch_for(name, 2), ADVANTAGES[name](**KNOBS.get(name, {}))
    keep = estimator.required_columns() | {"ids", "action", "token_reward", "old_logp"}
    bare = batch.replace(
        **{column: None for column in COLUMNS if column not in keep},
        extra={key: column for key, column in batch.extra.items() if key in keep},
    )
    close(estimator(View(bare), STATE).advantage, estimator(View(batch), STATE).advantage)


@sweep("name", EVERY)
def test_context_and_rows_do_not_matter(name: str) -> None:
    batch = batch_for(name, 3)
    wanted = estimate(name, batch, STATE, **KNOBS.get(name, {})).advantage
    merged = batch.replace(offsets=batch.rollout_token_offsets, unit=torch.arange(batch.num_rollouts))
    close(estimate(name, merged, STATE, **KNOBS.get(name, {})).advantage, wanted)
    noisy = batch.replace(
        **{
            column: torch.where(batch.action, batch.require(column), 7.5)
            for column, kind in COLUMNS.items()
            if kind is ColumnKind.TOKEN and column != "token_reward" and batch.__dict__[column] is not None
            if batch.require(column).is_floating_point()
        }
    )
    close(estimate(name, noisy, STATE, **KNOBS.get(name, {})).advantage, wanted)


@sweep("name", EVERY)
def test_no_action_at_all_is_no_error(name: str) -> None:
    batch = batch_for(name, 4)
    still = batch.replace(action=torch.zeros_like(batch.action), token_reward=torch.zeros(batch.num_tokens))
    unknown = {"behavior_logp", "version"} - ADVANTAGES[name]().required_columns()
    still = still.replace(**dict.fromkeys(unknown))
    found = estimate(name, still, STATE, **KNOBS.get(name, {}))
    assert found.advantage.shape == (0,)
    assert "advantage_max" not in found.metrics.reduce()


@sweep("name", EVERY)
def test_every_knob_is_described(name: str) -> None:
    assert all(field.description for field in ADVANTAGES[name].model_fields.values())
    assert ADVANTAGES[name].__doc__
