"""Defects that other trainers have had, each as a test that fails if Etude ever has it too.

The numbers in parentheses are threads at the projects' own issue trackers.
"""

from __future__ import annotations

import pytest
import torch

from etude.algorithms import ADVANTAGES, LOSSES, AlgorithmConfig, AlgorithmState, Denominators, Outputs, View
from etude.algorithms.corrections import CorrectionConfig, RejectionRule
from etude.algorithms.entropy import EntropyConfig
from etude.errors import ConfigError, MissingColumnError
from tests.conformance.laws import Found, fixture, gradient, said, through

NORM = {"reduction": "seq-mean-token-sum-norm", "norm_length": 64.0}


def split_by_one(algorithm: AlgorithmConfig) -> tuple[Found, Found]:
    """The gradient in one piece, and in as many micro-batches as there are rollouts."""
    batch = fixture(5, (6, 6), longest=30)
    ready, leaves = algorithm.estimate(batch, AlgorithmState()), said(batch)
    return gradient(algorithm, ready, leaves), gradient(
        algorithm, ready, leaves, [[u] for u in range(batch.num_rollouts)]
    )


@pytest.mark.parametrize("loss", ["gmpo", "clip_cov", "kl_cov"])
def test_the_loss_does_not_depend_on_the_micro_batch_split(loss: str) -> None:
    """verl: GMPO (7913), Clip-Cov and KL-Cov (7829) took statistics of the micro-batch."""
    whole, pieces = split_by_one(AlgorithmConfig(advantage=ADVANTAGES["rloo"](), loss=LOSSES[loss]()))
    assert pieces.close_to(whole, 1e-12)


def test_normalised_weights_do_not_depend_on_the_micro_batch_split() -> None:
    """verl normalised its bypass weights within each micro-batch."""
    whole, pieces = split_by_one(AlgorithmConfig(correction=CorrectionConfig(weight="truncate", normalize="tokens")))
    assert pieces.close_to(whole, 1e-12)


def test_normalised_weights_have_mean_one_over_the_rollout_batch() -> None:
    ready = AlgorithmConfig(correction=CorrectionConfig(weight="truncate", normalize="tokens")).estimate(
        fixture(5), AlgorithmState()
    )
    assert View(ready.batch).column("weight").mean() == pytest.approx(1.0)


def test_the_entropy_bonus_does_not_depend_on_the_micro_batch_split() -> None:
    """TRL's entropy bonus, and its `bnpo` loss, divided by the local number of tokens."""
    whole, pieces = split_by_one(AlgorithmConfig(entropy=EntropyConfig(coefficient=0.1)))
    assert pieces.close_to(whole, 1e-12)


def test_a_constant_norm_is_a_length_you_chose_and_never_a_width() -> None:
    """verl: `seq-mean-token-sum-norm` divides by the padded width unless told otherwise."""
    with pytest.raises(ConfigError, match="`norm_length` belong together"):
        LOSSES["ppo"](reduction="seq-mean-token-sum-norm")
    plain = through(AlgorithmConfig(loss=LOSSES["ppo"](reduction="seq-mean-token-sum")), fixture(2))
    normed = through(AlgorithmConfig(loss=LOSSES["ppo"](**NORM)), fixture(2))
    assert torch.allclose(normed.grads["logp"] * 64, plain.grads["logp"], atol=1e-14)


def test_sapo_reduces_as_it_is_told() -> None:
    """verl's SAPO ignored the reduction that was asked for."""
    found = [
        through(AlgorithmConfig(loss=LOSSES["sapo"](reduction=how)), fixture(2)).loss
        for how in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")
    ]
    assert len({round(float(loss), 9) for loss in found}) == 3


def test_rejection_bounds_are_on_the_trainer_over_the_sampler() -> None:
    """verl's k1 rejection applied its bounds to μ/π_old, so that [lo, hi] kept what it should drop."""
    batch = fixture(2)
    correction = CorrectionConfig(weight="mask", low=0.5, high=1.0, reject=(RejectionRule(low=0.5, high=1.0),))
    found = View(AlgorithmConfig(correction=correction).estimate(batch, AlgorithmState()).batch)
    ratio = (found.column("old_logp") - found.column("behavior_logp")).exp()
    inside = (ratio >= 0.5) & (ratio <= 1.0)
    assert torch.equal(found.column("keep"), inside)
    assert torch.allclose(found.column("weight"), torch.where(inside, ratio, 0.0))


def test_there_is_one_rloo_and_it_says_what_a_group_of_one_is() -> None:
    """verl has two implementations under one name that disagree on groups of one."""
    batch = fixture(1, (1, 1), idle=False).replace(token_reward=None)
    view = View(AlgorithmConfig(advantage=ADVANTAGES["rloo"]()).estimate(batch, AlgorithmState()).batch)
    assert torch.equal(view.column("advantage"), view.rollouts.broadcast(batch.require("reward")))


@pytest.mark.parametrize(
    ("advantage", "column"),
    [("remax", "greedy_reward"), ("gdpo", "reward_parts"), ("token_baseline", "sum_pi_squared"), ("gae", "value")],
)
def test_an_estimator_that_is_not_fed_is_refused_by_name(advantage: str, column: str) -> None:
    """verl ships estimators that its default trainer never gives the columns they read."""
    algorithm = AlgorithmConfig(advantage=ADVANTAGES[advantage]())
    assert column in algorithm.required_columns()
    starved = fixture(1).replace(**{column: None})
    with pytest.raises(MissingColumnError, match=f"`{column}`"):
        algorithm.estimate(starved, AlgorithmState())


def test_a_mean_over_sequences_divides_by_rollouts_not_rows() -> None:
    """Agent Lightning (593): the rollout mean divided by rows, so that many-turn rollouts weighed more."""
    batch = fixture(3)
    assert batch.num_rows > batch.num_rollouts
    loss = LOSSES["reinforce"](reduction="seq-mean-token-sum")
    whole = Denominators.from_view(View(batch))
    outputs = Outputs(logp=said(batch)["logp"])
    value = loss(View(batch, outputs), whole).loss
    view = View(batch, outputs)
    assert torch.allclose(value, -(view.column("advantage") * view.logp).sum() / batch.num_rollouts)


def test_a_rollout_with_many_turns_counts_once_in_its_group() -> None:
    """Agent Lightning (444, 445, 462): each turn was a member of the group, so that talkative rollouts set the mean."""
    batch = fixture(3, (4,), idle=False).replace(token_reward=None)
    view = View(AlgorithmConfig(advantage=ADVANTAGES["dr_grpo"]()).estimate(batch, AlgorithmState()).batch)
    expected = batch.require("reward") - batch.require("reward").mean()
    assert torch.allclose(view.column("advantage"), view.rollouts.broadcast(expected))


@pytest.mark.parametrize("loss", ["gspo", "ppo", "cispo", "sapo"])
def test_an_importance_weight_acts_under_every_loss_that_accepts_it(loss: str) -> None:
    """OpenRLHF ignored its correction under GSPO, and one of its clamps never applied."""
    batch = fixture(4)
    parts = {"advantage": ADVANTAGES["rloo"](), "loss": LOSSES[loss]()}
    tight = through(AlgorithmConfig(**parts, correction=CorrectionConfig(weight="truncate", high=0.7)), batch)
    loose = through(AlgorithmConfig(**parts, correction=CorrectionConfig(weight="truncate", high=3.0)), batch)
    assert not torch.allclose(tight.grads["logp"], loose.grads["logp"])
    ready = AlgorithmConfig(**parts, correction=CorrectionConfig(weight="truncate", high=0.7)).estimate(
        batch, AlgorithmState()
    )
    assert float(View(ready.batch).column("weight").max()) <= 0.7


def test_rewards_are_kept_in_double_precision() -> None:
    """Agent Lightning 0.3 stored rewards in bfloat16, where 100.1 and 100.4 are one number."""
    batch = fixture(1, (2,), idle=False)
    close = batch.replace(reward=torch.tensor([100.1, 100.1 + 1e-9], dtype=torch.float64), token_reward=None)
    view = View(AlgorithmConfig(advantage=ADVANTAGES["dr_grpo"]()).estimate(close, AlgorithmState()).batch)
    assert view.column("advantage")[-1] == pytest.approx(5e-10, rel=1e-4)
