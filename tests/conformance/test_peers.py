"""Defects that other trainers have had, each with a test that fails if Etude has it too.

The numbers in parentheses are issues of those projects.
"""

from __future__ import annotations

import pytest
import torch

from etude.algorithms import ADVANTAGES, LOSSES, AlgorithmConfig, AlgorithmState, Denominators, Outputs, View
from etude.algorithms.corrections import CorrectionConfig, RejectionRule
from etude.algorithms.entropy import EntropyConfig
from etude.errors import ConfigError, MissingColumnError
from tests.conformance.laws import LossAndGradient, estimate_and_differentiate, fixture, gradient, model_outputs

NORM = {"reduction": "seq-mean-token-sum-norm", "norm_length": 64.0}


def whole_and_per_rollout(algorithm: AlgorithmConfig) -> tuple[LossAndGradient, LossAndGradient]:
    """Return the gradient in one micro-batch, and with one micro-batch for each rollout."""
    batch = fixture(5, (6, 6), longest=30)
    ready, leaves = algorithm.estimate(batch, AlgorithmState()), model_outputs(batch)
    return gradient(algorithm, ready, leaves), gradient(
        algorithm, ready, leaves, [[u] for u in range(batch.num_rollouts)]
    )


@pytest.mark.parametrize("loss", ["gmpo", "clip_cov", "kl_cov"])
def test_the_loss_does_not_depend_on_the_micro_batch_split(loss: str) -> None:
    """verl: GMPO (7913), Clip-Cov and KL-Cov (7829) took statistics of the micro-batch."""
    whole, per_rollout = whole_and_per_rollout(AlgorithmConfig(advantage=ADVANTAGES["rloo"](), loss=LOSSES[loss]()))
    assert per_rollout.close_to(whole, 1e-12)


def test_normalized_weights_do_not_depend_on_the_micro_batch_split() -> None:
    """verl normalized its bypass weights within each micro-batch."""
    whole, per_rollout = whole_and_per_rollout(
        AlgorithmConfig(correction=CorrectionConfig(weight="truncate", normalize="tokens"))
    )
    assert per_rollout.close_to(whole, 1e-12)


def test_normalized_weights_have_mean_one_over_the_rollout_batch() -> None:
    ready = AlgorithmConfig(correction=CorrectionConfig(weight="truncate", normalize="tokens")).estimate(
        fixture(5), AlgorithmState()
    )
    assert View(ready.batch).column("weight").mean() == pytest.approx(1.0)


def test_the_entropy_bonus_does_not_depend_on_the_micro_batch_split() -> None:
    """TRL's entropy bonus, and its `bnpo` loss, divided by the local number of tokens."""
    whole, per_rollout = whole_and_per_rollout(AlgorithmConfig(entropy=EntropyConfig(coefficient=0.1)))
    assert per_rollout.close_to(whole, 1e-12)


def test_a_constant_norm_is_a_configured_length_and_never_the_padded_width() -> None:
    """verl: `seq-mean-token-sum-norm` divides by the padded width unless a length is set."""
    with pytest.raises(ConfigError, match="`norm_length` belong together"):
        LOSSES["ppo"](reduction="seq-mean-token-sum-norm")
    without_norm = estimate_and_differentiate(
        AlgorithmConfig(loss=LOSSES["ppo"](reduction="seq-mean-token-sum")), fixture(2)
    )
    with_norm = estimate_and_differentiate(AlgorithmConfig(loss=LOSSES["ppo"](**NORM)), fixture(2))
    assert torch.allclose(with_norm.grads["logp"] * 64, without_norm.grads["logp"], atol=1e-14)


def test_sapo_uses_the_configured_reduction() -> None:
    """verl's SAPO ignored the configured reduction."""
    result = [
        estimate_and_differentiate(AlgorithmConfig(loss=LOSSES["sapo"](reduction=how)), fixture(2)).loss
        for how in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")
    ]
    assert len({round(float(loss), 9) for loss in result}) == 3


def test_rejection_bounds_are_on_the_trainer_over_the_sampler() -> None:
    """verl's k1 rejection applied its bounds to μ/π_old, so that [lo, hi] kept what it should drop."""
    batch = fixture(2)
    correction = CorrectionConfig(weight="mask", low=0.5, high=1.0, reject=(RejectionRule(low=0.5, high=1.0),))
    result = View(AlgorithmConfig(correction=correction).estimate(batch, AlgorithmState()).batch)
    ratio = (result.column("old_logp") - result.column("behavior_logp")).exp()
    is_inside = (ratio >= 0.5) & (ratio <= 1.0)
    assert torch.equal(result.column("keep"), is_inside)
    assert torch.allclose(result.column("weight"), torch.where(is_inside, ratio, 0.0))


def test_rloo_of_a_group_of_one_is_the_reward() -> None:
    """verl has two implementations under one name that disagree on groups of one."""
    batch = fixture(1, (1, 1), idle=False).replace(token_reward=None)
    view = View(AlgorithmConfig(advantage=ADVANTAGES["rloo"]()).estimate(batch, AlgorithmState()).batch)
    assert torch.equal(view.column("advantage"), view.rollouts.broadcast(batch.require("reward")))


@pytest.mark.parametrize(
    ("advantage", "column"),
    [("remax", "greedy_reward"), ("gdpo", "reward_parts"), ("token_baseline", "sum_pi_squared"), ("gae", "value")],
)
def test_an_estimator_without_its_column_is_refused_by_name(advantage: str, column: str) -> None:
    """verl has estimators that read columns which its default trainer never provides."""
    algorithm = AlgorithmConfig(advantage=ADVANTAGES[advantage]())
    assert column in algorithm.required_columns()
    without_column = fixture(1).replace(**{column: None})
    with pytest.raises(MissingColumnError, match=f"`{column}`"):
        algorithm.estimate(without_column, AlgorithmState())


def test_a_mean_over_sequences_divides_by_rollouts_not_rows() -> None:
    """Agent Lightning (593): the mean over rollouts divided by rows, so rollouts with many turns had more weight."""
    batch = fixture(3)
    assert batch.num_rows > batch.num_rollouts
    loss = LOSSES["reinforce"](reduction="seq-mean-token-sum")
    whole = Denominators.from_view(View(batch))
    outputs = Outputs(logp=model_outputs(batch)["logp"])
    value = loss(View(batch, outputs), whole).loss
    view = View(batch, outputs)
    assert torch.allclose(value, -(view.column("advantage") * view.logp).sum() / batch.num_rollouts)


def test_a_rollout_with_many_turns_counts_once_in_its_group() -> None:
    """Agent Lightning (444, 445, 462): each turn was a member of the group, so long rollouts dominated the mean."""
    batch = fixture(3, (4,), idle=False).replace(token_reward=None)
    view = View(AlgorithmConfig(advantage=ADVANTAGES["dr_grpo"]()).estimate(batch, AlgorithmState()).batch)
    expected = batch.require("reward") - batch.require("reward").mean()
    assert torch.allclose(view.column("advantage"), view.rollouts.broadcast(expected))


@pytest.mark.parametrize("loss", ["gspo", "ppo", "cispo", "sapo"])
def test_an_importance_weight_acts_under_every_loss_that_accepts_it(loss: str) -> None:
    """OpenRLHF ignored its correction under GSPO, and one of its clamps never applied."""
    batch = fixture(4)
    parts = {"advantage": ADVANTAGES["rloo"](), "loss": LOSSES[loss]()}
    tight = estimate_and_differentiate(
        AlgorithmConfig(**parts, correction=CorrectionConfig(weight="truncate", high=0.7)), batch
    )
    loose = estimate_and_differentiate(
        AlgorithmConfig(**parts, correction=CorrectionConfig(weight="truncate", high=3.0)), batch
    )
    assert not torch.allclose(tight.grads["logp"], loose.grads["logp"])
    ready = AlgorithmConfig(**parts, correction=CorrectionConfig(weight="truncate", high=0.7)).estimate(
        batch, AlgorithmState()
    )
    assert float(View(ready.batch).column("weight").max()) <= 0.7


def test_rewards_are_stored_in_double_precision() -> None:
    """Agent Lightning 0.3 stored rewards in bfloat16, in which 100.1 and 100.4 are the same number."""
    batch = fixture(1, (2,), idle=False)
    almost_equal = batch.replace(reward=torch.tensor([100.1, 100.1 + 1e-9], dtype=torch.float64), token_reward=None)
    view = View(AlgorithmConfig(advantage=ADVANTAGES["dr_grpo"]()).estimate(almost_equal, AlgorithmState()).batch)
    assert view.column("advantage")[-1] == pytest.approx(5e-10, rel=1e-4)
