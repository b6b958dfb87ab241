"""The algorithm as a whole: what each part may touch, what a step trains with, and what is refused before it trains."""

from __future__ import annotations

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
from tests.conformance.laws import fixture, gradient, said

RLOO = ADVANTAGES["rloo"]()


def objective(
    algorithm: AlgorithmConfig, batch: Batch, leaves: dict[str, torch.Tensor], state: AlgorithmState
) -> torch.Tensor:
    return algorithm.compute_loss(batch, Outputs(**leaves), Denominators.from_view(View(batch)), state).loss.detach()


def test_corrections_touch_neither_the_kl_nor_the_entropy() -> None:
    """Weighted and thinned out, the policy's part changes; the KL and the entropy are those of every action token."""
    correction = CorrectionConfig(weight="truncate", reject=(RejectionRule(low=0.9, high=1.1),))
    whole = AlgorithmConfig(
        advantage=RLOO,
        correction=correction,
        kl=KLS["reverse"](coefficient=0.3),
        entropy=EntropyConfig(coefficient=0.2),
    )
    policy = AlgorithmConfig(advantage=RLOO, correction=correction)
    batch = whole.estimate(fixture(3), AlgorithmState()).batch
    leaves = said(batch)
    view = View(batch, Outputs(**leaves))
    assert not bool(view.column("keep").all()) and float(view.column("weight").std()) > 0
    kl = 0.5 * (view.logp - view.column("ref_logp")).square().mean()
    rest = 0.3 * kl - 0.2 * view.output("entropy").mean()
    found = objective(whole, batch, leaves, AlgorithmState())
    assert torch.allclose(found, objective(policy, batch, leaves, AlgorithmState()) + rest.detach(), atol=1e-12)


@pytest.mark.parametrize("unit", ["rollout", "turn"])
def test_the_sequence_mask_drops_whole_units_that_drifted(unit: str) -> None:
    loss = LOSSES["ppo"](unit=unit, reduction="seq-mean-token-mean")
    algorithm = AlgorithmConfig(advantage=RLOO, loss=loss, correction=CorrectionConfig(opsm_delta=0.05))
    ready = algorithm.estimate(fixture(4, longest=14), AlgorithmState())
    view = View(ready.batch, Outputs(**said(ready.batch)))
    units = view.rollouts if unit == "rollout" else view.turns
    drift = units.mean(view.column("behavior_logp") - view.logp.detach())
    dropped = units.broadcast((units.mean(view.column("advantage")) < 0) & (drift > 0.05))
    assert 0 < int(dropped.sum()) < len(dropped)
    kept = ready.batch.replace(keep=view.scatter(~dropped, fill=False))
    plain = AlgorithmConfig(advantage=RLOO, loss=loss)
    leaves = said(ready.batch)
    assert torch.equal(
        objective(algorithm, ready.batch, leaves, AlgorithmState()), objective(plain, kept, leaves, AlgorithmState())
    )
    found = algorithm.compute_loss(
        ready.batch, Outputs(**leaves), Denominators.from_view(view), AlgorithmState()
    ).metrics.reduce()
    assert found["opsm_dropped_share"] == pytest.approx(float(dropped.double().mean()))


@pytest.mark.parametrize("kl", ["reverse", "in_reward"])
def test_a_step_is_trained_with_the_coefficient_it_logged(kl: str) -> None:
    term = KLS[kl](coefficient=0.1, controller=AdaptiveKLController(target=1e-3, horizon=20))
    algorithm = AlgorithmConfig(advantage=RLOO, kl=term)
    batch = fixture(5)
    batch = batch.replace(ref_logp=batch.require("ref_logp") - 0.5)
    state, seen = AlgorithmState(), []
    for step in range(3):
        ready = algorithm.estimate(batch, state, step=step)
        seen.append(ready.metrics.reduce()["kl_coefficient"])
        assert term.current_coefficient(ready.state) == seen[-1]
        state = ready.next_state
    assert seen[0] == 0.1 and seen[0] < seen[1] < seen[2]


def test_an_adaptive_coefficient_that_could_turn_negative_is_refused() -> None:
    term = KLS["reverse"](coefficient=0.1, controller=AdaptiveKLController(target=1e9, horizon=2))
    with pytest.raises(ConfigError, match=r"A step has 14 rollouts and `kl.controller.horizon` is 2"):
        AlgorithmConfig(kl=term).estimate(fixture(0), AlgorithmState())


@pytest.mark.parametrize("loss", ["dppo", "reinforce", "gpg", "vespo", "ipo", "flash_reinforce"])
def test_two_policies_are_refused_where_nothing_reads_the_third(loss: str) -> None:
    with pytest.raises(ConfigError, match=r"Nothing here reads π_old"):
        AlgorithmConfig(loss=LOSSES[loss](), advantage=RLOO, correction=CorrectionConfig(policies="two"))


def test_two_policies_are_refused_where_an_advantage_needs_the_trainers_whole_distribution() -> None:
    """π would be the sampler's, and Σπ² of the pass that is not made."""
    with pytest.raises(ConfigError, match=r"`correction.policies=two` the first is the sampler's"):
        AlgorithmConfig(advantage=ADVANTAGES["token_baseline"](), correction=CorrectionConfig(policies="two"))


def test_a_reward_that_may_fall_below_zero_is_refused_for_maxrl() -> None:
    with pytest.raises(ConfigError, match=r"`advantage=maxrl` needs rewards of at least 0"):
        AlgorithmConfig(advantage=ADVANTAGES["maxrl"](), kl=KLS["in_reward"]())


@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), float("inf")])
def test_a_number_that_is_read_and_is_not_finite_names_its_rollout(bad: float) -> None:
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


def test_an_advantage_that_is_not_finite_names_its_rollout() -> None:
    batch = fixture(2)
    cut = torch.ones(batch.num_rollouts, dtype=torch.bool)
    worth = torch.full((batch.num_rollouts,), float("nan"), dtype=torch.float64)
    gae = AlgorithmConfig(advantage=ADVANTAGES["gae"](bootstrap_truncated=True))
    with pytest.raises(BatchError, match=r"`advantage` is nan at action token \d+ of rollout \d+"):
        gae.estimate(batch.replace(truncated=cut, final_value=worth), AlgorithmState())


def test_an_infinite_reward_paid_on_tool_output_names_its_rollout() -> None:
    batch = fixture(2)
    act = next(int(t) for t in batch.action.nonzero()[:, 0] if not bool(batch.action[t + 1]))
    paid = torch.zeros(batch.num_tokens, dtype=torch.float64)
    paid[act + 1] = float("inf")
    with pytest.raises(RewardError, match=r"has a token reward of inf"):
        AlgorithmConfig().estimate(batch.replace(token_reward=paid), AlgorithmState())


def test_a_weight_of_an_earlier_estimate_is_not_obeyed() -> None:
    batch, leaves = fixture(4), said(fixture(4))
    weighted = AlgorithmConfig(correction=CorrectionConfig(weight="truncate")).estimate(batch, AlgorithmState()).batch
    again, fresh = (
        AlgorithmConfig().estimate(weighted, AlgorithmState()),
        AlgorithmConfig().estimate(batch, AlgorithmState()),
    )
    assert torch.equal(gradient(AlgorithmConfig(), again, leaves).loss, gradient(AlgorithmConfig(), fresh, leaves).loss)


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo", "gpg", "reinforce++_baseline"])
def test_rewards_that_differ_by_the_order_of_a_sum_are_equal(advantage: str) -> None:
    batch = fixture(1, (2, 2), idle=False)
    reward = torch.tensor([0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1, 0.0, 1.0], dtype=torch.float64)
    assert reward[0] != reward[1]
    level = batch.replace(reward=reward, token_reward=None)
    exact = level.replace(reward=torch.tensor([0.6, 0.6, 0.0, 1.0], dtype=torch.float64))
    algorithm = AlgorithmConfig(advantage=ADVANTAGES[advantage]())
    found, wanted = (algorithm.estimate(b, AlgorithmState()).batch.require("advantage") for b in (level, exact))
    assert torch.allclose(found, wanted, atol=1e-12)


def test_what_there_was_to_compare_is_told_before_penalties() -> None:
    batch = fixture(3)
    plain = AlgorithmConfig(advantage=RLOO).estimate(batch, AlgorithmState()).metrics.reduce()
    charged = (
        AlgorithmConfig(advantage=RLOO, kl=KLS["in_reward"](coefficient=2.0))
        .estimate(batch, AlgorithmState())
        .metrics.reduce()
    )
    for name in ("reward_mean", "group_std", "zero_variance_share"):
        assert charged[name] == plain[name]


class Reduced(PolicyLoss):
    """A plug-in that reduces what it should leave to its base."""

    def per_token_loss(self, view: View) -> tuple[torch.Tensor, Metrics]:
        return -(view.column("advantage") * view.logp).mean(), Metrics()


class Short(Advantage):
    """A plug-in that forgets a token."""

    def __call__(self, view: View, state: AlgorithmState) -> AdvantageEstimate:
        return AdvantageEstimate(torch.zeros(len(view.action_index) - 1))


def test_a_plug_in_that_returns_the_wrong_shape_is_named() -> None:
    batch, algorithm = fixture(1), AlgorithmConfig(advantage=RLOO, loss=Reduced())
    ready = algorithm.estimate(batch, AlgorithmState())
    with pytest.raises(
        ConfigError, match=r"`per_token_loss` of Reduced returned a tensor of shape \(\); it must return one number"
    ):
        gradient(algorithm, ready, said(batch))
    with pytest.raises(ConfigError, match=r"The advantage Short returned a tensor of shape"):
        AlgorithmConfig(advantage=Short()).estimate(batch, AlgorithmState())


@pytest.mark.parametrize("size", [3, 10_000])
def test_a_forward_pass_of_another_batch_is_refused(size: int) -> None:
    batch = fixture(1)
    ready = AlgorithmConfig().estimate(batch, AlgorithmState())
    with pytest.raises(BatchError, match=rf"The model's `logp` has the shape \({size},\); for this batch it needs"):
        AlgorithmConfig().compute_loss(
            ready.batch, Outputs(logp=torch.zeros(size)), Denominators.from_view(View(batch)), AlgorithmState()
        )
