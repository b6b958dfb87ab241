"""Law 4: context tokens get no gradient from policy terms, and their columns change nothing."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.algorithms import AlgorithmConfig, AlgorithmState, View
from etude.algorithms.advantages.rewards import Rewards
from etude.batch import COLUMNS, Batch, ColumnKind
from tests.conformance.laws import (
    estimate_and_differentiate,
    every_algorithm,
    few_examples,
    fixture,
    gradient,
    model_outputs,
    observed,
    of_every_algorithm,
    trained_tokens,
)

ALGORITHMS = every_algorithm()


def with_context_values(batch: Batch, value: float) -> Batch:
    """Return the batch with another number in every float column of the context tokens."""
    changes = {}
    for name, column in batch.columns():
        is_float = COLUMNS.get(name) is ColumnKind.TOKEN and column.tensor.dtype == torch.float64
        if is_float and name != "token_reward":
            changes[name] = torch.where(batch.action, column.tensor, value)
    return batch.replace(**changes)


@of_every_algorithm
@few_examples
@given(seed=st.integers(0, 50), value=st.sampled_from([0.0, -1e9, float("inf"), float("nan")]))
def test_columns_of_context_tokens_change_nothing(name: str, seed: int, value: float) -> None:
    algorithm, batch = ALGORITHMS[name], fixture(seed)
    original = estimate_and_differentiate(algorithm, batch)
    changed_batch = with_context_values(batch, value)
    trained = trained_tokens(algorithm, batch)
    leaves = {k: torch.where(trained, v.detach(), value) for k, v in model_outputs(batch).items()}
    result = gradient(algorithm, algorithm.estimate(changed_batch, AlgorithmState()), leaves)
    assert torch.equal(result.loss, original.loss)
    for key, grad in result.grads.items():
        assert torch.equal(grad, original.grads[key]), key


@of_every_algorithm
@few_examples
@given(seed=st.integers(0, 50))
def test_context_gets_no_gradient_and_actions_get_a_finite_one(name: str, seed: int) -> None:
    batch = fixture(seed)
    result = estimate_and_differentiate(ALGORITHMS[name], batch)
    assert torch.isfinite(result.loss)
    for grad in result.grads.values():
        assert bool((grad[~trained_tokens(ALGORITHMS[name], batch)] == 0).all())
        assert bool(torch.isfinite(grad).all())


@given(seed=st.integers(0, 50))
def test_echo_trains_on_tool_output_only(seed: int) -> None:
    batch, algorithm = fixture(seed), AlgorithmConfig(echo=0.5)
    is_observed, leaves = observed(batch), model_outputs(batch)
    ready = algorithm.estimate(batch, AlgorithmState())
    result, without_echo = gradient(algorithm, ready, leaves), gradient(AlgorithmConfig(), ready, leaves)
    extra = result.grads["logp"] - without_echo.grads["logp"]
    expected = torch.where(is_observed, -0.5 / max(int(is_observed.sum()), 1), 0.0)
    assert torch.allclose(extra, expected.double(), atol=1e-12)


def test_a_reward_on_tool_output_belongs_to_the_action_before_it() -> None:
    batch = fixture(3)
    action_index = batch.action.nonzero()[:, 0]
    last_action = next(int(t) for t in action_index if int(t) + 1 < batch.num_tokens and not batch.action[t + 1]
              and torch.searchsorted(batch.rollout_token_offsets, t, right=True)
              == torch.searchsorted(batch.rollout_token_offsets, t + 1, right=True))  # fmt: skip
    algorithm = every_algorithm()["advantage=reinforce++"]
    columns = []
    for token in (last_action, last_action + 1):
        token_reward = torch.zeros(batch.num_tokens, dtype=torch.float64)
        token_reward[token] = 2.0
        view = View(batch.replace(token_reward=token_reward, reward=torch.zeros_like(batch.require("reward"))))
        assert view.action_index[Rewards(view).per_token(torch.float64).nonzero()[:, 0]].tolist() == [last_action]
        columns.append(
            algorithm.estimate(batch.replace(token_reward=token_reward), AlgorithmState()).batch.require("advantage")
        )
    assert torch.equal(columns[0], columns[1])
