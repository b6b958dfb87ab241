"""The KL terms, each compared with the gradient in its name, and proof that other combinations are wrong.

Per token, "with the visited states held fixed" means Σ_s visits(s) · ∇KL(π_θ(·|s), π_ref(·|s)). The visits are not
differentiated by θ. Over whole sequences they are.
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
from tests.conformance.fixtures import irregular_batch
from tests.conformance.mdp import (
    MDP,
    PATHS,
    PROMPTS,
    STATES,
    TOKENS,
    close,
    draw,
    gradient,
    logp,
    make_mdp,
    over_states,
    probability,
    sum_along_paths,
)
from tests.conformance.twin import numpy_rollouts

StateFunction = Callable[[Tensor], Tensor]
"""A function from a policy's logits [S, 3] to a number for each state [S]."""


def off_policy_mdp() -> MDP:
    theta = draw(1, STATES, TOKENS)
    return make_mdp(mu=theta + draw(7, STATES, TOKENS, scale=0.7))


def reverse(mdp: MDP) -> StateFunction:
    """Return KL(π_θ ‖ π_ref) in each state."""
    return lambda theta: (logp(theta).exp() * (logp(theta) - logp(mdp.reference))).sum(-1)


def forward(mdp: MDP) -> StateFunction:
    """Return KL(π_ref ‖ π_θ) in each state."""
    return lambda theta: (logp(mdp.reference).exp() * (logp(mdp.reference) - logp(theta))).sum(-1)


def total_variation(mdp: MDP) -> StateFunction:
    """Return ½ Σ_v |π_θ − π_ref| in each state."""
    return lambda theta: (logp(theta).exp() - logp(mdp.reference).exp()).abs().sum(-1) / 2


def gradient_in_states(mdp: MDP, table: StateFunction) -> Tensor:
    return over_states(mdp.theta, mdp.mu, table)


def gradient_of_sequences(mdp: MDP, divergence: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return the gradient of a divergence between distributions of whole trajectories, from their log-probs [30]."""
    theta = mdp.theta.detach().requires_grad_()
    return gradient(
        divergence(sum_along_paths(logp(theta)), sum_along_paths(logp(mdp.reference))).sum() / PROMPTS, theta
    )


def reverse_gradient_of_sequences(mdp: MDP) -> Tensor:
    return gradient_of_sequences(mdp, lambda p, q: p.exp() * (p - q))


def forward_gradient_of_sequences(mdp: MDP) -> Tensor:
    return gradient_of_sequences(mdp, lambda p, q: q.exp() * (q - p))


def expected_gradient(mdp: MDP, term: KLTerm) -> Tensor:
    """Return the gradient of the term, summed over a trajectory's tokens, in expectation over the sampler."""
    batch, probabilities = mdp.batch(1)
    theta = mdp.theta.detach().clone().requires_grad_()
    view = View(batch, mdp.outputs(batch, theta))
    return gradient((view.rollouts.broadcast(probabilities) * term.per_token_kl(view)).sum(), theta)


def expected_gradient_of(mdp: MDP, function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return the same for any function of δ and log w, such as a formula that no KL term has."""
    batch, probabilities = mdp.batch(1)
    theta = mdp.theta.detach().clone().requires_grad_()
    view = View(batch, mdp.outputs(batch, theta))
    delta = view.logp - view.column("ref_logp")
    log_w = view.logp - view.column("behavior_logp")
    return gradient((view.rollouts.broadcast(probabilities) * function(delta, log_w)).sum(), theta)


def assert_differs(result: Tensor, expected: Tensor, share: float) -> None:
    """Check that a gradient is wrong by at least this share of the right gradient's length."""
    assert (result - expected).norm() > share * expected.norm()


# -- on-policy, per token ---------------------------------------------------------------------------------------------


def test_k1_as_a_loss_has_no_gradient() -> None:
    result = expected_gradient_of(make_mdp(), lambda delta, _: delta)
    torch.testing.assert_close(result, torch.zeros_like(result), rtol=0, atol=1e-12)


def test_reverse_is_the_reverse_gradient() -> None:
    mdp = make_mdp()
    close(expected_gradient(mdp, KLS["reverse"]()), gradient_in_states(mdp, reverse(mdp)))


def test_full_is_the_reverse_gradient() -> None:
    mdp = make_mdp()
    close(expected_gradient(mdp, KLS["full"]()), gradient_in_states(mdp, reverse(mdp)))


def test_forward_is_the_forward_gradient() -> None:
    mdp = make_mdp()
    close(expected_gradient(mdp, KLS["forward"]()), gradient_in_states(mdp, forward(mdp)))


def test_forward_is_the_reverse_gradient_to_first_order_only() -> None:
    """Near the reference the difference shrinks faster than the gradients. Far from it the gradients differ."""
    far_mdp, step = make_mdp(), draw(8, STATES, TOKENS)
    assert_differs(expected_gradient(far_mdp, KLS["forward"]()), gradient_in_states(far_mdp, reverse(far_mdp)), 0.1)
    gaps = []
    for size in (0.02, 0.01):
        near_mdp = make_mdp(theta=far_mdp.reference + size * step, mu=far_mdp.reference + size * step)
        expected = gradient_in_states(near_mdp, reverse(near_mdp))
        gaps.append((expected_gradient(near_mdp, KLS["forward"]()) - expected).norm() / expected.norm())
    assert gaps[0] < 0.05
    assert 1.8 < gaps[0] / gaps[1] < 2.2


def test_total_variation_is_twice_its_gradient() -> None:
    mdp = make_mdp()
    close(expected_gradient(mdp, KLS["total_variation"]()), 2 * gradient_in_states(mdp, total_variation(mdp)))


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_weighted_reverse_is_the_reverse_gradient(estimator: str) -> None:
    mdp = make_mdp()
    close(expected_gradient(mdp, KLS["weighted_reverse"](estimator=estimator)), gradient_in_states(mdp, reverse(mdp)))


# -- whole sequences --------------------------------------------------------------------------------------------------


def test_sequence_is_the_reverse_gradient_of_sequences() -> None:
    mdp = make_mdp()
    close(expected_gradient(mdp, KLS["sequence"]()), reverse_gradient_of_sequences(mdp))


@pytest.mark.parametrize("advantage", ["gae", "rloo", "dr_grpo"])
def test_k1_in_the_reward_is_the_reverse_gradient_of_sequences(advantage: str) -> None:
    """γ = 1, as a reward to go or as a total. dr_grpo scales this gradient by (n − 1)/n, as all gradients."""
    zeros = torch.zeros(PROMPTS * len(PATHS), dtype=torch.float64)
    mdp = make_mdp(reward=zeros)
    algorithm = AlgorithmConfig(
        advantage=ADVANTAGES[advantage](),
        loss=LOSSES["reinforce"](reduction="seq-mean-token-sum"),
        kl=KLS["in_reward"](coefficient=0.3),
    )
    n = 1 if advantage == "gae" else 2
    factor = 0.3 * ((n - 1) / n if advantage == "dr_grpo" else 1)
    result = mdp.expected_gradient(algorithm, n, value=torch.zeros(STATES, dtype=torch.float64))
    close(result, factor * reverse_gradient_of_sequences(mdp))


def test_k3_in_the_reward_is_biased() -> None:
    """The gradient is Σ_τ p ∇log p Σ k3, which is not ∇KL."""
    mdp = make_mdp()
    theta = mdp.theta.detach().requires_grad_()
    constant = sum_along_paths(k3(logp(mdp.theta) - logp(mdp.reference)))
    result = gradient((probability(theta) * constant).sum() / PROMPTS, theta)
    assert_differs(result, reverse_gradient_of_sequences(mdp), 0.1)


def test_summed_reverse_is_not_that_of_sequences() -> None:
    mdp = make_mdp()
    assert_differs(expected_gradient(mdp, KLS["reverse"]()), reverse_gradient_of_sequences(mdp), 0.1)


def test_summed_forward_is_not_that_of_sequences() -> None:
    mdp = make_mdp()
    assert_differs(expected_gradient(mdp, KLS["forward"]()), forward_gradient_of_sequences(mdp), 0.1)


# -- off-policy -------------------------------------------------------------------------------------------------------


def test_reverse_off_policy() -> None:
    mdp = off_policy_mdp()
    close(expected_gradient(mdp, KLS["reverse"](off_policy=True)), gradient_in_states(mdp, reverse(mdp)))
    assert_differs(expected_gradient(mdp, KLS["reverse"]()), gradient_in_states(mdp, reverse(mdp)), 0.1)


def test_total_variation_off_policy() -> None:
    mdp = off_policy_mdp()
    expected = 2 * gradient_in_states(mdp, total_variation(mdp))
    close(expected_gradient(mdp, KLS["total_variation"](off_policy=True)), expected)
    assert_differs(expected_gradient(mdp, KLS["total_variation"]()), expected, 0.1)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_weighted_reverse_off_policy(estimator: str) -> None:
    mdp = off_policy_mdp()
    expected = gradient_in_states(mdp, reverse(mdp))
    close(expected_gradient(mdp, KLS["weighted_reverse"](off_policy=True, estimator=estimator)), expected)
    assert_differs(expected_gradient(mdp, KLS["weighted_reverse"](estimator=estimator)), expected, 0.1)


def test_sequence_off_policy() -> None:
    mdp = off_policy_mdp()
    close(expected_gradient(mdp, KLS["sequence"](off_policy=True)), reverse_gradient_of_sequences(mdp))
    assert_differs(expected_gradient(mdp, KLS["sequence"]()), reverse_gradient_of_sequences(mdp), 0.1)


def test_full_needs_no_weight() -> None:
    mdp = off_policy_mdp()
    close(expected_gradient(mdp, KLS["full"]()), gradient_in_states(mdp, reverse(mdp)))


def test_a_token_weight_leaves_the_samplers_states() -> None:
    """The visited states are those of μ, not those of π_θ."""
    mdp = off_policy_mdp()
    result = expected_gradient(mdp, KLS["reverse"](off_policy=True))
    assert_differs(result, over_states(mdp.theta, mdp.theta, reverse(mdp)), 0.1)


def test_two_other_combinations_are_wrong() -> None:
    """The combinations are k2 with w attached, and k3 with w detached."""
    mdp = off_policy_mdp()
    expected = gradient_in_states(mdp, reverse(mdp))
    assert_differs(expected_gradient_of(mdp, lambda delta, log_w: log_w.exp() * k2(delta)), expected, 0.1)
    assert_differs(expected_gradient_of(mdp, lambda delta, log_w: log_w.detach().exp() * k3(delta)), expected, 0.1)


# -- values, clamps, the coefficient ----------------------------------------------------------------------------------


@pytest.mark.parametrize("delta", [-1e3, -25.0, -1.0, 0.0, 1.0, 25.0, 1e3])
def test_k3_has_a_gradient_at_any_distance(delta: float) -> None:
    """The value is clamped where e^{−δ} would be huge. The gradient keeps its sign, and its size at the clamp."""
    x = torch.tensor(delta, dtype=torch.float64, requires_grad=True)
    value = k3(x)
    clamped = max(-20.0, min(20.0, delta))
    expected = torch.tensor(clamped, dtype=torch.float64)
    torch.testing.assert_close(value.detach(), torch.exp(-expected) - 1 + expected)
    torch.testing.assert_close(torch.autograd.grad(value, x)[0], 1 - torch.exp(-expected))


def test_adaptive_coefficient() -> None:
    """The measured KL is the mean over rollouts of the mean over their tokens, and n counts rollouts."""
    batch = irregular_batch(3)
    batch = batch.replace(ref_logp=batch.require("ref_logp") - 0.5)
    mean = (
        sum(float((t["old_logp"] - t["ref_logp"]).mean()) if len(t) else 0.0 for t in numpy_rollouts(batch))
        / batch.num_rollouts
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
    batch = irregular_batch(3)
    term = KLS["reverse"](coefficient=0.2, controller=FixedKLController())
    _, state = term.apply(View(batch), AlgorithmState(), Metrics())
    assert state.kl_value is None
    assert term.current_coefficient(state) == 0.2


def test_the_coefficient_multiplies_the_reduced_term() -> None:
    """The objective is the policy loss plus coefficient · term, with the same reduction."""
    mdp = make_mdp()
    batch, _ = mdp.batch(2)
    loss = LOSSES["reinforce"](reduction="seq-mean-token-mean")
    plain = AlgorithmConfig(advantage=ADVANTAGES["rloo"](), loss=loss)
    constant = AlgorithmConfig(advantage=ADVANTAGES["rloo"](), loss=loss, kl=KLS["reverse"](coefficient=0.3))
    ready = plain.estimate(batch, AlgorithmState()).batch
    view = View(ready, mdp.outputs(ready, mdp.theta))
    delta = view.logp - view.column("ref_logp")
    expected = 0.3 * (view.rollouts.sum(delta**2 / 2) / view.rollouts.lengths).mean()
    outputs = Outputs(logp=view.outputs.logp)
    both = [
        a.compute_loss(ready, outputs, Denominators.from_view(view), AlgorithmState()).loss for a in (constant, plain)
    ]
    torch.testing.assert_close(both[0] - both[1], expected, rtol=0, atol=1e-12)
