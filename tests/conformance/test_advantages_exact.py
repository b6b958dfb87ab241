"""Family (a): estimators whose expected gradient is the gradient of something, proven by summing over everything."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.autograd.functional import jacobian

from etude.algorithms import AlgorithmConfig, AlgorithmState, View
from etude.algorithms.advantages import ADVANTAGES
from etude.algorithms.losses import LOSSES
from tests.conformance.mdp import (
    PATHS,
    PREFIXES,
    PROMPTS,
    STATES,
    TOKENS,
    World,
    along,
    close,
    draw,
    expected,
    gradient,
    groups,
    logp,
    over_states,
    probability,
    state_of,
    true_gradient,
    true_value,
    world,
)

BIASED = 0.02
"""How far (relative to the gradient's length) an estimator that is called biased must be at least."""


def assembled(advantage: str, loss: str = "reinforce", **knobs: object) -> AlgorithmConfig:
    """An estimator with a loss that adds up log-probs over each rollout."""
    return AlgorithmConfig(advantage=ADVANTAGES[advantage](**knobs), loss=LOSSES[loss](reduction="seq-mean-token-sum"))


def unlike(found: Tensor, wanted: Tensor, least: float = BIASED) -> None:
    """Not even a multiple of it: what is left after the best scaling is a stated share of its length."""
    scale = (found * wanted).sum() / (wanted * wanted).sum()
    assert (found - scale * wanted).norm() > least * found.norm()


def binary(seed: int = 4) -> Tensor:
    return (draw(seed, PROMPTS * len(PATHS)) > 0.3).double()


# -- the world itself ---------------------------------------------------------------------------------------------


def test_the_enumeration_is_complete() -> None:
    here = world()
    chance = probability(here.theta).reshape(PROMPTS, -1)
    torch.testing.assert_close(chance.sum(1), torch.ones(PROMPTS, dtype=torch.float64))
    for n in (1, 2, 3, 4):
        _, weight = here.batch(n)
        assert abs(float(weight.sum()) - 1) < 1e-12


def test_the_true_gradient_is_the_slope_of_the_objective() -> None:
    here, step = world(), 1e-4
    found = true_gradient(here.theta, here.reward)
    for i in range(0, STATES * TOKENS, 5):
        up, down = here.theta.clone(), here.theta.clone()
        up.view(-1)[i] += step
        down.view(-1)[i] -= step
        slope = (expected(up, here.reward) - expected(down, here.reward)) / (2 * step)
        assert abs(float(slope - found.view(-1)[i])) < 1e-7


# -- exact --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["reinforce", "ppo"])
def test_reinforce_is_the_gradient(loss: str) -> None:
    """A group of one keeps A = R."""
    here = world()
    close(here.expected_gradient(assembled("rloo", loss), 1), -true_gradient(here.theta, here.reward))


@pytest.mark.parametrize("n", [2, 3, 4])
def test_rloo_is_the_gradient(n: int) -> None:
    here = world()
    close(here.expected_gradient(assembled("rloo"), n), -true_gradient(here.theta, here.reward))


@pytest.mark.parametrize("n", [1, 2])
def test_remax_is_the_gradient(n: int) -> None:
    here = world()
    close(here.expected_gradient(assembled("remax"), n), -true_gradient(here.theta, here.reward))


@pytest.mark.parametrize("n", [2, 3, 4])
def test_dr_grpo_is_the_gradient_times_n_less_one_over_n(n: int) -> None:
    here = world()
    close(here.expected_gradient(assembled("dr_grpo"), n), -(n - 1) / n * true_gradient(here.theta, here.reward))


def test_dr_grpo_divides_by_the_configured_constant() -> None:
    here = world()
    loss = LOSSES["reinforce"](reduction="seq-mean-token-sum-norm", norm_length=7.0)
    found = here.expected_gradient(AlgorithmConfig(advantage=ADVANTAGES["dr_grpo"](), loss=loss), 2)
    close(7 * found, -1 / 2 * true_gradient(here.theta, here.reward))


def best_of(theta: Tensor, reward: Tensor, k: int) -> Tensor:
    """E[the best of k tries], differentiable."""
    _, members, orders = groups(k)
    chance = orders * probability(theta)[members].prod(1) / PROMPTS
    return (chance * reward[members].max(1).values).sum()


def gradient_of_best(here: World, k: int) -> Tensor:
    theta = here.theta.clone().requires_grad_()
    return gradient(best_of(theta, here.reward, k), theta)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_maxrl_is_the_truncated_gradient_of_log_p(n: int) -> None:
    """Σ_{k=1}^{n−1} −(1 − p)^k / k is log p cut after its term of order n − 1."""
    reward = binary()
    here = world(reward=reward)
    theta = here.theta.clone().requires_grad_()
    p = (probability(theta) * reward).reshape(PROMPTS, -1).sum(1)
    series = sum((-((1 - p) ** k) / k for k in range(1, n)), torch.zeros(PROMPTS, dtype=torch.float64))
    close(here.expected_gradient(assembled("maxrl"), n), -gradient(series.mean(), theta))


@pytest.mark.parametrize("n", [2, 3, 4])
def test_pass_at_k_is_the_gradient_of_the_best(n: int) -> None:
    """Added up over the group; the loss takes a mean over it."""
    here = world()
    close(n * here.expected_gradient(assembled("pass_at_k"), n), -gradient_of_best(here, n))


@pytest.mark.parametrize(("n", "k"), [(2, 2), (3, 2), (4, 2), (4, 3), (4, 4)])
def test_pkpo_is_the_gradient_of_the_best_of_k(n: int, k: int) -> None:
    here = world()
    close(n * here.expected_gradient(assembled("pkpo", k=k), n), -gradient_of_best(here, k))


def test_rae_is_the_gradient() -> None:
    """The average it subtracts was known before the step."""
    here = world()
    found = here.expected_gradient(assembled("rae"), 1, AlgorithmState(role_means={0: 0.4}))
    close(found, -true_gradient(here.theta, here.reward))


def test_distillation_is_the_gradient_of_the_reverse_kl_to_the_teacher() -> None:
    """Token by token, with the visited states held fixed; the teacher is the world's reference."""
    here = world()

    def divergence(theta: Tensor) -> Tensor:
        return (logp(theta).exp() * (logp(theta) - logp(here.reference))).sum(-1)

    wanted = over_states(here.theta, here.theta, divergence)
    close(here.expected_gradient(assembled("distillation"), 1), wanted)


def per_turn(seed: int = 5) -> World:
    """Each action is a turn and earns a reward of its own; nothing is paid at the end."""
    return world(reward=torch.zeros(PROMPTS * len(PATHS), dtype=torch.float64), token_reward=draw(seed, STATES, TOKENS))


def test_turn_baseline_is_the_gradient() -> None:
    here = per_turn()
    assert here.token_reward is not None
    found = here.expected_gradient(assembled("turn_baseline"), 3)
    close(found, -true_gradient(here.theta, along(here.token_reward)))


@pytest.mark.parametrize("baseline", ["none", "group"])
def test_step_rewards_to_go_are_the_gradient(baseline: str) -> None:
    here = per_turn()
    assert here.token_reward is not None
    found = here.expected_gradient(assembled("step_rewards", baseline=baseline), 2)
    close(found, -true_gradient(here.theta, along(here.token_reward)))


def test_gae_without_a_critic_is_the_gradient() -> None:
    here = world()
    nothing = torch.zeros(STATES, dtype=torch.float64)
    found = here.expected_gradient(assembled("gae", gamma=1.0, lam=1.0, whiten=False), 1, value=nothing)
    close(found, -true_gradient(here.theta, here.reward))


def test_gae_with_any_critic_is_the_gradient_where_lambda_is_one() -> None:
    here = world()
    found = here.expected_gradient(assembled("gae", gamma=1.0, lam=1.0, whiten=False), 1, value=draw(6, STATES))
    close(found, -true_gradient(here.theta, here.reward))


@pytest.mark.parametrize("lam", [0.0, 0.7])
def test_gae_with_the_true_value_is_the_gradient_for_any_lambda(lam: float) -> None:
    here = world()
    value = true_value(here.theta, here.reward)
    found = here.expected_gradient(assembled("gae", gamma=1.0, lam=lam, whiten=False), 1, value=value)
    close(found, -true_gradient(here.theta, here.reward))


def leaves(prefix: tuple[int, ...]) -> int:
    """The number of trajectories that begin like this."""
    return sum(path[: len(prefix)] == prefix for path in PATHS)


def test_opob_is_the_baseline_of_least_variance() -> None:
    """A sampler to which all trajectories of a prompt are equally likely: each of them once is all that can happen. The
    variance of w·∇log π·(R − b) over them is least where b is the baseline of such a group, and its mean is ∇J."""
    even = torch.zeros(STATES, TOKENS, dtype=torch.float64)
    for prompt, prefix in itertools.product(range(PROMPTS), PREFIXES):
        counts = [leaves((*prefix, token)) for token in range(TOKENS)]
        even[state_of(prompt, prefix)] = torch.tensor(counts, dtype=torch.float64).log()
    here = world(mu=even)
    chance, uniform = probability(here.theta), torch.full((PROMPTS * len(PATHS),), 1 / len(PATHS), dtype=torch.float64)
    torch.testing.assert_close(probability(even), uniform)
    batch = here.batch(1)[0].replace(group=torch.arange(PROMPTS).repeat_interleave(len(PATHS)))
    advantage = ADVANTAGES["opob"]()(View(batch), AlgorithmState()).advantage
    first = View(batch).rollouts.offsets[:-1]
    baseline = (here.reward - advantage[first]).reshape(PROMPTS, -1)
    torch.testing.assert_close(baseline.min(1).values, baseline.max(1).values)

    scores = jacobian(lambda theta: along(logp(theta)), here.theta).flatten(1)
    weighed = (chance / uniform)[:, None] * scores

    def moments_at(b: Tensor) -> tuple[Tensor, Tensor]:
        """The mean gradient, and the variance at each prompt, with these baselines [2]."""
        found = (weighed * (here.reward - b.repeat_interleave(len(PATHS)))[:, None]).reshape(PROMPTS, len(PATHS), -1)
        return found.mean((0, 1)), (found - found.mean(1, keepdim=True)).square().sum(-1).mean(1)

    best = baseline[:, 0]
    mean, least = moments_at(best)
    close(mean.reshape(STATES, TOKENS), true_gradient(here.theta, here.reward))
    for by in (-0.3, -1e-3, 1e-3, 0.3):
        other, more = moments_at(best + by)
        close(other, mean)
        assert bool((more > least).all())
    assert bool((moments_at(here.reward.reshape(PROMPTS, -1).mean(1))[1] > 1.001 * least).all())


# -- shown to be biased -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["opo", "grpo", "token_baseline", "opob"])
def test_biased_baselines_are_not_the_gradient(name: str) -> None:
    """Not even a multiple of it: a baseline that a rollout's own length or reward enters moves the gradient."""
    here = world()
    unlike(here.expected_gradient(assembled(name), 3), true_gradient(here.theta, here.reward))


def test_the_biased_turn_baseline_is_biased() -> None:
    here = per_turn()
    assert here.token_reward is not None
    found = here.expected_gradient(assembled("turn_baseline_biased"), 3)
    unlike(found, true_gradient(here.theta, along(here.token_reward)))


def test_token_mean_is_not_proportional_to_the_gradient() -> None:
    """Dividing by a group's tokens weighs each rollout by its company's lengths."""
    here = world()
    algorithm = AlgorithmConfig(advantage=ADVANTAGES["rloo"](), loss=LOSSES["reinforce"](reduction="token-sum"))
    batch, chance = here.batch(2)
    ends = torch.cat([torch.zeros(1), batch.action.cumsum(0)])[batch.rollout_token_offsets]
    tokens = torch.zeros_like(chance).index_add_(0, batch.group, ends.diff().double())
    estimated = algorithm.estimate(batch, AlgorithmState())
    share = chance / (tokens * len(chance))  # of a sum over all groups, a mean over each group's tokens
    found = here.weighed_gradient(algorithm, estimated.batch, share, estimated.state)
    unlike(found, true_gradient(here.theta, here.reward))
