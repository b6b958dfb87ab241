"""Mistakes that give wrong results without an error, each with a test that finds it."""

from __future__ import annotations

import torch

from etude.algorithms import ADVANTAGES, LOSSES, AlgorithmConfig, AlgorithmState, View
from tests.conformance.laws import estimate_and_differentiate, fixture, gradient, model_outputs


def test_a_nan_in_the_context_reaches_no_gradient() -> None:
    batch = fixture(0)
    leaves = model_outputs(batch)
    assert bool(leaves["logp"].isnan().any())
    for loss in LOSSES.values():
        results = gradient(
            AlgorithmConfig(loss=loss(), advantage=ADVANTAGES["rloo"]()),
            AlgorithmConfig(loss=loss(), advantage=ADVANTAGES["rloo"]()).estimate(batch, AlgorithmState()),
            leaves,
        )
        assert not bool(results.grads["logp"].isnan().any())


def test_a_reward_during_a_tool_turn_reaches_the_actions_before_it() -> None:
    """A reward-to-go that zeroes rewards at masked tokens would lose those on a tool's answer."""
    batch = fixture(7, (2, 2), idle=False)
    tool_token = next(
        t
        for t in range(1, batch.num_tokens)
        if not batch.action[t] and batch.action[t - 1] and t < int(batch.rollout_token_offsets[1])
    )
    token_reward = torch.zeros(batch.num_tokens, dtype=torch.float64)
    token_reward[tool_token] = 10.0
    with_reward = batch.replace(token_reward=token_reward)
    without_reward = batch.replace(token_reward=torch.zeros_like(token_reward))
    results = [
        View(AlgorithmConfig(advantage=ADVANTAGES["step_rewards"]()).estimate(b, AlgorithmState()).batch).column(
            "advantage"
        )
        for b in (with_reward, without_reward)
    ]
    assert not torch.allclose(results[0], results[1])


def test_the_ratio_of_a_sequence_is_differentiated_once() -> None:
    """A derivative of GSPO's s together with that of its token form would double the gradient."""
    batch = fixture(2)
    leaves = {"logp": batch.require("old_logp").detach().clone()}
    loss = {"reduction": "seq-mean-token-mean"}
    gspo = AlgorithmConfig(advantage=ADVANTAGES["rloo"](), loss=LOSSES["gspo"](**loss))
    reinforce = AlgorithmConfig(advantage=ADVANTAGES["rloo"](), loss=LOSSES["reinforce"](**loss))
    a = gradient(gspo, gspo.estimate(batch, AlgorithmState()), leaves)
    b = gradient(reinforce, reinforce.estimate(batch, AlgorithmState()), leaves)
    assert torch.allclose(a.grads["logp"], b.grads["logp"], atol=1e-12)


def test_ppo_drops_a_token_that_cispo_keeps() -> None:
    batch = fixture(2)
    leaves = {"logp": torch.where(batch.action, batch.require("old_logp") + 1.0, torch.nan)}  # every ratio is e
    batch = batch.replace(advantage=None)
    parts = {"advantage": ADVANTAGES["rloo"]()}
    ready = AlgorithmConfig(**parts).estimate(batch, AlgorithmState())
    has_positive_advantage = batch.action & (ready.batch.require("advantage") > 0)
    ppo = gradient(AlgorithmConfig(**parts), ready, leaves).grads["logp"]
    cispo = gradient(AlgorithmConfig(**parts, loss=LOSSES["cispo"]()), ready, leaves).grads["logp"]
    assert (
        bool(has_positive_advantage.any())
        and bool((ppo[has_positive_advantage] == 0).all())
        and bool((cispo[has_positive_advantage] != 0).all())
    )


def test_two_successes_of_a_binary_group_give_advantages_of_zero_under_pass_at_k() -> None:
    batch = fixture(1, (4,), idle=False)
    batch = batch.replace(reward=torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64), token_reward=None)
    advantage = View(
        AlgorithmConfig(advantage=ADVANTAGES["pass_at_k"]()).estimate(batch, AlgorithmState()).batch
    ).column("advantage")
    assert bool((advantage == 0).all())


def test_a_batch_without_action_tokens_has_a_finite_loss() -> None:
    batch = fixture(1).replace(token_reward=None)
    idle = batch.replace(action=batch.action & (torch.arange(batch.num_tokens) >= batch.rollout_token_offsets[2]))
    for how in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"):
        results = estimate_and_differentiate(AlgorithmConfig(loss=LOSSES["ppo"](reduction=how)), idle)
        assert torch.isfinite(results.loss)
