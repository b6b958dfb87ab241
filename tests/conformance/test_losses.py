"""Family (c): every policy loss off-policy compared with its formula, in value and gradient, and on-policy with
REINFORCE, whose gradient all of them estimate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from etude.algorithms import Denominators, Outputs, PolicyLoss, Reduction, Unit, View
from etude.algorithms.losses import LOSSES
from etude.batch import Batch
from tests.conformance import restated_losses as restated
from tests.conformance.fixtures import irregular_batch
from tests.conformance.restated_losses import Formula, Tokens, finite_differences
from tests.conformance.twin import Array

GRADIENT_TOLERANCE = 1e-8
"""The largest allowed distance of a gradient from finite differences, which are exact to about 1e-10."""
VALUE_TOLERANCE = 1e-12


def off_policy_batch(seed: int = 3, drift: float = 0.3) -> tuple[Batch, torch.Tensor]:
    """Return a batch with three different policies and advantages of both signs, and log π_θ with a gradient."""
    batch = irregular_batch(seed, (3, 1, 4), drift=drift)
    noise = torch.from_numpy(np.random.default_rng(seed + 100).normal(size=batch.num_tokens))
    assert batch.old_logp is not None
    logp = (batch.old_logp + drift * noise).clamp(max=-1e-3)
    return batch, logp.requires_grad_()


def with_rollout_advantages(batch: Batch) -> Batch:
    """Return the batch with one advantage for each rollout."""
    advantages = torch.from_numpy(np.random.default_rng(5).normal(size=batch.num_rollouts))
    return batch.replace(advantage=advantages.repeat_interleave(batch.rollout_token_offsets.diff()))


def restated_tokens(batch: Batch, logp: torch.Tensor, unit: Unit = "rollout") -> Tokens:
    view = View(batch)

    def column(values: torch.Tensor | None) -> Array:
        assert values is not None
        return values.detach()[view.action_index].double().numpy()

    now = column(logp)
    chosen = column(batch.chosen) if batch.chosen is not None else np.zeros(len(now))
    return Tokens(
        logp=now,
        frozen=now,
        old=column(batch.old_logp),
        mu=column(batch.behavior_logp),
        advantage=column(batch.advantage),
        lengths=view.units(unit).lengths.tolist(),
        chosen=chosen,
    )


def value_and_gradient(loss: PolicyLoss, batch: Batch, logp: torch.Tensor) -> tuple[float, Array]:
    view = View(batch, Outputs(logp=logp))
    result = loss(view, Denominators.from_view(view)).loss
    assert result.requires_grad, "the loss has no gradient"
    grad = torch.autograd.grad(result, logp)[0]
    assert bool((grad[~batch.action] == 0).all()), "the context has a gradient"
    return float(result.detach()), grad[view.action_index].numpy()


def check_formula(loss: PolicyLoss, formula: Formula, batch: Batch, logp: torch.Tensor) -> None:
    """Check that a loss has the formula's value, and its derivative by every log-prob."""
    x = restated_tokens(batch, logp, loss.unit)

    def reduced_formula(now: Array) -> float:
        return restated.reduce_terms(formula(replace(x, logp=now)), x.lengths, loss.reduction)

    value, grad = value_and_gradient(loss, batch, logp)
    np.testing.assert_allclose(value, reduced_formula(x.logp), rtol=VALUE_TOLERANCE, atol=VALUE_TOLERANCE)
    expected = finite_differences(reduced_formula, x.logp)
    assert np.abs(expected).max() > 1e-3, "the formula has no gradient here: nothing is compared"
    np.testing.assert_allclose(grad, expected, rtol=GRADIENT_TOLERANCE, atol=GRADIENT_TOLERANCE)


# -- losses and their formulas ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dual", [None, 1.5])
@pytest.mark.parametrize("how", ["token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_ppo(dual: float | None, how: Reduction) -> None:
    loss = LOSSES["ppo"](clip_low=0.2, clip_high=0.28, dual_clip=dual, reduction=how)
    check_formula(loss, restated.ppo(0.2, 0.28, dual), *off_policy_batch(drift=0.6))


def test_gspo() -> None:
    check_formula(LOSSES["gspo"](clip_low=0.02, clip_high=0.03), restated.gspo(0.02, 0.03), *off_policy_batch())


def test_losses_of_units_over_turns() -> None:
    """The unit is a turn: its mean or product of ratios, with the rollout's advantage or its own."""
    batch, logp = off_policy_batch(drift=0.6)
    view = View(batch)
    advantages = torch.from_numpy(np.random.default_rng(6).normal(size=view.turns.count))
    with_turn_advantages = batch.replace(advantage=view.scatter(view.turns.broadcast(advantages), fill=torch.nan))
    assert view.turns.count > view.rollouts.count
    formulas: dict[str, tuple[dict[str, Any], Formula]] = {
        "gspo": ({"clip_low": 0.02, "clip_high": 0.03}, restated.gspo(0.02, 0.03)),
        "gmpo": ({}, restated.gmpo(0.4)),
        "vespo": ({"reduction": "seq-mean-token-mean"}, restated.vespo((2, 3), (3, 2))),
        "flash_reinforce": ({"threshold": 0.3}, restated.flash_reinforce(0.3)),
    }
    for name, (options, formula) in formulas.items():
        for batch_of_unit in (with_rollout_advantages(batch), with_turn_advantages):
            check_formula(LOSSES[name](unit="turn", **options), formula, batch_of_unit, logp)


def test_cispo() -> None:
    check_formula(LOSSES["cispo"](low=0.7, high=1.2), restated.cispo(0.7, 1.2), *off_policy_batch())
    check_formula(LOSSES["cispo"](), restated.cispo(0.0, 5.0), *off_policy_batch())


def test_sapo() -> None:
    check_formula(LOSSES["sapo"](), restated.sapo(1.0, 1.05), *off_policy_batch())
    check_formula(LOSSES["sapo"](tau_positive=0.5, tau_negative=3.0), restated.sapo(0.5, 3.0), *off_policy_batch())


def test_gmpo() -> None:
    batch, logp = off_policy_batch(drift=0.6)
    check_formula(LOSSES["gmpo"](), restated.gmpo(0.4), with_rollout_advantages(batch), logp)


@pytest.mark.parametrize(("divergence", "default"), [("tv", 0.2), ("kl", 0.05)])
def test_dppo(divergence: str, default: float) -> None:
    """Each sign of the advantage has its own threshold. Both, one or none of them are given."""
    for low, high in ((None, None), (0.01, 0.01), (0.01, None), (None, 0.01), (0.03, 0.005)):
        bounds = low or default, high or default
        options = {"divergence": divergence, "threshold_low": low, "threshold_high": high}
        check_formula(LOSSES["dppo"](**options), restated.dppo(divergence, *bounds, 20.0), *off_policy_batch(drift=0.6))
    capped = LOSSES["dppo"](divergence=divergence, threshold_low=0.01, cap=1.1)
    check_formula(capped, restated.dppo(divergence, 0.01, default, 1.1), *off_policy_batch(drift=0.6))


def test_clip_cov() -> None:
    batch, logp = off_policy_batch(drift=0.6)
    batch = batch.replace(chosen=torch.arange(batch.num_tokens) % 3 == 0)
    check_formula(LOSSES["clip_cov"](clip_high=0.28), restated.clip_cov(0.2, 0.28), batch, logp)


def test_kl_cov() -> None:
    batch, logp = off_policy_batch()
    batch = batch.replace(chosen=torch.arange(batch.num_tokens) % 3 == 0)
    check_formula(LOSSES["kl_cov"](coefficient=0.7), restated.kl_cov(0.7), batch, logp)


def test_dro() -> None:
    check_formula(LOSSES["dro"](beta=0.3), restated.dro(0.3), *off_policy_batch())


def test_reinforce() -> None:
    check_formula(LOSSES["reinforce"](), restated.reinforce, *off_policy_batch())


def test_reinforce_with_a_capped_weight() -> None:
    """Without π_old the weight is the detached min(π_θ/μ, C)."""
    check_formula(LOSSES["reinforce"](cap=1.2), restated.capped_reinforce(1.2), *off_policy_batch())


def test_gpg() -> None:
    check_formula(LOSSES["gpg"](), restated.reinforce, *off_policy_batch())


def test_decoupled_ppo() -> None:
    check_formula(LOSSES["decoupled_ppo"](), restated.decoupled_ppo(0.2, 0.2, None), *off_policy_batch(4, drift=0.6))


def test_decoupled_ppo_log_linear() -> None:
    """The trainer is at version 5 and computes version 6. Tokens have versions 3, 4 and 5."""
    batch, logp = off_policy_batch(drift=0.6)
    batch = batch.replace(trainer_version=torch.full((batch.num_rollouts,), 5))
    version = View(batch).column("version").numpy()
    alpha = (5 - version) / (6 - version)
    assert {*version} == {3, 4, 5}
    loss = LOSSES["decoupled_ppo"](prox="log_linear")
    check_formula(loss, restated.decoupled_ppo(0.2, 0.2, alpha), batch, logp)


def test_vespo() -> None:
    check_formula(LOSSES["vespo"](), restated.vespo((2, 3), (3, 2)), *off_policy_batch())


def test_m2po() -> None:
    batch, logp = off_policy_batch()
    batch = batch.replace(chosen=torch.arange(batch.num_tokens) % 3 == 0)
    check_formula(LOSSES["m2po"](), restated.m2po, batch, logp)


def test_ipo() -> None:
    for bound in (0.3, 0.1):
        check_formula(LOSSES["ipo"](threshold=bound), restated.ipo(bound), *off_policy_batch(drift=0.6))
    check_formula(LOSSES["ipo"](), restated.ipo(0.3), *off_policy_batch(drift=0.6))


def test_flash_reinforce() -> None:
    """Some rollouts are within the bound. The reductions are that of the paper, and another."""
    for bound in (0.1, 0.5):
        for how in ("seq-mean-token-mean", "token-mean"):
            loss = LOSSES["flash_reinforce"](threshold=bound, reduction=how)
            check_formula(loss, restated.flash_reinforce(bound), *off_policy_batch(drift=0.6))
    default = LOSSES["flash_reinforce"]()
    assert default.reduction == "seq-mean-token-mean"
    check_formula(default, restated.flash_reinforce(1e-3), *off_policy_batch(drift=0.02))


# -- tokens picked from the rollout batch -----------------------------------------------------------------------------


def picked_tokens(loss: PolicyLoss, batch: Batch, seed: int = 7, step: int = 2) -> Array:
    result = loss.choose_tokens(View(batch), seed=seed, step=step)
    assert result is not None
    assert 0 < int(result.sum()) < len(result)
    return result.numpy()


def test_clip_cov_picks_by_hash_within_the_band() -> None:
    batch, logp = off_policy_batch()
    x = restated_tokens(batch, logp)
    cov = (x.advantage - x.advantage.mean()) * (x.old - x.old.mean())
    candidates = [i for i in range(len(cov)) if 0.1 < cov[i] < 1.0]
    keys = restated.token_hashes(batch, seed=7, step=2)
    expected = sorted(candidates, key=lambda i: keys[i])[:2]
    assert len(candidates) > 2
    result = picked_tokens(LOSSES["clip_cov"](share=2.6 / len(cov), cov_low=0.1, cov_high=1.0), batch)  # rounded down
    assert {*result.nonzero()[0]} == {*expected}


def test_kl_cov_picks_the_highest() -> None:
    batch, logp = off_policy_batch()
    x = restated_tokens(batch, logp)
    cov = (x.advantage - x.advantage.mean()) * (x.old - x.old.mean())
    expected = np.argsort(-cov)[:4]
    assert {*picked_tokens(LOSSES["kl_cov"](share=4.6 / len(cov)), batch).nonzero()[0]} == {*expected}  # rounded down


def test_kl_cov_breaks_ties_by_hash() -> None:
    batch, _ = off_policy_batch()
    equal_advantages = batch.replace(advantage=torch.where(batch.action, 1.0, batch.require("advantage")))
    keys = restated.token_hashes(batch, seed=7, step=2)
    expected = sorted(range(len(keys)), key=lambda i: keys[i])[: int(0.1 * len(keys))]
    assert {*picked_tokens(LOSSES["kl_cov"](share=0.1), equal_advantages).nonzero()[0]} == {*expected}


@pytest.mark.parametrize("bound", [0.02, 0.04])
def test_m2po_drops_the_fewest_tokens_that_lower_the_second_moment_enough(bound: float) -> None:
    batch, logp = off_policy_batch()
    x = restated_tokens(batch, logp)
    moment = (x.old - x.mu) ** 2
    order = list(np.argsort(moment))
    while moment[order].mean() > bound:
        order.pop()
    dropped = picked_tokens(LOSSES["m2po"](bound=bound), batch)
    assert {*dropped.nonzero()[0]} == {*range(len(moment))} - {*order}


# -- all losses -------------------------------------------------------------------------------------------------------


def on_policy_batch() -> tuple[Batch, torch.Tensor]:
    batch, logp = off_policy_batch()
    same = logp.detach().clone()
    no_tokens = torch.zeros(batch.num_tokens, dtype=torch.bool)
    versions = torch.full((batch.num_rollouts,), 5)
    batch = with_rollout_advantages(batch).replace(
        old_logp=same, behavior_logp=same, chosen=no_tokens, trainer_version=versions
    )
    return batch, logp


REDUCTIONS: tuple[Reduction, ...] = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")
ONE_NUMBER_PER_ROLLOUT = "gmpo"  # accepts no reduction that sums over tokens


@pytest.mark.parametrize(
    ("name", "how"),
    [(n, how) for n in LOSSES for how in REDUCTIONS if n != ONE_NUMBER_PER_ROLLOUT or how == "seq-mean-token-mean"],
)
def test_every_policy_loss_is_reinforce_on_policy(name: str, how: Reduction) -> None:
    """π_θ = π_old = μ, so no loss clips, weights or drops a token."""
    batch, logp = on_policy_batch()
    _, expected = value_and_gradient(LOSSES["reinforce"](reduction=how), batch, logp)
    _, result = value_and_gradient(LOSSES[name](reduction=how), batch, logp)
    assert np.abs(expected).max() > 1e-3
    np.testing.assert_allclose(result, expected, rtol=VALUE_TOLERANCE, atol=VALUE_TOLERANCE)


def test_log_linear_decoupled_ppo_is_reinforce_on_policy() -> None:
    batch, logp = on_policy_batch()
    _, expected = value_and_gradient(LOSSES["reinforce"](), batch, logp)
    _, result = value_and_gradient(LOSSES["decoupled_ppo"](prox="log_linear"), batch, logp)
    np.testing.assert_allclose(result, expected, rtol=VALUE_TOLERANCE, atol=VALUE_TOLERANCE)


OVER = [("token-mean", "rollout"), ("token-sum", "rollout")]
OVER += [(how, unit) for how in ("seq-mean-token-mean", "seq-mean-token-sum") for unit in ("rollout", "turn")]


@pytest.mark.parametrize(("how", "unit"), OVER)
def test_reductions(how: Reduction, unit: str) -> None:
    batch, logp = off_policy_batch()
    x = restated_tokens(batch, logp)
    lengths = View(batch).units("turn" if unit == "turn" else "rollout").lengths.tolist()
    value, _ = value_and_gradient(LOSSES["reinforce"](reduction=how, unit=unit), batch, logp)
    np.testing.assert_allclose(value, restated.reduce_terms(restated.reinforce(x), lengths, how), rtol=VALUE_TOLERANCE)


def test_reduction_by_a_constant() -> None:
    batch, logp = off_policy_batch()
    x = restated_tokens(batch, logp)
    loss = LOSSES["reinforce"](reduction="seq-mean-token-sum-norm", norm_length=40.0)
    value, _ = value_and_gradient(loss, batch, logp)
    expected = restated.reduce_terms(restated.reinforce(x), x.lengths, "seq-mean-token-sum", 40.0)
    np.testing.assert_allclose(value, expected, rtol=VALUE_TOLERANCE)


def test_rejected_tokens_still_count() -> None:
    """A token that is not kept contributes nothing, but every denominator counts it."""
    batch, logp = off_policy_batch()
    keep = torch.arange(batch.num_tokens) % 2 == 0
    x = restated_tokens(batch.replace(chosen=keep), logp)
    for how in ("token-mean", "seq-mean-token-mean"):
        value, grad = value_and_gradient(LOSSES["reinforce"](reduction=how), batch.replace(keep=keep), logp)
        expected = restated.reduce_terms(restated.reinforce(x) * x.chosen, x.lengths, how)
        np.testing.assert_allclose(value, expected, rtol=VALUE_TOLERANCE)
        assert (grad[x.chosen == 0] == 0).all()
