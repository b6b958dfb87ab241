"""Family (c): every policy loss against its written formula, in value and in slope, off-policy; and on-policy against
the one gradient that all of them estimate."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from etude.algorithms import Denominators, Outputs, PolicyLoss, Reduction, Unit, View
from etude.algorithms.losses import LOSSES
from etude.batch import Batch
from tests.conformance import restated_losses as restated
from tests.conformance.fixtures import awkward
from tests.conformance.restated_losses import Formula, Tokens, slope
from tests.conformance.twin import Array

SLOPE = 1e-8
"""How far a gradient may be from the finite difference of the formula; the difference itself is good to about 1e-10."""
VALUE = 1e-12


def off_policy(seed: int = 3, drift: float = 0.3) -> tuple[Batch, torch.Tensor]:
    """A batch whose three policies differ, advantages of both signs, and log π_θ with a gradient."""
    batch = awkward(seed, (3, 1, 4), drift=drift)
    noise = torch.from_numpy(np.random.default_rng(seed + 100).normal(size=batch.num_tokens))
    assert batch.old_logp is not None
    logp = (batch.old_logp + drift * noise).clamp(max=-1e-3)
    return batch, logp.requires_grad_()


def per_rollout(batch: Batch) -> Batch:
    """The same batch with one advantage for each rollout."""
    one = torch.from_numpy(np.random.default_rng(5).normal(size=batch.num_rollouts))
    return batch.replace(advantage=one.repeat_interleave(batch.rollout_token_offsets.diff()))


def tokens(batch: Batch, logp: torch.Tensor, unit: Unit = "rollout") -> Tokens:
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


def value_and_slope(loss: PolicyLoss, batch: Batch, logp: torch.Tensor) -> tuple[float, Array]:
    view = View(batch, Outputs(logp=logp))
    found = loss(view, Denominators.from_view(view)).loss
    assert found.requires_grad, "the loss has no gradient"
    grad = torch.autograd.grad(found, logp)[0]
    assert bool((grad[~batch.action] == 0).all()), "the context has a gradient"
    return float(found.detach()), grad[view.action_index].numpy()


def is_formula(loss: PolicyLoss, formula: Formula, batch: Batch, logp: torch.Tensor) -> None:
    """The loss has the formula's value, and the slope of it in every log-prob."""
    x = tokens(batch, logp, loss.unit)

    def whole(now: Array) -> float:
        return restated.reduced(formula(replace(x, logp=now)), x.lengths, loss.reduction)

    value, grad = value_and_slope(loss, batch, logp)
    np.testing.assert_allclose(value, whole(x.logp), rtol=VALUE, atol=VALUE)
    wanted = slope(whole, x.logp)
    assert np.abs(wanted).max() > 1e-3, "the formula is flat here: nothing is compared"
    np.testing.assert_allclose(grad, wanted, rtol=SLOPE, atol=SLOPE)


# -- each loss and its formula ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dual", [None, 1.5])
@pytest.mark.parametrize("how", ["token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_ppo(dual: float | None, how: Reduction) -> None:
    loss = LOSSES["ppo"](clip_low=0.2, clip_high=0.28, dual_clip=dual, reduction=how)
    is_formula(loss, restated.ppo(0.2, 0.28, dual), *off_policy(drift=0.6))


def test_gspo() -> None:
    is_formula(LOSSES["gspo"](clip_low=0.02, clip_high=0.03), restated.gspo(0.02, 0.03), *off_policy())


def test_losses_of_units_over_turns() -> None:
    """A turn in the place of a rollout: its mean or product of ratios, under the rollout's advantage or its own."""
    batch, logp = off_policy(drift=0.6)
    view = View(batch)
    one = torch.from_numpy(np.random.default_rng(6).normal(size=view.turns.count))
    per_turn = batch.replace(advantage=view.scatter(view.turns.broadcast(one), fill=torch.nan))
    assert view.turns.count > view.rollouts.count
    formulas = {
        "gspo": ({"clip_low": 0.02, "clip_high": 0.03}, restated.gspo(0.02, 0.03)),
        "gmpo": ({}, restated.gmpo(0.4)),
        "vespo": ({"reduction": "seq-mean-token-mean"}, restated.vespo((2, 3), (3, 2))),
        "flash_reinforce": ({"threshold": 0.3}, restated.flash_reinforce(0.3)),
    }
    for name, (given, formula) in formulas.items():
        for told in (per_rollout(batch), per_turn):
            is_formula(LOSSES[name](unit="turn", **given), formula, told, logp)


def test_cispo() -> None:
    is_formula(LOSSES["cispo"](low=0.7, high=1.2), restated.cispo(0.7, 1.2), *off_policy())
    is_formula(LOSSES["cispo"](), restated.cispo(0.0, 5.0), *off_policy())


def test_sapo() -> None:
    is_formula(LOSSES["sapo"](), restated.sapo(1.0, 1.05), *off_policy())
    is_formula(LOSSES["sapo"](tau_positive=0.5, tau_negative=3.0), restated.sapo(0.5, 3.0), *off_policy())


def test_gmpo() -> None:
    batch, logp = off_policy(drift=0.6)
    is_formula(LOSSES["gmpo"](), restated.gmpo(0.4), per_rollout(batch), logp)


@pytest.mark.parametrize(("divergence", "default"), [("tv", 0.2), ("kl", 0.05)])
def test_dppo(divergence: str, default: float) -> None:
    """Its own threshold for each sign of the advantage, both, either or neither of them given."""
    for low, high in ((None, None), (0.01, 0.01), (0.01, None), (None, 0.01), (0.03, 0.005)):
        bounds = low or default, high or default
        given = {"divergence": divergence, "threshold_low": low, "threshold_high": high}
        is_formula(LOSSES["dppo"](**given), restated.dppo(divergence, *bounds, 20.0), *off_policy(drift=0.6))
    capped = LOSSES["dppo"](divergence=divergence, threshold_low=0.01, cap=1.1)
    is_formula(capped, restated.dppo(divergence, 0.01, default, 1.1), *off_policy(drift=0.6))


def test_clip_cov() -> None:
    batch, logp = off_policy(drift=0.6)
    batch = batch.replace(chosen=torch.arange(batch.num_tokens) % 3 == 0)
    is_formula(LOSSES["clip_cov"](clip_high=0.28), restated.clip_cov(0.2, 0.28), batch, logp)


def test_kl_cov() -> None:
    batch, logp = off_policy()
    batch = batch.replace(chosen=torch.arange(batch.num_tokens) % 3 == 0)
    is_formula(LOSSES["kl_cov"](coefficient=0.7), restated.kl_cov(0.7), batch, logp)


def test_dro() -> None:
    is_formula(LOSSES["dro"](beta=0.3), restated.dro(0.3), *off_policy())


def test_reinforce() -> None:
    is_formula(LOSSES["reinforce"](), restated.reinforce, *off_policy())


def test_reinforce_with_a_capped_weight() -> None:
    """The bypass: nothing between the sampler and the trainer, so the weight is sg(min(π_θ/μ, C))."""
    is_formula(LOSSES["reinforce"](cap=1.2), restated.capped_reinforce(1.2), *off_policy())


def test_gpg() -> None:
    is_formula(LOSSES["gpg"](), restated.reinforce, *off_policy())


def test_decoupled_ppo() -> None:
    is_formula(LOSSES["decoupled_ppo"](), restated.decoupled_ppo(0.2, 0.2, None), *off_policy(4, drift=0.6))


def test_decoupled_ppo_log_linear() -> None:
    """The trainer stands at version 5 and makes 6; tokens are of versions 3, 4 and 5."""
    batch, logp = off_policy(drift=0.6)
    batch = batch.replace(trainer_version=torch.full((batch.num_rollouts,), 5))
    version = View(batch).column("version").numpy()
    alpha = (5 - version) / (6 - version)
    assert {*version} == {3, 4, 5}
    loss = LOSSES["decoupled_ppo"](prox="log_linear")
    is_formula(loss, restated.decoupled_ppo(0.2, 0.2, alpha), batch, logp)


def test_vespo() -> None:
    is_formula(LOSSES["vespo"](), restated.vespo((2, 3), (3, 2)), *off_policy())


def test_m2po() -> None:
    batch, logp = off_policy()
    batch = batch.replace(chosen=torch.arange(batch.num_tokens) % 3 == 0)
    is_formula(LOSSES["m2po"](), restated.m2po, batch, logp)


def test_ipo() -> None:
    for bound in (0.3, 0.1):
        is_formula(LOSSES["ipo"](threshold=bound), restated.ipo(bound), *off_policy(drift=0.6))
    is_formula(LOSSES["ipo"](), restated.ipo(0.3), *off_policy(drift=0.6))


def test_flash_reinforce() -> None:
    """Rollouts within the bound and beyond it; under the reduction of the source, and another."""
    for bound in (0.1, 0.5):
        for how in ("seq-mean-token-mean", "token-mean"):
            loss = LOSSES["flash_reinforce"](threshold=bound, reduction=how)
            is_formula(loss, restated.flash_reinforce(bound), *off_policy(drift=0.6))
    default = LOSSES["flash_reinforce"]()
    assert default.reduction == "seq-mean-token-mean"
    is_formula(default, restated.flash_reinforce(1e-3), *off_policy(drift=0.02))


# -- the tokens picked over the rollout batch -------------------------------------------------------------------------


def picked(loss: PolicyLoss, batch: Batch, seed: int = 7, step: int = 2) -> Array:
    found = loss.choose_tokens(View(batch), seed=seed, step=step)
    assert found is not None
    assert 0 < int(found.sum()) < len(found)
    return found.numpy()


def test_clip_cov_picks_by_hash_within_the_band() -> None:
    batch, logp = off_policy()
    x = tokens(batch, logp)
    cov = (x.advantage - x.advantage.mean()) * (x.old - x.old.mean())
    within = [i for i in range(len(cov)) if 0.1 < cov[i] < 1.0]
    keys = restated.token_hashes(batch, seed=7, step=2)
    wanted = sorted(within, key=lambda i: keys[i])[:2]
    assert len(within) > 2
    found = picked(LOSSES["clip_cov"](share=2.6 / len(cov), cov_low=0.1, cov_high=1.0), batch)  # rounded down
    assert {*found.nonzero()[0]} == {*wanted}


def test_kl_cov_picks_the_highest() -> None:
    batch, logp = off_policy()
    x = tokens(batch, logp)
    cov = (x.advantage - x.advantage.mean()) * (x.old - x.old.mean())
    wanted = np.argsort(-cov)[:4]
    assert {*picked(LOSSES["kl_cov"](share=4.6 / len(cov)), batch).nonzero()[0]} == {*wanted}  # rounded down


def test_kl_cov_breaks_ties_by_hash() -> None:
    batch, _ = off_policy()
    level = batch.replace(advantage=torch.where(batch.action, 1.0, batch.require("advantage")))
    keys = restated.token_hashes(batch, seed=7, step=2)
    wanted = sorted(range(len(keys)), key=lambda i: keys[i])[: int(0.1 * len(keys))]
    assert {*picked(LOSSES["kl_cov"](share=0.1), level).nonzero()[0]} == {*wanted}


@pytest.mark.parametrize("bound", [0.02, 0.04])
def test_m2po_drops_the_fewest_that_bring_the_second_moment_down(bound: float) -> None:
    batch, logp = off_policy()
    x = tokens(batch, logp)
    moment = (x.old - x.mu) ** 2
    order = list(np.argsort(moment))
    while moment[order].mean() > bound:
        order.pop()
    dropped = picked(LOSSES["m2po"](bound=bound), batch)
    assert {*dropped.nonzero()[0]} == {*range(len(moment))} - {*order}


# -- what all of them share -------------------------------------------------------------------------------------------


def on_policy() -> tuple[Batch, torch.Tensor]:
    batch, logp = off_policy()
    same = logp.detach().clone()
    nothing = torch.zeros(batch.num_tokens, dtype=torch.bool)
    versions = torch.full((batch.num_rollouts,), 5)
    batch = per_rollout(batch).replace(old_logp=same, behavior_logp=same, chosen=nothing, trainer_version=versions)
    return batch, logp


ALIKE: tuple[Reduction, ...] = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")
ONE_NUMBER_A_ROLLOUT = "gmpo"  # takes no reduction that sums over tokens


@pytest.mark.parametrize(
    ("name", "how"),
    [(n, how) for n in LOSSES for how in ALIKE if n != ONE_NUMBER_A_ROLLOUT or how == "seq-mean-token-mean"],
)
def test_every_policy_loss_is_reinforce_on_policy(name: str, how: Reduction) -> None:
    """π_θ = π_old = μ: whatever a loss does about distance, there is none."""
    batch, logp = on_policy()
    _, wanted = value_and_slope(LOSSES["reinforce"](reduction=how), batch, logp)
    _, found = value_and_slope(LOSSES[name](reduction=how), batch, logp)
    assert np.abs(wanted).max() > 1e-3
    np.testing.assert_allclose(found, wanted, rtol=VALUE, atol=VALUE)


def test_log_linear_decoupled_ppo_is_reinforce_on_policy() -> None:
    batch, logp = on_policy()
    _, wanted = value_and_slope(LOSSES["reinforce"](), batch, logp)
    _, found = value_and_slope(LOSSES["decoupled_ppo"](prox="log_linear"), batch, logp)
    np.testing.assert_allclose(found, wanted, rtol=VALUE, atol=VALUE)


OVER = [("token-mean", "rollout"), ("token-sum", "rollout")]
OVER += [(how, unit) for how in ("seq-mean-token-mean", "seq-mean-token-sum") for unit in ("rollout", "turn")]


@pytest.mark.parametrize(("how", "unit"), OVER)
def test_reductions(how: Reduction, unit: str) -> None:
    batch, logp = off_policy()
    x = tokens(batch, logp)
    lengths = View(batch).units("turn" if unit == "turn" else "rollout").lengths.tolist()
    value, _ = value_and_slope(LOSSES["reinforce"](reduction=how, unit=unit), batch, logp)
    np.testing.assert_allclose(value, restated.reduced(restated.reinforce(x), lengths, how), rtol=VALUE)


def test_reduction_by_a_constant() -> None:
    batch, logp = off_policy()
    x = tokens(batch, logp)
    loss = LOSSES["reinforce"](reduction="seq-mean-token-sum-norm", norm_length=40.0)
    value, _ = value_and_slope(loss, batch, logp)
    wanted = restated.reduced(restated.reinforce(x), x.lengths, "seq-mean-token-sum", 40.0)
    np.testing.assert_allclose(value, wanted, rtol=VALUE)


def test_rejected_tokens_still_count() -> None:
    """A token that is not kept contributes nothing, and every denominator counts it."""
    batch, logp = off_policy()
    keep = torch.arange(batch.num_tokens) % 2 == 0
    x = tokens(batch.replace(chosen=keep), logp)
    for how in ("token-mean", "seq-mean-token-mean"):
        value, grad = value_and_slope(LOSSES["reinforce"](reduction=how), batch.replace(keep=keep), logp)
        wanted = restated.reduced(restated.reinforce(x) * x.chosen, x.lengths, how)
        np.testing.assert_allclose(value, wanted, rtol=VALUE)
        assert (grad[x.chosen == 0] == 0).all()
