"""Law 4: context tokens receive no gradient from policy terms, and what stands there changes nothing."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.algorithms import AlgorithmConfig, AlgorithmState, View
from etude.algorithms.advantages.rewards import Rewards
from etude.batch import COLUMNS, Batch, ColumnKind
from tests.conformance.laws import (
    every_algorithm,
    few,
    fixture,
    gradient,
    observed,
    of_every_algorithm,
    said,
    taught,
    through,
)

ALGORITHMS = every_algorithm()


def scribbled(batch: Batch, with_what: float) -> Batch:
    """The batch with something else in every number that is said of a context token."""
    changes = {}
    for name, column in batch.columns():
        numbers = COLUMNS.get(name) is ColumnKind.TOKEN and column.tensor.dtype == torch.float64
        if numbers and name != "token_reward":
            changes[name] = torch.where(batch.action, column.tensor, with_what)
    return batch.replace(**changes)


@of_every_algorithm
@few
@given(seed=st.integers(0, 50), scribble=st.sampled_from([0.0, -1e9, float("inf"), float("nan")]))
def test_what_stands_in_the_context_changes_nothing(name: str, seed: int, scribble: float) -> None:
    algorithm, batch = ALGORITHMS[name], fixture(seed)
    clean = through(algorithm, batch)
    other = scribbled(batch, scribble)
    read = taught(algorithm, batch)
    leaves = {k: torch.where(read, v.detach(), scribble) for k, v in said(batch).items()}
    found = gradient(algorithm, algorithm.estimate(other, AlgorithmState()), leaves)
    assert torch.equal(found.loss, clean.loss)
    for key, grad in found.grads.items():
        assert torch.equal(grad, clean.grads[key]), key


@of_every_algorithm
@few
@given(seed=st.integers(0, 50))
def test_context_gets_no_gradient_and_actions_get_a_finite_one(name: str, seed: int) -> None:
    batch = fixture(seed)
    found = through(ALGORITHMS[name], batch)
    assert torch.isfinite(found.loss)
    for grad in found.grads.values():
        assert bool((grad[~taught(ALGORITHMS[name], batch)] == 0).all())
        assert bool(torch.isfinite(grad).all())


@given(seed=st.integers(0, 50))
def test_echo_is_the_named_exception_and_teaches_tool_output_only(seed: int) -> None:
    batch, algorithm = fixture(seed), AlgorithmConfig(echo=0.5)
    seen, leaves = observed(batch), said(batch)
    ready = algorithm.estimate(batch, AlgorithmState())
    found, without = gradient(algorithm, ready, leaves), gradient(AlgorithmConfig(), ready, leaves)
    extra = found.grads["logp"] - without.grads["logp"]
    expected = torch.where(seen, -0.5 / max(int(seen.sum()), 1), 0.0)
    assert torch.allclose(extra, expected.double(), atol=1e-12)


def test_a_reward_paid_on_tool_output_belongs_to_the_action_before() -> None:
    batch = fixture(3)
    act = batch.action.nonzero()[:, 0]
    at = next(int(t) for t in act if int(t) + 1 < batch.num_tokens and not batch.action[t + 1]
              and torch.searchsorted(batch.rollout_token_offsets, t, right=True)
              == torch.searchsorted(batch.rollout_token_offsets, t + 1, right=True))  # fmt: skip
    algorithm = every_algorithm()["advantage=reinforce++"]
    columns = []
    for token in (at, at + 1):
        paid = torch.zeros(batch.num_tokens, dtype=torch.float64)
        paid[token] = 2.0
        told = View(batch.replace(token_reward=paid, reward=torch.zeros_like(batch.require("reward"))))
        assert told.action_index[Rewards(told).per_token(torch.float64).nonzero()[:, 0]].tolist() == [at]
        columns.append(
            algorithm.estimate(batch.replace(token_reward=paid), AlgorithmState()).batch.require("advantage")
        )
    assert torch.equal(columns[0], columns[1])
