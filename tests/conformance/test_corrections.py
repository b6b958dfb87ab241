"""Corrections of the mismatch between sampler and trainer: unbiased where claimed, and equal to their formulas."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from etude.algorithms import AlgorithmConfig, AlgorithmState, Denominators, Outputs, View
from etude.algorithms.advantages import ADVANTAGES
from etude.algorithms.advantages.statistics import measure_staleness
from etude.algorithms.corrections import CorrectionConfig, RejectionRule, measure_mismatch, opsm_mask
from etude.algorithms.losses import LOSSES
from etude.batch import Batch
from tests.conformance import restated_losses as restated
from tests.conformance.fixtures import irregular_batch
from tests.conformance.mdp import (
    MDP,
    STATES,
    TOKENS,
    close,
    draw,
    logp,
    make_mdp,
    over_states,
    true_gradient,
)
from tests.conformance.test_losses import VALUE_TOLERANCE, off_policy_batch, restated_tokens, value_and_gradient
from tests.conformance.twin import Array, NumpyRollout, flat, numpy_rollouts
from tests.thread_ranks import on_ranks

UNTRUNCATED = 1e6


def mismatched_mdp() -> MDP:
    """Return an MDP in which the sampler differs from the trainer: μ ≠ π_old = π_θ."""
    theta = draw(1, STATES, TOKENS)
    return make_mdp(mu=theta + draw(7, STATES, TOKENS, scale=0.5))


def make_algorithm(advantage: str, correction: CorrectionConfig) -> AlgorithmConfig:
    loss = LOSSES["reinforce"](reduction="seq-mean-token-sum")
    return AlgorithmConfig(advantage=ADVANTAGES[advantage](), loss=loss, correction=correction)


# -- unbiased ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3])
def test_sequence_weights_give_the_gradient(n: int) -> None:
    """With ∏ρ over the rollout, not truncated, the gradient is as if the trainer had sampled."""
    mdp = mismatched_mdp()
    weights_of = make_algorithm("rloo", CorrectionConfig(weight="truncate", level="sequence", high=UNTRUNCATED))
    expected = -true_gradient(mdp.theta, mdp.reward)
    close(mdp.expected_gradient(weights_of, n), expected)
    unweighted = mdp.expected_gradient(make_algorithm("rloo", CorrectionConfig()), n)
    assert (unweighted - expected).norm() > 0.1 * expected.norm()


def test_token_weights_give_the_gradient_in_the_samplers_states() -> None:
    """ρ_t corrects the choice in a state, but not the probability of the state.

    Distillation shows this, because its advantage depends on the token alone.
    """
    mdp = mismatched_mdp()

    def divergence(theta: Tensor) -> Tensor:
        return (logp(theta).exp() * (logp(theta) - logp(mdp.reference))).sum(-1)

    weights_of = make_algorithm("distillation", CorrectionConfig(weight="truncate", level="token", high=UNTRUNCATED))
    result = mdp.expected_gradient(weights_of, 1)
    close(result, over_states(mdp.theta, mdp.mu, divergence))
    trainers_gradient = over_states(mdp.theta, mdp.theta, divergence)
    assert (result - trainers_gradient).norm() > 0.1 * trainers_gradient.norm()


def test_truncation_is_biased() -> None:
    mdp = mismatched_mdp()
    expected = -true_gradient(mdp.theta, mdp.reward)
    result = mdp.expected_gradient(
        make_algorithm("rloo", CorrectionConfig(weight="truncate", level="sequence", high=1.0)), 1
    )
    assert (result - expected).norm() > 0.02 * expected.norm()


# -- formulas ---------------------------------------------------------------------------------------------------------


def ratios(rollouts: list[NumpyRollout], level: str) -> Array:
    """Return ρ of each token, or that of its rollout."""
    result = []
    for t in rollouts:
        log_rho = t["old_logp"] - t["behavior_logp"]
        if level == "token":
            result.append(np.exp(log_rho))
        elif len(t):
            sequence_ratios = log_rho.sum() if level == "sequence" else log_rho.mean()
            result.append(np.full(len(t), np.exp(sequence_ratios)))
    return flat(result)


def weights_of(batch: Batch, correction: CorrectionConfig) -> Array:
    result = correction(View(batch)).weight
    assert result is not None
    return result.numpy()


@pytest.mark.parametrize(("level", "high"), [("token", 2.0), ("sequence", 5.0), ("geometric", 2.0), ("token", 1.1)])
def test_truncated_weights(level: str, high: float) -> None:
    batch = irregular_batch(3, drift=0.6)
    rho = ratios(numpy_rollouts(batch), level)
    result = weights_of(batch, CorrectionConfig(weight="truncate", level=level, high=high))
    np.testing.assert_allclose(result, np.minimum(rho, high), rtol=VALUE_TOLERANCE)
    if high == (5.0 if level == "sequence" else 2.0):
        np.testing.assert_array_equal(result, weights_of(batch, CorrectionConfig(weight="truncate", level=level)))


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_masked_weights(level: str) -> None:
    batch = irregular_batch(3, drift=0.6)
    rho = ratios(numpy_rollouts(batch), level)
    for low, high in ((0.5, 5.0), (0.9, 1.1)):
        expected = np.where((rho >= low) & (rho <= high), rho, 0.0)
        result = weights_of(batch, CorrectionConfig(weight="mask", level=level, low=low, high=high))
        np.testing.assert_allclose(result, expected, rtol=VALUE_TOLERANCE)
    assert (expected == 0).any() and (expected != 0).any()


@pytest.mark.parametrize("over", ["tokens", "rollouts"])
def test_weights_rescaled_to_mean_one(over: str) -> None:
    """Weights are rescaled after truncation. A rollout without actions has no weight to count."""
    batch = irregular_batch(3, drift=0.6)
    rollouts = numpy_rollouts(batch)
    truncated = np.minimum(ratios(rollouts, "token"), 1.5)
    ends = np.cumsum([len(t) for t in rollouts])
    means = [truncated[end - len(t) : end].mean() for t, end in zip(rollouts, ends, strict=True) if len(t)]
    expected = truncated / (truncated.mean() if over == "tokens" else np.mean(means))
    result = weights_of(batch, CorrectionConfig(weight="truncate", high=1.5, normalize=over))
    np.testing.assert_allclose(result, expected, rtol=VALUE_TOLERANCE)


def statistic(kind: str, log_rho: Array) -> Array:
    return {"k1": log_rho, "k2": log_rho**2 / 2, "k3": np.exp(log_rho) - 1 - log_rho}[kind]


@pytest.mark.parametrize(
    ("kind", "over"), list(itertools.product(["k1", "k2", "k3"], ["token", "seq_sum", "seq_mean", "seq_max"]))
)
def test_rejection(kind: str, over: str) -> None:
    batch = irregular_batch(3, (4, 4, 4), drift=0.2)
    low, high = None, 0.1 if over in ("seq_sum", "seq_max") else 0.02
    if kind == "k1":
        low, high = (0.6, 1.5) if over == "seq_max" else (0.9, 1.05)
    result = CorrectionConfig(reject=(RejectionRule(statistic=kind, over=over, low=low, high=high),))(View(batch)).keep
    assert result is not None
    expected = []
    for t in numpy_rollouts(batch):
        value = statistic(kind, t["old_logp"] - t["behavior_logp"])
        value = {"token": value, "seq_max": value, "seq_sum": value.sum(), "seq_mean": value.sum() / max(len(t), 1)}[
            over
        ]
        value = np.exp(value) if kind == "k1" else value
        inside = (value <= high) & (value >= (low or -np.inf))
        expected.append(np.broadcast_to(inside.all() if over == "seq_max" else inside, len(t)))
    assert {*np.concatenate(expected)} == {False, True}
    np.testing.assert_array_equal(result.numpy(), np.concatenate(expected))


def test_rules_combine_and_vetoes_drop_whole_rollouts() -> None:
    batch = irregular_batch(3, (4, 4, 4), drift=0.3)
    rules = RejectionRule(high=1.4), RejectionRule(over="seq_max", low=0.5)
    keeps = [CorrectionConfig(reject=(rule,))(View(batch)).keep for rule in rules]
    both = CorrectionConfig(reject=rules)(View(batch)).keep
    assert both is not None and keeps[0] is not None and keeps[1] is not None
    assert not torch.equal(keeps[0], keeps[1])
    assert torch.equal(both, keeps[0] & keeps[1])


@pytest.mark.parametrize("delta", [0.0, 0.05])
def test_opsm(delta: float) -> None:
    """A rollout is dropped if A < 0 and the mean of log(μ/π_θ) is above δ."""
    batch, logp = off_policy_batch(drift=0.2)
    advantages = torch.linspace(-1, 1, batch.num_rollouts, dtype=torch.float64)
    batch = batch.replace(advantage=advantages.repeat_interleave(batch.rollout_token_offsets.diff()))
    result = opsm_mask(View(batch, Outputs(logp=logp)), delta, "rollout")
    expected = []
    for t in numpy_rollouts(batch, logp=logp):
        drop = len(t) > 0 and t["advantage"][0] < 0 and (t["behavior_logp"] - t["logp"]).mean() > delta
        expected.append(np.full(len(t), not drop))
    assert {*np.concatenate(expected)} == {False, True}
    np.testing.assert_array_equal(result.numpy(), np.concatenate(expected))


def test_the_weight_multiplies_ppo_after_its_maximum() -> None:
    batch, logp = off_policy_batch(drift=0.6)
    algorithm = AlgorithmConfig(
        advantage=ADVANTAGES["rloo"](), loss=LOSSES["ppo"](), correction=CorrectionConfig(weight="truncate", high=1.3)
    )
    ready = algorithm.estimate(batch, AlgorithmState()).batch
    x = restated_tokens(ready, logp)
    expected = np.minimum(np.exp(x.old - x.mu), 1.3) * restated.ppo(0.2, 0.2, None)(x)
    value, _ = value_and_gradient(algorithm.loss, ready, logp)
    np.testing.assert_allclose(value, expected.mean(), rtol=VALUE_TOLERANCE)


def test_with_two_policies_the_ratio_is_over_the_sampler() -> None:
    """With two policies π_old is defined as μ, so PPO's ratio is π_θ/μ without another weight."""
    batch, logp = off_policy_batch(drift=0.6)
    algorithm = AlgorithmConfig(
        advantage=ADVANTAGES["rloo"](), loss=LOSSES["ppo"](), correction=CorrectionConfig(policies="two")
    )
    ready = algorithm.estimate(batch.replace(old_logp=None), AlgorithmState()).batch
    view = View(ready, Outputs(logp=logp))
    x = restated_tokens(ready, logp)
    np.testing.assert_array_equal(x.old, x.mu)
    result = algorithm.compute_loss(ready, view.outputs, Denominators.from_view(view), AlgorithmState()).loss
    np.testing.assert_allclose(result.detach().numpy(), restated.ppo(0.2, 0.2, None)(x).mean(), rtol=VALUE_TOLERANCE)


def test_a_step_is_scaled_by_the_square_root_of_the_effective_sample_size() -> None:
    """The scale counts rollouts with actions, of all ranks. It is 1 without the option, or if the policies agree."""
    batch, scaled = irregular_batch(3, (3, 1, 4)), CorrectionConfig(step_scaling="sqrt_ess")
    w = np.array([np.exp((t["old_logp"] - t["behavior_logp"]).sum()) for t in numpy_rollouts(batch) if len(t)])
    assert len(w) < batch.num_rollouts
    expected = np.sqrt(w.sum() ** 2 / (w**2).sum() / len(w))
    np.testing.assert_allclose(scaled.step_scale(View(batch)), expected, rtol=VALUE_TOLERANCE)
    assert 0.1 < expected < 0.9
    shares = [batch.select([*rollouts]) for rollouts in (range(4), (), range(4, batch.num_rollouts))]

    def scale_on_rank(rank: int, ranks: Any) -> Any:
        return scaled.step_scale(View(shares[rank], ranks=ranks))

    np.testing.assert_allclose(on_ranks(3, scale_on_rank), [expected] * 3, rtol=VALUE_TOLERANCE)
    assert CorrectionConfig().step_scale(View(batch)) == 1
    assert scaled.step_scale(View(batch.replace(old_logp=batch.behavior_logp))) == pytest.approx(1)
    assert scaled.step_scale(View(batch.replace(action=torch.zeros_like(batch.action)))) == 1


def test_the_metrics_of_staleness_are_their_formulas() -> None:
    """A rollout's staleness is that of its oldest action token. A rollout without actions does not count."""
    batch = irregular_batch(3, (3, 1, 4, 2))
    trainer_version = torch.tensor([5, 6, 5, 9, 5, 7, 6, 5, 25, 5])
    staleness = [
        int(v) - t["version"].min() for v, t in zip(trainer_version, numpy_rollouts(batch), strict=True) if len(t)
    ]
    result = measure_staleness(View(batch.replace(trainer_version=trainer_version))).reduce()
    largest = max(staleness)
    assert largest > 16 and len(staleness) < len(trainer_version)
    expected = {str(k): np.mean([s == k for s in staleness]) for k in range(17)}
    expected |= {"mean": np.mean(staleness), "max": largest, "over_16": np.mean([s > 16 for s in staleness])}
    assert result == pytest.approx({f"staleness/{name}": value for name, value in expected.items()})
    assert sum(expected[name] for name in [*map(str, range(17)), "over_16"]) == pytest.approx(1)
    assert not measure_staleness(View(batch)), "the trainer's version is not known"


def test_the_metrics_of_the_mismatch_are_their_formulas() -> None:
    batch = irregular_batch(3)
    rollouts = numpy_rollouts(batch)
    old, mu = flat([t["old_logp"] for t in rollouts]), flat([t["behavior_logp"] for t in rollouts])
    rho = np.exp(old - mu)
    sequence_ratios = np.array([np.exp((t["old_logp"] - t["behavior_logp"]).sum()) for t in rollouts if len(t)])
    assert len(sequence_ratios) < len(rollouts)
    expected = {
        "k1": (mu - old).mean(),
        "k3": (rho - 1 - np.log(rho)).mean(),
        "chi2": (rho**2).mean() - 1,
        "sampler_perplexity": np.exp(-mu.mean()),
        "trainer_perplexity": np.exp(-old.mean()),
        "effective_sample_size": rho.sum() ** 2 / (len(rho) * (rho**2).sum()),
        "rollout_effective_sample_size": sequence_ratios.sum() ** 2
        / (len(sequence_ratios) * (sequence_ratios**2).sum()),
        "correlation": np.corrcoef(np.exp(old), np.exp(mu))[0, 1],
        "largest_gap": np.abs(np.exp(old) - np.exp(mu)).max(),
    }
    result = measure_mismatch(View(batch)).reduce()
    assert result.keys() == {f"mismatch/{name}" for name in expected}
    for name, value in expected.items():
        np.testing.assert_allclose(result[f"mismatch/{name}"], value, rtol=1e-9)
