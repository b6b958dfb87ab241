"""Family (a): estimators whose expected gradient is that of an objective, proven by a sum over all samples."""

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
    MDP,
    PATHS,
    PREFIXES,
    PROMPTS,
    STATES,
    TOKENS,
    close,
    draw,
    expected_value,
    gradient,
    groups,
    logp,
    make_mdp,
    over_states,
    probability,
    state_of,
    sum_along_paths,
    true_gradient,
    true_value,
)

BIASED = 0.02
"""The least distance of a biased estimator from all multiples of the gradient, relative to its length."""


def make_algorithm(advantage: str, loss: str = "reinforce", **options: object) -> AlgorithmConfig:
    """Return an algorithm with an estimator, and a loss that adds up log-probs over each rollout."""
    return AlgorithmConfig(
        advantage=ADVANTAGES[advantage](**options), loss=LOSSES[loss](reduction="seq-mean-token-sum")
    )


def assert_not_proportional(result: Tensor, expected_gradient: Tensor, least_share: float = BIASED) -> None:
    """Check that a vector is no multiple of another: after the best scaling, a share of its length remains."""
    scale = (result * expected_gradient).sum() / (expected_gradient * expected_gradient).sum()
    assert (result - scale * expected_gradient).norm() > least_share * result.norm()


def binary_rewards(seed: int = 4) -> Tensor:
    return (draw(seed, PROMPTS * len(PATHS)) > 0.3).double()


# -- the MDP ------------------------------------------------------------------------------------------------------


def test_the_enumeration_is_complete() -> None:
    mdp = make_mdp()
    chance = probability(mdp.theta).reshape(PROMPTS, -1)
    torch.testing.assert_close(chance.sum(1), torch.ones(PROMPTS, dtype=torch.float64))
    for n in (1, 2, 3, 4):
        _, weight = mdp.batch(n)
        assert abs(float(weight.sum()) - 1) < 1e-12


def test_the_true_gradient_equals_finite_differences_of_the_objective() -> None:
    mdp, step = make_mdp(), 1e-4
    result = true_gradient(mdp.theta, mdp.reward)
    for i in range(0, STATES * TOKENS, 5):
        up, down = mdp.theta.clone(), mdp.theta.clone()
        up.view(-1)[i] += step
        down.view(-1)[i] -= step
        slope = (expected_value(up, mdp.reward) - expected_value(down, mdp.reward)) / (2 * step)
        assert abs(float(slope - result.view(-1)[i])) < 1e-7


# -- exact --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["reinforce", "ppo"])
def test_reinforce_is_the_gradient(loss: str) -> None:
    """A group of one keeps A = R."""
    mdp = make_mdp()
    close(mdp.expected_gradient(make_algorithm("rloo", loss), 1), -true_gradient(mdp.theta, mdp.reward))


@pytest.mark.parametrize("n", [2, 3, 4])
def test_rloo_is_the_gradient(n: int) -> None:
    mdp = make_mdp()
    close(mdp.expected_gradient(make_algorithm("rloo"), n), -true_gradient(mdp.theta, mdp.reward))


@pytest.mark.parametrize("n", [1, 2])
def test_remax_is_the_gradient(n: int) -> None:
    mdp = make_mdp()
    close(mdp.expected_gradient(make_algorithm("remax"), n), -true_gradient(mdp.theta, mdp.reward))


@pytest.mark.parametrize("n", [2, 3, 4])
def test_dr_grpo_is_the_gradient_times_n_less_one_over_n(n: int) -> None:
    mdp = make_mdp()
    close(mdp.expected_gradient(make_algorithm("dr_grpo"), n), -(n - 1) / n * true_gradient(mdp.theta, mdp.reward))


def test_dr_grpo_divides_by_the_configured_constant() -> None:
    mdp = make_mdp()
    loss = LOSSES["reinforce"](reduction="seq-mean-token-sum-norm", norm_length=7.0)
    result = mdp.expected_gradient(AlgorithmConfig(advantage=ADVANTAGES["dr_grpo"](), loss=loss), 2)
    close(7 * result, -1 / 2 * true_gradient(mdp.theta, mdp.reward))


def best_of(theta: Tensor, reward: Tensor, k: int) -> Tensor:
    """Return E[maximum reward of k trajectories], differentiable."""
    _, members, orders = groups(k)
    chance = orders * probability(theta)[members].prod(1) / PROMPTS
    return (chance * reward[members].max(1).values).sum()


def gradient_of_best(mdp: MDP, k: int) -> Tensor:
    theta = mdp.theta.clone().requires_grad_()
    return gradient(best_of(theta, mdp.reward, k), theta)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_maxrl_is_the_truncated_gradient_of_log_p(n: int) -> None:
    """Σ_{k=1}^{n−1} −(1 − p)^k / k is the series of log p up to order n − 1."""
    reward = binary_rewards()
    mdp = make_mdp(reward=reward)
    theta = mdp.theta.clone().requires_grad_()
    p = (probability(theta) * reward).reshape(PROMPTS, -1).sum(1)
    series = sum((-((1 - p) ** k) / k for k in range(1, n)), torch.zeros(PROMPTS, dtype=torch.float64))
    close(mdp.expected_gradient(make_algorithm("maxrl"), n), -gradient(series.mean(), theta))


@pytest.mark.parametrize("n", [2, 3, 4])
def test_pass_at_k_is_the_gradient_of_the_best(n: int) -> None:
    """The gradient is a sum over the group; the loss takes a mean over it."""
    mdp = make_mdp()
    close(n * mdp.expected_gradient(make_algorithm("pass_at_k"), n), -gradient_of_best(mdp, n))


@pytest.mark.parametrize(("n", "k"), [(2, 2), (3, 2), (4, 2), (4, 3), (4, 4)])
def test_pkpo_is_the_gradient_of_the_best_of_k(n: int, k: int) -> None:
    mdp = make_mdp()
    close(n * mdp.expected_gradient(make_algorithm("pkpo", k=k), n), -gradient_of_best(mdp, k))


def test_rae_is_the_gradient() -> None:
    """The subtracted average was known before the step."""
    mdp = make_mdp()
    result = mdp.expected_gradient(make_algorithm("rae"), 1, AlgorithmState(role_means={0: 0.4}))
    close(result, -true_gradient(mdp.theta, mdp.reward))


def test_distillation_is_the_gradient_of_the_reverse_kl_to_the_teacher() -> None:
    """Compare for each token, with the visited states held fixed. The teacher is the MDP's reference."""
    mdp = make_mdp()

    def divergence(theta: Tensor) -> Tensor:
        return (logp(theta).exp() * (logp(theta) - logp(mdp.reference))).sum(-1)

    expected_gradient = over_states(mdp.theta, mdp.theta, divergence)
    close(mdp.expected_gradient(make_algorithm("distillation"), 1), expected_gradient)


def mdp_of_turn_rewards(seed: int = 5) -> MDP:
    """Return an MDP in which each action is a turn with its own reward, without a reward at the end."""
    return make_mdp(
        reward=torch.zeros(PROMPTS * len(PATHS), dtype=torch.float64), token_reward=draw(seed, STATES, TOKENS)
    )


def test_turn_baseline_is_the_gradient() -> None:
    mdp = mdp_of_turn_rewards()
    assert mdp.token_reward is not None
    result = mdp.expected_gradient(make_algorithm("turn_baseline"), 3)
    close(result, -true_gradient(mdp.theta, sum_along_paths(mdp.token_reward)))


@pytest.mark.parametrize("baseline", ["none", "group"])
def test_step_rewards_to_go_are_the_gradient(baseline: str) -> None:
    mdp = mdp_of_turn_rewards()
    assert mdp.token_reward is not None
    result = mdp.expected_gradient(make_algorithm("step_rewards", baseline=baseline), 2)
    close(result, -true_gradient(mdp.theta, sum_along_paths(mdp.token_reward)))


def test_gae_without_a_critic_is_the_gradient() -> None:
    mdp = make_mdp()
    zeros = torch.zeros(STATES, dtype=torch.float64)
    result = mdp.expected_gradient(make_algorithm("gae", gamma=1.0, lam=1.0, whiten=False), 1, value=zeros)
    close(result, -true_gradient(mdp.theta, mdp.reward))


def test_gae_with_any_critic_is_the_gradient_where_lambda_is_one() -> None:
    mdp = make_mdp()
    result = mdp.expected_gradient(make_algorithm("gae", gamma=1.0, lam=1.0, whiten=False), 1, value=draw(6, STATES))
    close(result, -true_gradient(mdp.theta, mdp.reward))


@pytest.mark.parametrize("lam", [0.0, 0.7])
def test_gae_with_the_true_value_is_the_gradient_for_any_lambda(lam: float) -> None:
    mdp = make_mdp()
    value = true_value(mdp.theta, mdp.reward)
    result = mdp.expected_gradient(make_algorithm("gae", gamma=1.0, lam=lam, whiten=False), 1, value=value)
    close(result, -true_gradient(mdp.theta, mdp.reward))


def count_trajectories(prefix: tuple[int, ...]) -> int:
    """Return the number of trajectories with this prefix."""
    return sum(path[: len(prefix)] == prefix for path in PATHS)


def test_opob_is_the_baseline_of_least_variance() -> None:
    """All trajectories of a prompt are equally likely for the sampler, so a group with each of them once is exact.

    The variance of w·∇log π·(R − b) over them is least where b is the baseline of such a group, and its mean is ∇J.
    """
    uniform_policy = torch.zeros(STATES, TOKENS, dtype=torch.float64)
    for prompt, prefix in itertools.product(range(PROMPTS), PREFIXES):
        counts = [count_trajectories((*prefix, token)) for token in range(TOKENS)]
        uniform_policy[state_of(prompt, prefix)] = torch.tensor(counts, dtype=torch.float64).log()
    mdp = make_mdp(mu=uniform_policy)
    chance, uniform = probability(mdp.theta), torch.full((PROMPTS * len(PATHS),), 1 / len(PATHS), dtype=torch.float64)
    torch.testing.assert_close(probability(uniform_policy), uniform)
    batch = mdp.batch(1)[0].replace(group=torch.arange(PROMPTS).repeat_interleave(len(PATHS)))
    advantage = ADVANTAGES["opob"]()(View(batch), AlgorithmState()).advantage
    first = View(batch).rollouts.offsets[:-1]
    baseline = (mdp.reward - advantage[first]).reshape(PROMPTS, -1)
    torch.testing.assert_close(baseline.min(1).values, baseline.max(1).values)

    scores = jacobian(lambda theta: sum_along_paths(logp(theta)), mdp.theta).flatten(1)
    weighted_scores = (chance / uniform)[:, None] * scores

    def moments_at(b: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean gradient and the variance for each prompt, with these baselines [2]."""
        result = (weighted_scores * (mdp.reward - b.repeat_interleave(len(PATHS)))[:, None]).reshape(
            PROMPTS, len(PATHS), -1
        )
        return result.mean((0, 1)), (result - result.mean(1, keepdim=True)).square().sum(-1).mean(1)

    best_baseline = baseline[:, 0]
    mean, least_share = moments_at(best_baseline)
    close(mean.reshape(STATES, TOKENS), true_gradient(mdp.theta, mdp.reward))
    for change in (-0.3, -1e-3, 1e-3, 0.3):
        other, larger = moments_at(best_baseline + change)
        close(other, mean)
        assert bool((larger > least_share).all())
    assert bool((moments_at(mdp.reward.reshape(PROMPTS, -1).mean(1))[1] > 1.001 * least_share).all())


# -- biased estimators --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["opo", "grpo", "token_baseline", "opob"])
def test_biased_baselines_are_not_the_gradient(name: str) -> None:
    """The gradient is no multiple of ∇J if a rollout's own length or reward enters its baseline."""
    mdp = make_mdp()
    assert_not_proportional(mdp.expected_gradient(make_algorithm(name), 3), true_gradient(mdp.theta, mdp.reward))


def test_the_biased_turn_baseline_is_biased() -> None:
    mdp = mdp_of_turn_rewards()
    assert mdp.token_reward is not None
    result = mdp.expected_gradient(make_algorithm("turn_baseline_biased"), 3)
    assert_not_proportional(result, true_gradient(mdp.theta, sum_along_paths(mdp.token_reward)))


def test_token_mean_is_not_proportional_to_the_gradient() -> None:
    """Division by a group's tokens weights each rollout by the lengths of the others."""
    mdp = make_mdp()
    algorithm = AlgorithmConfig(advantage=ADVANTAGES["rloo"](), loss=LOSSES["reinforce"](reduction="token-sum"))
    batch, chance = mdp.batch(2)
    ends = torch.cat([torch.zeros(1), batch.action.cumsum(0)])[batch.rollout_token_offsets]
    tokens = torch.zeros_like(chance).index_add_(0, batch.group, ends.diff().double())
    estimated = algorithm.estimate(batch, AlgorithmState())
    share = chance / (tokens * len(chance))  # from a sum over all groups to a mean over each group's tokens
    result = mdp.weighted_gradient(algorithm, estimated.batch, share, estimated.state)
    assert_not_proportional(result, true_gradient(mdp.theta, mdp.reward))
