"""Ways to be quietly wrong, each with the test that would notice."""

from __future__ import annotations

import torch

from etude.algorithms import ADVANTAGES, LOSSES, AlgorithmConfig, AlgorithmState, View
from tests.conformance.laws import fixture, gradient, said, through


def test_a_nan_times_zero_is_a_nan_and_none_gets_through() -> None:
    batch = fixture(0)
    leaves = said(batch)
    assert bool(leaves["logp"].isnan().any())
    for loss in LOSSES.values():
        found = gradient(
            AlgorithmConfig(loss=loss(), advantage=ADVANTAGES["rloo"]()),
            AlgorithmConfig(loss=loss(), advantage=ADVANTAGES["rloo"]()).estimate(batch, AlgorithmState()),
            leaves,
        )
        assert not bool(found.grads["logp"].isnan().any())


def test_a_reward_paid_during_a_tool_turn_reaches_the_actions_before_it() -> None:
    """Reward-to-go that zeroes rewards at masked tokens forgets what tools paid."""
    batch = fixture(7, (2, 2), idle=False)
    tool = next(
        t
        for t in range(1, batch.num_tokens)
        if not batch.action[t] and batch.action[t - 1] and t < int(batch.rollout_token_offsets[1])
    )
    paid = torch.zeros(batch.num_tokens, dtype=torch.float64)
    paid[tool] = 10.0
    with_reward = batch.replace(token_reward=paid)
    without = batch.replace(token_reward=torch.zeros_like(paid))
    found = [
        View(AlgorithmConfig(advantage=ADVANTAGES["step_rewards"]()).estimate(b, AlgorithmState()).batch).column(
            "advantage"
        )
        for b in (with_reward, without)
    ]
    assert not torch.allclose(found[0], found[1])


def test_the_ratio_of_a_sequence_is_differentiated_once() -> None:
    """Differentiating GSPO's s together with its token form doubles the gradient."""
    batch = fixture(2)
    leaves = {"logp": batch.require("old_logp").detach().clone()}
    loss = {"reduction": "seq-mean-token-mean"}
    gspo = AlgorithmConfig(advantage=ADVANTAGES["rloo"](), loss=LOSSES["gspo"](**loss))
    reinforce = AlgorithmConfig(advantage=ADVANTAGES["rloo"](), loss=LOSSES["reinforce"](**loss))
    a = gradient(gspo, gspo.estimate(batch, AlgorithmState()), leaves)
    b = gradient(reinforce, reinforce.estimate(batch, AlgorithmState()), leaves)
    assert torch.allclose(a.grads["logp"], b.grads["logp"], atol=1e-12)


def test_ppo_lets_go_of_a_token_that_cispo_keeps() -> None:
    batch = fixture(2)
    leaves = {"logp": torch.where(batch.action, batch.require("old_logp") + 1.0, torch.nan)}  # every ratio is e
    batch = batch.replace(advantage=None)
    parts = {"advantage": ADVANTAGES["rloo"]()}
    ready = AlgorithmConfig(**parts).estimate(batch, AlgorithmState())
    up = batch.action & (ready.batch.require("advantage") > 0)
    ppo = gradient(AlgorithmConfig(**parts), ready, leaves).grads["logp"]
    cispo = gradient(AlgorithmConfig(**parts, loss=LOSSES["cispo"]()), ready, leaves).grads["logp"]
    assert bool(up.any()) and bool((ppo[up] == 0).all()) and bool((cispo[up] != 0).all())


def test_two_successes_of_a_binary_group_teach_nothing_under_pass_at_k() -> None:
    batch = fixture(1, (4,), idle=False)
    batch = batch.replace(reward=torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64), token_reward=None)
    advantage = View(
        AlgorithmConfig(advantage=ADVANTAGES["pass_at_k"]()).estimate(batch, AlgorithmState()).batch
    ).column("advantage")
    assert bool((advantage == 0).all())


def test_no_action_tokens_is_nothing_over_nothing_and_is_nothing() -> None:
    batch = fixture(1).replace(token_reward=None)
    idle = batch.replace(action=batch.action & (torch.arange(batch.num_tokens) >= batch.rollout_token_offsets[2]))
    for how in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"):
        found = through(AlgorithmConfig(loss=LOSSES["ppo"](reduction=how)), idle)
        assert torch.isfinite(found.loss)
