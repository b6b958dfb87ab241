"""Mistakes in advantage estimators."""

from __future__ import annotations

from functools import partial

from etude.algorithms.advantages import batch as batch_advantages
from etude.algorithms.advantages import group, role, statistics, token, turns
from etude.algorithms.advantages import pass_at_k as pass_at_k_advantages
from etude.algorithms.advantages.rewards import Rewards
from tests.conformance import test_advantages_exact as exact
from tests.conformance import test_advantages_restated as restated
from tests.conformance.mutations import Mutation

TOKEN_REWARDS = vars(Rewards)["sparse_token_rewards"].func

MUTATIONS = [
    Mutation(
        "reward moved to the last action",
        TOKEN_REWARDS,
        "torch.searchsorted(self.view.action_index, at, right=True) - 1",
        "self.view.rollouts.offsets[rollout + 1] - 1",
        partial(restated.test_reinforce_pp, 0.9),
    ),
    Mutation(
        "reward moved to the first action",
        TOKEN_REWARDS,
        "torch.searchsorted(self.view.action_index, at, right=True) - 1",
        "self.view.rollouts.offsets[rollout]",
        restated.test_turn_baseline,
    ),
    Mutation(
        "two policies",
        token.refuse_other_policy,
        "pi.square() > squares + slack",
        "pi.square() > squares + 1",
        restated.test_token_baseline_refuses_probabilities_of_two_policies,
    ),
    Mutation(
        "two policies",
        token.refuse_other_policy,
        "squares - slack > pi.square()",
        "squares - 2 > pi.square()",
        restated.test_token_baseline_refuses_probabilities_of_two_policies,
    ),
    Mutation(
        "sign flip",
        group.dr_grpo,
        "return GroupStatistics",
        "return -GroupStatistics",
        partial(exact.test_dr_grpo_is_the_gradient_times_n_less_one_over_n, 3),
    ),
    Mutation(
        "wrong normalizer",
        group.rloo,
        " * groups.size / (groups.size - 1).clamp(min=1)",
        "",
        partial(exact.test_rloo_is_the_gradient, 2),
    ),
    Mutation("off by one", group.rloo, "(groups.size - 1)", "(groups.size + 1)", restated.test_rloo),
    Mutation(
        "wrong normalizer",
        group.grpo,
        "groups.std(reward) + EPSILON",
        "groups.std(reward) ** 2 + EPSILON",
        restated.test_grpo,
    ),
    Mutation("biased deviation", statistics.GroupStatistics.std, "self.size - 1", "self.size", restated.test_grpo),
    Mutation(
        "group of one",
        group.grpo,
        "groups.is_singleton, reward",
        "groups.is_singleton, 0.0 * reward",
        restated.test_grpo,
    ),
    Mutation("sign flip", group.ReMax.advantage, "reward - view", "reward + view", restated.test_remax),
    Mutation("dropped weight", group.opo, "length * above", "above", restated.test_opo),
    Mutation(
        "wrong normalizer",
        group.maxrl,
        "torch.where(mean > 0, mean, 1.0)",
        "1.0",
        partial(exact.test_maxrl_is_the_truncated_gradient_of_log_p, 3),
    ),
    Mutation(
        "off by one",
        pass_at_k_advantages.pass_at_k,
        "lengths) - 1",
        "lengths) - 2",
        partial(exact.test_pass_at_k_is_the_gradient_of_the_best, 3),
    ),
    Mutation(
        "off by one",
        pass_at_k_advantages.pkpo,
        "place >= k - 1",
        "place >= k",
        partial(exact.test_pkpo_is_the_gradient_of_the_best_of_k, 4, 2),
    ),
    Mutation(
        "wrong normalizer",
        pass_at_k_advantages.pkpo,
        "_log_choose(size, k)",
        "_log_choose(size, k - 1)",
        partial(exact.test_pkpo_is_the_gradient_of_the_best_of_k, 4, 3),
    ),
    Mutation(
        "off by one",
        token.gae,
        "rollouts.shift(values)",
        "values",
        partial(exact.test_gae_with_the_true_value_is_the_gradient_for_any_lambda, 0.7),
    ),
    Mutation(
        "sign flip",
        token.gae,
        "gamma * following - values",
        "values - gamma * following",
        partial(restated.test_gae, 1.0, 1.0),
    ),
    Mutation("dropped discount", token.gae, "gamma * lam", "lam", partial(restated.test_gae, 0.9, 0.8)),
    Mutation(
        "dropped discount",
        token.ReinforcePP.__call__,
        "suffix_sum(rewards, self.gamma)",
        "suffix_sum(rewards)",
        partial(restated.test_reinforce_pp, 0.9),
    ),
    Mutation(
        "weight not squared",
        group.opob,
        "(2 * log_weight",
        "(log_weight",
        exact.test_opob_is_the_baseline_of_least_variance,
    ),
    Mutation(
        "dropped norm of the score",
        group.opob,
        "energy * ",
        "",
        exact.test_opob_is_the_baseline_of_least_variance,
    ),
    Mutation(
        "ratio upside down",
        group.OPOB.advantage,
        'old - view.column("behavior_logp", by).double()',
        'view.column("behavior_logp", by).double() - old',
        partial(restated.test_opob, False),
    ),
    Mutation(
        "wrong normalizer",
        group.opob,
        "groups.std(reward) + EPSILON",
        "groups.std(strength) + EPSILON",
        partial(restated.test_opob, True),
    ),
    Mutation(
        "no running sum",
        token.optimal_token_baseline,
        "rollouts.cumsum(energy.to(rewards.dtype))",
        "energy.to(rewards.dtype)",
        restated.test_token_baseline,
    ),
    Mutation(
        "sign flip",
        token.score_energy,
        "expm1(logp).square() + others",
        "expm1(logp).square() - others",
        restated.test_token_baseline,
    ),
    Mutation(
        "sign flip",
        token.OnPolicyDistillation.__call__,
        "-log_ratio",
        "log_ratio",
        exact.test_distillation_is_the_gradient_of_the_reverse_kl_to_the_teacher,
    ),
    Mutation(
        "wrong center",
        statistics.whiten,
        "values - mean.to(values.dtype)",
        "values",
        restated.test_reinforce_pp_baseline,
    ),
    Mutation("biased variance", statistics.moments, "(count - 1)", "count", restated.test_batch_std),
    Mutation(
        "dropped weight",
        batch_advantages.reinforce_pp_baseline,
        ", weight=length",
        "",
        restated.test_reinforce_pp_baseline,
    ),
    Mutation("dropped weight", batch_advantages.gdpo, "normal * weights", "normal", restated.test_gdpo),
    Mutation(
        "wrong normalizer",
        batch_advantages.gpg,
        "(every / teaching.clamp(min=1))",
        "1",
        partial(restated.test_gpg, 1.0),
    ),
    Mutation(
        "wrong center", batch_advantages.batch_mean, " - (every - every.min()).mean()", "", restated.test_batch_mean
    ),
    Mutation(
        "wrong normalizer",
        batch_advantages.batch_std,
        "moments(centred, ranks)",
        "moments(reward, ranks)",
        restated.test_batch_std,
    ),
    Mutation("off by one", turns.subtract_others_mean, "(size - 1)", "size", exact.test_turn_baseline_is_the_gradient),
    Mutation(
        "own sample in the baseline",
        turns.subtract_others_mean,
        "stage.sum(above) - above",
        "stage.sum(above)",
        restated.test_turn_baseline,
    ),
    Mutation(
        "wrong normalizer",
        turns.center_within,
        "groups.std(values) + EPSILON",
        "1",
        partial(restated.test_mt_grpo, 1.0),
    ),
    Mutation("off by one", role.update_role_means, "decay**n", "decay ** (n + 1)", restated.test_rae),
]
