"""The KL terms, each against the gradient it is named by, and the combinations that are left out shown to be wrong.

Per token, "with the visited states held fixed" means Σ_s visits(s) · ∇KL(π_θ(·|s), π_ref(·|s)): how θ changes which
states are visited is not differentiated. Over whole sequences it is.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from etude.algorithms import AlgorithmConfig, AlgorithmState, Denominators, KLTerm, Outputs, View
from etude.algorithms.advantages import ADVANTAGES
from etude.algorithms.kl import KLS, AdaptiveKLController, FixedKLController, k2, k3
from etude.algorithms.losses import LOSSES
from etude.observe import Metrics
from tests.conformance.fixtures import awkward
from tests.conformance.mdp import (
    PATHS,
    PROMPTS,
    STATES,
    TOKENS,
    World,
    along,
    close,
    draw,
    gradient,
    logp,
    over_states,
    probability,
    world,
)
from tests.conformance.twin import tries

Table = Callable[[Tensor], Tensor]
"""From a policy's logits [S, 3] to a number for each state [S]."""


def off_policy() -> World:
    theta = draw(1, STATES, TOKENS)
    return world(mu=theta + draw(7, STATES, TOKENS, scale=0.7))


def reverse(here: World) -> Table:
    """KL(π_θ ‖ π_ref) in each state."""
    return lambda theta: (logp(theta).exp() * (logp(theta) - logp(here.reference))).sum(-1)


def forward(here: World) -> Table:
    """KL(π_ref ‖ π_θ) in each state."""
    return lambda theta: (logp(here.reference).exp() * (logp(here.reference) - logp(theta))).sum(-1)


def total_variation(here: World) -> Table:
    """½ Σ_v |π_θ − π_ref| in each state."""
    return lambda theta: (logp(theta).exp() - logp(here.reference).exp()).abs().sum(-1) / 2


def of_states(here: World, table: Table) -> Tensor:
    return over_states(here.theta, here.mu, table)


def of_sequences(here: World, of: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The gradient of a divergence between the distributions of whole trajectories, from their log-probs [30]."""
    theta = here.theta.detach().requires_grad_()
    return gradient(of(along(logp(theta)), along(logp(here.reference))).sum() / PROMPTS, theta)


def reverse_of_sequences(here: World) -> Tensor:
    return of_sequences(here, lambda p, q: p.exp() * (p - q))


def forward_of_sequences(here: World) -> Tensor:
    return of_sequences(here, lambda p, q: q.exp() * (q - p))


def expected_term(here: World, term: KLTerm) -> Tensor:
    """The gradient of the term summed over a trajectory's tokens, in expectation over what the sampler draws."""
    batch, chance = here.batch(1)
    theta = here.theta.detach().clone().requires_grad_()
    view = View(batch, here.outputs(batch, theta))
    return gradient((view.rollouts.broadcast(chance) * term.per_token_kl(view)).sum(), theta)


def expected_number(here: World, number: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """As above for any number made of δ and log w: a formula that is not on offer."""
    batch, chance = here.batch(1)
    theta = here.theta.detach().clone().requires_grad_()
    view = View(batch, here.outputs(batch, theta))
    delta = view.logp - view.column("ref_logp")
    log_w = view.logp - view.column("behavior_logp")
    return gradient((view.rollouts.broadcast(chance) * number(delta, log_w)).sum(), theta)


def differs(found: Tensor, wanted: Tensor, share: float) -> None:
    """Wrong by at least this share of the right gradient's length."""
    assert (found - wanted).norm() > share * wanted.norm()


# -- on-policy, token by token ----------------------------------------------------------------------------------------


def test_k1_as_a_loss_does_nothing() -> None:
    found = expected_number(world(), lambda delta, _: delta)
    torch.testing.assert_close(found, torch.zeros_like(found), rtol=0, atol=1e-12)


def test_reverse_is_the_reverse_gradient() -> None:
    here = world()
    close(expected_term(here, KLS["reverse"]()), of_states(here, reverse(here)))


def test_full_is_the_reverse_gradient() -> None:
    here = world()
    close(expected_term(here, KLS["full"]()), of_states(here, reverse(here)))


def test_forward_is_the_forward_gradient() -> None:
    here = world()
    close(expected_term(here, KLS["forward"]()), of_states(here, forward(here)))


def test_forward_is_the_reverse_gradient_to_first_order_only() -> None:
    """Near the reference the two shrink together and their difference faster; far from it they differ."""
    far, step = world(), draw(8, STATES, TOKENS)
    differs(expected_term(far, KLS["forward"]()), of_states(far, reverse(far)), 0.1)
    gaps = []
    for size in (0.02, 0.01):
        near = world(theta=far.reference + size * step, mu=far.reference + size * step)
        wanted = of_states(near, reverse(near))
        gaps.append((expected_term(near, KLS["forward"]()) - wanted).norm() / wanted.norm())
    assert gaps[0] < 0.05
    assert 1.8 < gaps[0] / gaps[1] < 2.2


def test_total_variation_is_twice_its_gradient() -> None:
    here = world()
    close(expected_term(here, KLS["total_variation"]()), 2 * of_states(here, total_variation(here)))


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_weighted_reverse_is_the_reverse_gradient(estimator: str) -> None:
    here = world()
    close(expected_term(here, KLS["weighted_reverse"](estimator=estimator)), of_states(here, reverse(here)))


# -- whole sequences --------------------------------------------------------------------------------------------------


def test_sequence_is_the_reverse_gradient_of_sequences() -> None:
    here = world()
    close(expected_term(here, KLS["sequence"]()), reverse_of_sequences(here))


@pytest.mark.parametrize("advantage", ["gae", "rloo", "dr_grpo"])
def test_k1_in_the_reward_is_the_reverse_gradient_of_sequences(advantage: str) -> None:
    """γ = 1, as a reward to go or as a total; dr_grpo shrinks it as it shrinks everything."""
    nothing = torch.zeros(PROMPTS * len(PATHS), dtype=torch.float64)
    here = world(reward=nothing)
    algorithm = AlgorithmConfig(
        advantage=ADVANTAGES[advantage](),
        loss=LOSSES["reinforce"](reduction="seq-mean-token-sum"),
        kl=KLS["in_reward"](coefficient=0.3),
    )
    n = 1 if advantage == "gae" else 2
    factor = 0.3 * ((n - 1) / n if advantage == "dr_grpo" else 1)
    found = here.expected_gradient(algorithm, n, value=torch.zeros(STATES, dtype=torch.float64))
    close(found, factor * reverse_of_sequences(here))


def test_k3_in_the_reward_is_biased() -> None:
    """Σ_τ p ∇log p Σ k3, which is not ∇KL."""
    here = world()
    theta = here.theta.detach().requires_grad_()
    held = along(k3(logp(here.theta) - logp(here.reference)))
    found = gradient((probability(theta) * held).sum() / PROMPTS, theta)
    differs(found, reverse_of_sequences(here), 0.1)


def test_summed_reverse_is_not_that_of_sequences() -> None:
    here = world()
    differs(expected_term(here, KLS["reverse"]()), reverse_of_sequences(here), 0.1)


def test_summed_forward_is_not_that_of_sequences() -> None:
    here = world()
    differs(expected_term(here, KLS["forward"]()), forward_of_sequences(here), 0.1)


# -- off-policy -------------------------------------------------------------------------------------------------------


def test_reverse_off_policy() -> None:
    here = off_policy()
    close(expected_term(here, KLS["reverse"](off_policy=True)), of_states(here, reverse(here)))
    differs(expected_term(here, KLS["reverse"]()), of_states(here, reverse(here)), 0.1)


def test_total_variation_off_policy() -> None:
    here = off_policy()
    wanted = 2 * of_states(here, total_variation(here))
    close(expected_term(here, KLS["total_variation"](off_policy=True)), wanted)
    differs(expected_term(here, KLS["total_variation"]()), wanted, 0.1)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_weighted_reverse_off_policy(estimator: str) -> None:
    here = off_policy()
    wanted = of_states(here, reverse(here))
    close(expected_term(here, KLS["weighted_reverse"](off_policy=True, estimator=estimator)), wanted)
    differs(expected_term(here, KLS["weighted_reverse"](estimator=estimator)), wanted, 0.1)


def test_sequence_off_policy() -> None:
    here = off_policy()
    close(expected_term(here, KLS["sequence"](off_policy=True)), reverse_of_sequences(here))
    differs(expected_term(here, KLS["sequence"]()), reverse_of_sequences(here), 0.1)


def test_full_needs_no_weight() -> None:
    here = off_policy()
    close(expected_term(here, KLS["full"]()), of_states(here, reverse(here)))


def test_a_token_weight_leaves_the_samplers_states() -> None:
    """The states are those that μ visited, which is not where π_θ goes."""
    here = off_policy()
    found = expected_term(here, KLS["reverse"](off_policy=True))
    differs(found, over_states(here.theta, here.theta, reverse(here)), 0.1)


def test_the_two_wrong_combinations_are_wrong() -> None:
    """k2 with w attached, and k3 with w detached."""
    here = off_policy()
    wanted = of_states(here, reverse(here))
    differs(expected_number(here, lambda delta, log_w: log_w.exp() * k2(delta)), wanted, 0.1)
    differs(expected_number(here, lambda delta, log_w: log_w.detach().exp() * k3(delta)), wanted, 0.1)


# -- values, clamps, the coefficient ----------------------------------------------------------------------------------


@pytest.mark.parametrize("delta", [-1e3, -25.0, -1.0, 0.0, 1.0, 25.0, 1e3])
def test_k3_pulls_however_far_it_is(delta: float) -> None:
    """Its value is cut where e^{−δ} would run away; its gradient keeps the sign and the size of the cut's end."""
    x = torch.tensor(delta, dtype=torch.float64, requires_grad=True)
    value = k3(x)
    cut = max(-20.0, min(20.0, delta))
    wanted = torch.tensor(cut, dtype=torch.float64)
    torch.testing.assert_close(value.detach(), torch.exp(-wanted) - 1 + wanted)
    torch.testing.assert_close(torch.autograd.grad(value, x)[0], 1 - torch.exp(-wanted))


def test_adaptive_coefficient() -> None:
    """kl = the mean over rollouts of the mean over their tokens; n = rollouts."""
    batch = awkward(3)
    batch = batch.replace(ref_logp=batch.require("ref_logp") - 0.5)
    mean = (
        sum(float((t["old_logp"] - t["ref_logp"]).mean()) if len(t) else 0.0 for t in tries(batch)) / batch.num_rollouts
    )
    assert mean > 0
    for target in (mean / 1.1, mean / 0.5, mean / 3.0):
        term = KLS["reverse"](coefficient=0.2, controller=AdaptiveKLController(target=target, horizon=50.0))
        _, state = term.apply(View(batch), AlgorithmState(), Metrics())
        error = max(-0.2, min(0.2, mean / target - 1))
        assert state.kl_value is not None
        assert abs(state.kl_value - 0.2 * (1 + error * batch.num_rollouts / 50)) < 1e-12
        assert term.current_coefficient(AlgorithmState()) == 0.2
        assert term.current_coefficient(state) == state.kl_value


def test_fixed_coefficient() -> None:
    batch = awkward(3)
    term = KLS["reverse"](coefficient=0.2, controller=FixedKLController())
    _, state = term.apply(View(batch), AlgorithmState(), Metrics())
    assert state.kl_value is None
    assert term.current_coefficient(state) == 0.2


def test_the_coefficient_multiplies_the_reduced_term() -> None:
    """The objective is the policy's loss plus coefficient · the term, reduced alike."""
    here = world()
    batch, _ = here.batch(2)
    loss = LOSSES["reinforce"](reduction="seq-mean-token-mean")
    plain = AlgorithmConfig(advantage=ADVANTAGES["rloo"](), loss=loss)
    held = AlgorithmConfig(advantage=ADVANTAGES["rloo"](), loss=loss, kl=KLS["reverse"](coefficient=0.3))
    ready = plain.estimate(batch, AlgorithmState()).batch
    view = View(ready, here.outputs(ready, here.theta))
    delta = view.logp - view.column("ref_logp")
    wanted = 0.3 * (view.rollouts.sum(delta**2 / 2) / view.rollouts.lengths).mean()
    outputs = Outputs(logp=view.outputs.logp)
    both = [a.compute_loss(ready, outputs, Denominators.from_view(view), AlgorithmState()).loss for a in (held, plain)]
    torch.testing.assert_close(both[0] - both[1], wanted, rtol=0, atol=1e-12)
