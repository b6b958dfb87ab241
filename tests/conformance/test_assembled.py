"""The whole algorithm: the effect of each part, the coefficient of a step, and refusals before training."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from etude.algorithms import ADVANTAGES, KLS, LOSSES, AlgorithmConfig, AlgorithmState, Denominators, Outputs, View
from etude.algorithms.base import Advantage, AdvantageEstimate, PolicyLoss
from etude.algorithms.corrections import CorrectionConfig, RejectionRule
from etude.algorithms.entropy import EntropyConfig
from etude.algorithms.kl import AdaptiveKLController
from etude.batch import Batch
from etude.errors import BatchError, ConfigError, RewardError
from etude.observe import Metrics
from tests.conformance.laws import fixture, gradient, model_outputs

RLOO = ADVANTAGES["rloo"]()


def objective(
    algorithm: AlgorithmConfig, batch: Batch, leaves: dict[str, torch.Tensor], state: AlgorithmState
) -> torch.Tensor:
    return algorithm.compute_loss(batch, Outputs(**leaves), Denominators.from_view(View(batch)), state).loss.detach()


def test_corrections_change_neither_the_kl_nor_the_entropy() -> None:
    """Weights and rejection change the policy loss only. The KL and the entropy count every action token."""
    correction = CorrectionConfig(weight="truncate", reject=(RejectionRule(low=0.9, high=1.1),))
    whole = AlgorithmConfig(
        advantage=RLOO,
        correction=correction,
        kl=KLS["reverse"](coefficient=0.3),
        entropy=EntropyConfig(coefficient=0.2),
    )
    policy = AlgorithmConfig(advantage=RLOO, correction=correction)
    batch = whole.estimate(fixture(3), AlgorithmState()).batch
    leaves = model_outputs(batch)
    view = View(batch, Outputs(**leaves))
    assert not bool(view.column("keep").all()) and float(view.column("weight").std()) > 0
    kl = 0.5 * (view.logp - view.column("ref_logp")).square().mean()
    other_terms = 0.3 * kl - 0.2 * view.output("entropy").mean()
    result = objective(whole, batch, leaves, AlgorithmState())
    assert torch.allclose(result, objective(policy, batch, leaves, AlgorithmState()) + other_terms.detach(), atol=1e-12)


@pytest.mark.parametrize("unit", ["rollout", "turn"])
def test_the_sequence_mask_drops_whole_units_that_drifted(unit: str) -> None:
    loss = LOSSES["ppo"](unit=unit, reduction="seq-mean-token-mean")
    algorithm = AlgorithmConfig(advantage=RLOO, loss=loss, correction=CorrectionConfig(opsm_delta=0.05))
    ready = algorithm.estimate(fixture(4, longest=14), AlgorithmState())
    view = View(ready.batch, Outputs(**model_outputs(ready.batch)))
    units = view.rollouts if unit == "rollout" else view.turns
    drift = units.mean(view.column("behavior_logp") - view.logp.detach())
    dropped = units.broadcast((units.mean(view.column("advantage")) < 0) & (drift > 0.05))
    assert 0 < int(dropped.sum()) < len(dropped)
    with_mask = ready.batch.replace(keep=view.scatter(~dropped, fill=False))
    without_kl = AlgorithmConfig(advantage=RLOO, loss=loss)
    leaves = model_outputs(ready.batch)
    assert torch.equal(
        objective(algorithm, ready.batch, leaves, AlgorithmState()),
        objective(without_kl, with_mask, leaves, AlgorithmState()),
    )
    result = algorithm.compute_loss(
        ready.batch, Outputs(**leaves), Denominators.from_view(view), AlgorithmState()
    ).metrics.reduce()
    assert result["opsm_dropped_share"] == pytest.approx(float(dropped.double().mean()))


@pytest.mark.parametrize("kl", ["reverse", "in_reward"])
def test_a_step_trains_with_the_coefficient_that_it_logs(kl: str) -> None:
    term = KLS[kl](coefficient=0.1, controller=AdaptiveKLController(target=1e-3, horizon=20))
    algorithm = AlgorithmConfig(advantage=RLOO, kl=term)
    batch = fixture(5)
    batch = batch.replace(ref_logp=batch.require("ref_logp") - 0.5)
    state, coefficients = AlgorithmState(), []
    for step in range(3):
        ready = algorithm.estimate(batch, state, step=step)
        coefficients.append(ready.metrics.reduce()["kl_coefficient"])
        assert term.current_coefficient(ready.state) == coefficients[-1]
        state = ready.next_state
    assert coefficients[0] == 0.1 and coefficients[0] < coefficients[1] < coefficients[2]


def test_an_adaptive_coefficient_that_could_turn_negative_is_refused() -> None:
    term = KLS["reverse"](coefficient=0.1, controller=AdaptiveKLController(target=1e9, horizon=2))
    with pytest.raises(ConfigError, match=r"A step has 14 rollouts and `kl.controller.horizon` is 2"):
        AlgorithmConfig(kl=term).estimate(fixture(0), AlgorithmState())


@pytest.mark.parametrize("loss", ["dppo", "reinforce", "gpg", "vespo", "ipo", "flash_reinforce"])
def test_two_policies_are_refused_if_nothing_reads_the_third(loss: str) -> None:
    with pytest.raises(ConfigError, match=r"Nothing here reads π_old"):
        AlgorithmConfig(loss=LOSSES[loss](), advantage=RLOO, correction=CorrectionConfig(policies="two"))


def test_two_policies_are_refused_for_advantages_that_need_the_trainers_distribution() -> None:
    """π would be the sampler's, and Σπ² needs a forward pass of the trainer, which does not run."""
    with pytest.raises(ConfigError, match=r"`correction.policies=two` the first is the sampler's"):
        AlgorithmConfig(advantage=ADVANTAGES["token_baseline"](), correction=CorrectionConfig(policies="two"))


@pytest.mark.parametrize(
    ("name", "option"), [("kl=in_reward", {"kl": KLS["in_reward"]()}), ("overlong", {"overlong": {"max_length": 8}})]
)
def test_a_reward_that_may_fall_below_zero_is_refused_for_maxrl(name: str, option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"`advantage=maxrl` needs rewards of at least 0, and `{name}`"):
        AlgorithmConfig(advantage=ADVANTAGES["maxrl"](), **option)


@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), float("inf")])
def test_a_log_prob_that_is_not_finite_is_refused_with_its_rollout(bad: float) -> None:
    batch = fixture(2)
    at = int(batch.action.nonzero()[3])
    rollout = int(torch.searchsorted(batch.rollout_token_offsets, at, right=True)) - 1
    broken = batch.require("old_logp").clone()
    broken[at] = bad
    with pytest.raises(
        BatchError, match=rf"`old_logp` is {bad} at action token \d+ of rollout {batch.get_rollout_id(rollout)}"
    ):
        AlgorithmConfig().estimate(batch.replace(old_logp=broken), AlgorithmState())
    AlgorithmConfig(loss=LOSSES["gpg"]()).estimate(batch.replace(old_logp=None), AlgorithmState())


def test_an_advantage_that_is_not_finite_is_refused_with_its_rollout() -> None:
    batch = fixture(2)
    truncated = torch.ones(batch.num_rollouts, dtype=torch.bool)
    final_value = torch.full((batch.num_rollouts,), float("nan"), dtype=torch.float64)
    gae = AlgorithmConfig(advantage=ADVANTAGES["gae"](bootstrap_truncated=True))
    with pytest.raises(BatchError, match=r"`advantage` is nan at action token \d+ of rollout \d+"):
        gae.estimate(batch.replace(truncated=truncated, final_value=final_value), AlgorithmState())


def test_an_infinite_reward_on_tool_output_is_refused_with_its_rollout() -> None:
    batch = fixture(2)
    action_index = next(int(t) for t in batch.action.nonzero()[:, 0] if not bool(batch.action[t + 1]))
    token_reward = torch.zeros(batch.num_tokens, dtype=torch.float64)
    token_reward[action_index + 1] = float("inf")
    with pytest.raises(RewardError, match=r"has a token reward of inf"):
        AlgorithmConfig().estimate(batch.replace(token_reward=token_reward), AlgorithmState())


def test_a_weight_of_an_earlier_estimate_is_ignored() -> None:
    batch, leaves = fixture(4), model_outputs(fixture(4))
    weighted = AlgorithmConfig(correction=CorrectionConfig(weight="truncate")).estimate(batch, AlgorithmState()).batch
    after_weights, fresh = (
        AlgorithmConfig().estimate(weighted, AlgorithmState()),
        AlgorithmConfig().estimate(batch, AlgorithmState()),
    )
    assert torch.equal(
        gradient(AlgorithmConfig(), after_weights, leaves).loss, gradient(AlgorithmConfig(), fresh, leaves).loss
    )


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo", "gpg", "reinforce++_baseline"])
def test_rewards_that_differ_by_the_order_of_a_sum_are_equal(advantage: str) -> None:
    batch = fixture(1, (2, 2), idle=False)
    reward = torch.tensor([0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1, 0.0, 1.0], dtype=torch.float64)
    assert reward[0] != reward[1]
    equal_rewards = batch.replace(reward=reward, token_reward=None)
    exact = equal_rewards.replace(reward=torch.tensor([0.6, 0.6, 0.0, 1.0], dtype=torch.float64))
    algorithm = AlgorithmConfig(advantage=ADVANTAGES[advantage]())
    result, expected = (
        algorithm.estimate(b, AlgorithmState()).batch.require("advantage") for b in (equal_rewards, exact)
    )
    assert torch.allclose(result, expected, atol=1e-12)


def test_reward_metrics_are_measured_before_penalties() -> None:
    batch = fixture(3)
    without_kl = AlgorithmConfig(advantage=RLOO).estimate(batch, AlgorithmState()).metrics.reduce()
    with_kl = (
        AlgorithmConfig(advantage=RLOO, kl=KLS["in_reward"](coefficient=2.0))
        .estimate(batch, AlgorithmState())
        .metrics.reduce()
    )
    for name in ("reward_mean", "group_std", "zero_variance_share"):
        assert with_kl[name] == without_kl[name]


class ReducesTwice(PolicyLoss):
    """A plug-in that reduces its loss, which its base class does."""

    def per_token_loss(self, view: View) -> tuple[torch.Tensor, Metrics]:
        return -(view.column("advantage") * view.logp).mean(), Metrics()


class OneTooFew(Advantage):
    """A plug-in that returns one number too few."""

    def __call__(self, view: View, state: AlgorithmState) -> AdvantageEstimate:
        return AdvantageEstimate(torch.zeros(len(view.action_index) - 1))


def test_a_plug_in_that_returns_the_wrong_shape_is_named() -> None:
    batch, algorithm = fixture(1), AlgorithmConfig(advantage=RLOO, loss=ReducesTwice())
    ready = algorithm.estimate(batch, AlgorithmState())
    with pytest.raises(
        ConfigError,
        match=r"`per_token_loss` of ReducesTwice returned a tensor of shape \(\); it must return one number",
    ):
        gradient(algorithm, ready, model_outputs(batch))
    with pytest.raises(ConfigError, match=r"The advantage OneTooFew returned a tensor of shape"):
        AlgorithmConfig(advantage=OneTooFew()).estimate(batch, AlgorithmState())


@pytest.mark.parametrize("size", [3, 10_000])
def test_a_forward_pass_of_another_batch_is_refused(size: int) -> None:
    batch = fixture(1)
    ready = AlgorithmConfig().estimate(batch, AlgorithmState())
    with pytest.raises(BatchError, match=rf"The model's `logp` has the shape \({size},\); for this batch it needs"):
        AlgorithmConfig().compute_loss(
            ready.batch, Outputs(logp=torch.zeros(size)), Denominators.from_view(View(batch)), AlgorithmState()
        )
