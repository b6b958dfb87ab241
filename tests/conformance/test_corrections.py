"""Corrections of the mismatch between sampler and trainer: unbiased where they claim to be, and the written formula."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from etude.algorithms import AlgorithmConfig, AlgorithmState, Denominators, Outputs, View
from etude.algorithms.advantages import ADVANTAGES
from etude.algorithms.corrections import CorrectionConfig, RejectionRule, measure_mismatch, opsm_mask
from etude.algorithms.logits import masked_token_logp
from etude.algorithms.losses import LOSSES
from etude.algorithms.staleness import measure_staleness
from etude.batch import Batch
from tests.conformance import restated_losses as restated
from tests.conformance.fixtures import awkward
from tests.conformance.laws import Table
from tests.conformance.mdp import (
    PATHS,
    PROMPTS,
    STATES,
    TOKENS,
    World,
    along,
    close,
    draw,
    everything,
    gradient,
    logp,
    over_states,
    true_gradient,
    world,
)
from tests.conformance.test_losses import VALUE, off_policy, tokens, value_and_slope
from tests.conformance.twin import Array, Try, flat, tries

UNTRUNCATED = 1e6


def mismatched() -> World:
    """The sampler is not the trainer: μ ≠ π_old = π_θ."""
    theta = draw(1, STATES, TOKENS)
    return world(mu=theta + draw(7, STATES, TOKENS, scale=0.5))


def assembled(advantage: str, correction: CorrectionConfig) -> AlgorithmConfig:
    loss = LOSSES["reinforce"](reduction="seq-mean-token-sum")
    return AlgorithmConfig(advantage=ADVANTAGES[advantage](), loss=loss, correction=correction)


# -- unbiased ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3])
def test_sequence_weights_give_the_gradient(n: int) -> None:
    """∏ρ over the rollout, not truncated: as if the trainer had sampled."""
    here = mismatched()
    weighed = assembled("rloo", CorrectionConfig(weight="truncate", level="sequence", high=UNTRUNCATED))
    wanted = -true_gradient(here.theta, here.reward)
    close(here.expected_gradient(weighed, n), wanted)
    plain = here.expected_gradient(assembled("rloo", CorrectionConfig()), n)
    assert (plain - wanted).norm() > 0.1 * wanted.norm()


def test_token_weights_give_the_gradient_in_the_samplers_states() -> None:
    """ρ_t corrects the choice made in a state, not how the state was come by: shown on distillation, whose advantage is
    the token's own."""
    here = mismatched()

    def divergence(theta: Tensor) -> Tensor:
        return (logp(theta).exp() * (logp(theta) - logp(here.reference))).sum(-1)

    weighed = assembled("distillation", CorrectionConfig(weight="truncate", level="token", high=UNTRUNCATED))
    found = here.expected_gradient(weighed, 1)
    close(found, over_states(here.theta, here.mu, divergence))
    own = over_states(here.theta, here.theta, divergence)
    assert (found - own).norm() > 0.1 * own.norm()


def test_truncation_is_biased() -> None:
    here = mismatched()
    wanted = -true_gradient(here.theta, here.reward)
    found = here.expected_gradient(
        assembled("rloo", CorrectionConfig(weight="truncate", level="sequence", high=1.0)), 1
    )
    assert (found - wanted).norm() > 0.02 * wanted.norm()


def test_sampling_mask_is_the_gradient_of_the_masked_policy() -> None:
    """The sampler draws from the two likeliest tokens of each state; renormalised over them, so does the trainer."""
    here = world()
    allowed = here.theta.topk(2, dim=1).indices
    barred = torch.full_like(here.theta, -torch.inf).scatter(1, allowed, 0.0)
    theta = here.theta.clone().requires_grad_()
    table = logp(theta + barred)
    possible = (along(table.detach()) > -torch.inf).nonzero()[:, 0]
    assert 0 < len(possible) < PROMPTS * len(PATHS)

    whole = along(torch.where(barred == 0, table, 0.0))[possible]
    wanted = gradient((whole.exp() * here.reward[possible]).sum(), theta)

    batch = everything().select(possible)
    where = View(batch).action_index
    state, ids = batch.extra["state"].tensor[where], batch.ids[where].long()
    sets, ends = allowed[state].flatten(), torch.arange(len(where) + 1) * 2
    told = masked_token_logp(theta[state], ids, sets, ends)
    rollouts = View(batch).rollouts
    torch.testing.assert_close(rollouts.sum(told), whole)
    weight = whole.detach().exp() * here.reward[possible]
    close(gradient((rollouts.broadcast(weight) * told).sum(), theta), wanted)


# -- the formulas -----------------------------------------------------------------------------------------------------


def weights(of: list[Try], level: str) -> Array:
    """ρ of each token, or of its rollout."""
    found = []
    for t in of:
        log_rho = t["old_logp"] - t["behavior_logp"]
        if level == "token":
            found.append(np.exp(log_rho))
        elif len(t):
            whole = log_rho.sum() if level == "sequence" else log_rho.mean()
            found.append(np.full(len(t), np.exp(whole)))
    return flat(found)


def weighed(batch: Batch, correction: CorrectionConfig) -> Array:
    found = correction(View(batch)).weight
    assert found is not None
    return found.numpy()


@pytest.mark.parametrize(("level", "high"), [("token", 2.0), ("sequence", 5.0), ("geometric", 2.0), ("token", 1.1)])
def test_truncated_weights(level: str, high: float) -> None:
    batch = awkward(3, drift=0.6)
    rho = weights(tries(batch), level)
    found = weighed(batch, CorrectionConfig(weight="truncate", level=level, high=high))
    np.testing.assert_allclose(found, np.minimum(rho, high), rtol=VALUE)
    if high == (5.0 if level == "sequence" else 2.0):
        np.testing.assert_array_equal(found, weighed(batch, CorrectionConfig(weight="truncate", level=level)))


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_masked_weights(level: str) -> None:
    batch = awkward(3, drift=0.6)
    rho = weights(tries(batch), level)
    for low, high in ((0.5, 5.0), (0.9, 1.1)):
        wanted = np.where((rho >= low) & (rho <= high), rho, 0.0)
        found = weighed(batch, CorrectionConfig(weight="mask", level=level, low=low, high=high))
        np.testing.assert_allclose(found, wanted, rtol=VALUE)
    assert (wanted == 0).any() and (wanted != 0).any()


@pytest.mark.parametrize("over", ["tokens", "rollouts"])
def test_weights_rescaled_to_mean_one(over: str) -> None:
    """After truncation; a rollout without an action has no weight to count."""
    batch = awkward(3, drift=0.6)
    of = tries(batch)
    cut = np.minimum(weights(of, "token"), 1.5)
    ends = np.cumsum([len(t) for t in of])
    means = [cut[end - len(t) : end].mean() for t, end in zip(of, ends, strict=True) if len(t)]
    wanted = cut / (cut.mean() if over == "tokens" else np.mean(means))
    found = weighed(batch, CorrectionConfig(weight="truncate", high=1.5, normalize=over))
    np.testing.assert_allclose(found, wanted, rtol=VALUE)


def statistic(kind: str, log_rho: Array) -> Array:
    return {"k1": log_rho, "k2": log_rho**2 / 2, "k3": np.exp(log_rho) - 1 - log_rho}[kind]


@pytest.mark.parametrize(
    ("kind", "over"), list(itertools.product(["k1", "k2", "k3"], ["token", "seq_sum", "seq_mean", "seq_max"]))
)
def test_rejection(kind: str, over: str) -> None:
    batch = awkward(3, (4, 4, 4), drift=0.2)
    low, high = None, 0.1 if over in ("seq_sum", "seq_max") else 0.02
    if kind == "k1":
        low, high = (0.6, 1.5) if over == "seq_max" else (0.9, 1.05)
    found = CorrectionConfig(reject=(RejectionRule(statistic=kind, over=over, low=low, high=high),))(View(batch)).keep
    assert found is not None
    wanted = []
    for t in tries(batch):
        value = statistic(kind, t["old_logp"] - t["behavior_logp"])
        value = {"token": value, "seq_max": value, "seq_sum": value.sum(), "seq_mean": value.sum() / max(len(t), 1)}[
            over
        ]
        value = np.exp(value) if kind == "k1" else value
        kept = (value <= high) & (value >= (low or -np.inf))
        wanted.append(np.broadcast_to(kept.all() if over == "seq_max" else kept, len(t)))
    assert {*np.concatenate(wanted)} == {False, True}
    np.testing.assert_array_equal(found.numpy(), np.concatenate(wanted))


def test_rules_combine_and_vetoes_drop_whole_rollouts() -> None:
    batch = awkward(3, (4, 4, 4), drift=0.3)
    rules = RejectionRule(high=1.4), RejectionRule(over="seq_max", low=0.5)
    each = [CorrectionConfig(reject=(rule,))(View(batch)).keep for rule in rules]
    both = CorrectionConfig(reject=rules)(View(batch)).keep
    assert both is not None and each[0] is not None and each[1] is not None
    assert not torch.equal(each[0], each[1])
    assert torch.equal(both, each[0] & each[1])


@pytest.mark.parametrize("delta", [0.0, 0.05])
def test_opsm(delta: float) -> None:
    """Dropped if A < 0 and the mean of log(μ/π_θ) is beyond δ."""
    batch, now = off_policy(drift=0.2)
    one = torch.linspace(-1, 1, batch.num_rollouts, dtype=torch.float64)
    batch = batch.replace(advantage=one.repeat_interleave(batch.rollout_token_offsets.diff()))
    found = opsm_mask(View(batch, Outputs(logp=now)), delta, "rollout")
    wanted = []
    for t in tries(batch, now=now):
        drop = len(t) > 0 and t["advantage"][0] < 0 and (t["behavior_logp"] - t["now"]).mean() > delta
        wanted.append(np.full(len(t), not drop))
    assert {*np.concatenate(wanted)} == {False, True}
    np.testing.assert_array_equal(found.numpy(), np.concatenate(wanted))


def test_the_weight_multiplies_after_the_maximum() -> None:
    batch, now = off_policy(drift=0.6)
    algorithm = AlgorithmConfig(
        advantage=ADVANTAGES["rloo"](), loss=LOSSES["ppo"](), correction=CorrectionConfig(weight="truncate", high=1.3)
    )
    ready = algorithm.estimate(batch, AlgorithmState()).batch
    x = tokens(ready, now)
    wanted = np.minimum(np.exp(x.old - x.mu), 1.3) * restated.ppo(0.2, 0.2, None)(x)
    value, _ = value_and_slope(algorithm.loss, ready, now)
    np.testing.assert_allclose(value, wanted.mean(), rtol=VALUE)


def test_bypass_measures_from_the_sampler() -> None:
    """Two policies: π_old is μ by decree, and PPO's ratio is π_θ/μ without a further weight."""
    batch, now = off_policy(drift=0.6)
    algorithm = AlgorithmConfig(
        advantage=ADVANTAGES["rloo"](), loss=LOSSES["ppo"](), correction=CorrectionConfig(policies="two")
    )
    ready = algorithm.estimate(batch.replace(old_logp=None), AlgorithmState()).batch
    view = View(ready, Outputs(logp=now))
    x = tokens(ready, now)
    np.testing.assert_array_equal(x.old, x.mu)
    found = algorithm.compute_loss(ready, view.outputs, Denominators.from_view(view), AlgorithmState()).loss
    np.testing.assert_allclose(found.detach().numpy(), restated.ppo(0.2, 0.2, None)(x).mean(), rtol=VALUE)


def test_a_step_is_scaled_by_the_root_of_the_effective_sample_size() -> None:
    """Over the rollouts that acted, of all ranks; 1 without the option, and where the policies agree."""
    batch, scaled = awkward(3, (3, 1, 4)), CorrectionConfig(step_scaling="sqrt_ess")
    w = np.array([np.exp((t["old_logp"] - t["behavior_logp"]).sum()) for t in tries(batch) if len(t)])
    assert len(w) < batch.num_rollouts
    wanted = np.sqrt(w.sum() ** 2 / (w**2).sum() / len(w))
    np.testing.assert_allclose(scaled.step_scale(View(batch)), wanted, rtol=VALUE)
    assert 0.1 < wanted < 0.9
    shares = [batch.select([*rollouts]) for rollouts in (range(4), (), range(4, batch.num_rollouts))]

    def on(rank: int, seat: Any) -> Any:
        return scaled.step_scale(View(shares[rank], ranks=seat))

    np.testing.assert_allclose(Table(3).run(on), [wanted] * 3, rtol=VALUE)  # type: ignore[arg-type]
    assert CorrectionConfig().step_scale(View(batch)) == 1
    assert scaled.step_scale(View(batch.replace(old_logp=batch.behavior_logp))) == pytest.approx(1)
    assert scaled.step_scale(View(batch.replace(action=torch.zeros_like(batch.action)))) == 1


def test_what_is_measured_of_the_staleness() -> None:
    """A rollout is as stale as its oldest action token; one that did not act is not counted."""
    batch = awkward(3, (3, 1, 4, 2))
    trainer = torch.tensor([5, 6, 5, 9, 5, 7, 6, 5, 25, 5])
    staleness = [int(v) - t["version"].min() for v, t in zip(trainer, tries(batch), strict=True) if len(t)]
    found = measure_staleness(View(batch.replace(trainer_version=trainer))).reduce()
    largest = max(staleness)
    assert largest > 16 and len(staleness) < len(trainer)
    wanted = {str(k): np.mean([s == k for s in staleness]) for k in range(17)}
    wanted |= {"mean": np.mean(staleness), "max": largest, "over_16": np.mean([s > 16 for s in staleness])}
    assert found == pytest.approx({f"staleness/{name}": value for name, value in wanted.items()})
    assert sum(wanted[name] for name in [*map(str, range(17)), "over_16"]) == pytest.approx(1)
    assert not measure_staleness(View(batch)), "the trainer's version is not known"


def test_what_is_measured_of_the_mismatch() -> None:
    batch = awkward(3)
    of = tries(batch)
    old, mu = flat([t["old_logp"] for t in of]), flat([t["behavior_logp"] for t in of])
    rho = np.exp(old - mu)
    whole = np.array([np.exp((t["old_logp"] - t["behavior_logp"]).sum()) for t in of if len(t)])
    assert len(whole) < len(of)
    wanted = {
        "k1": (mu - old).mean(),
        "k3": (rho - 1 - np.log(rho)).mean(),
        "chi2": (rho**2).mean() - 1,
        "sampler_perplexity": np.exp(-mu.mean()),
        "trainer_perplexity": np.exp(-old.mean()),
        "effective_sample_size": rho.sum() ** 2 / (len(rho) * (rho**2).sum()),
        "rollout_effective_sample_size": whole.sum() ** 2 / (len(whole) * (whole**2).sum()),
        "correlation": np.corrcoef(np.exp(old), np.exp(mu))[0, 1],
        "largest_gap": np.abs(np.exp(old) - np.exp(mu)).max(),
    }
    found = measure_mismatch(View(batch)).reduce()
    assert found.keys() == {f"mismatch/{name}" for name in wanted}
    for name, value in wanted.items():
        np.testing.assert_allclose(found[f"mismatch/{name}"], value, rtol=1e-9)
