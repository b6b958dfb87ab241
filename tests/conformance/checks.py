"""The claims of each item, their tolerances and their tests: the source of `docs/reference/claims.md`.

family (a)   its expected gradient, summed over all possible samples, is the gradient that it claims to be
family (b)   its numbers are those of its formula, which is restated independently in numpy
family (c)   its value and gradient are those of its formula, by finite differences; on-policy it is REINFORCE
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.conformance import test_advantages_exact as exact
from tests.conformance import test_advantages_restated as restated
from tests.conformance import test_corrections as corrections
from tests.conformance import test_kl as kl
from tests.conformance import test_losses as losses
from tests.conformance import test_shaping as shaping
from tests.conformance import test_supervised as supervised
from tests.conformance.mdp import EXACT

Check = Callable[..., None]


@dataclass(frozen=True)
class Item:
    """One algorithm with its claim and its checks."""

    family: str
    tolerance: float
    """The largest allowed difference of a float64 result, over all checks of the item."""
    claim: str
    checks: tuple[Check, ...]


def gradient(claim: str, *checks: Check) -> Item:
    return Item("a", EXACT, claim, checks)


def both(claim: str, *checks: Check) -> Item:
    return Item("a, b", max(EXACT, restated.TIGHT), claim, checks)


def formula(claim: str, *checks: Check) -> Item:
    return Item("b", restated.TIGHT, claim, checks)


def surrogate(claim: str, *checks: Check) -> Item:
    """Return the item of a policy loss. It adds the check that all of them are REINFORCE on-policy."""
    return Item("c", losses.GRADIENT_TOLERANCE, claim, (*checks, losses.test_every_policy_loss_is_reinforce_on_policy))


def slope(claim: str, *checks: Check) -> Item:
    return Item("c", losses.GRADIENT_TOLERANCE, claim, checks)


def biased(*checks: Check) -> tuple[Check, ...]:
    return (*checks, exact.test_biased_baselines_are_not_the_gradient)


ADVANTAGES: dict[str, Item] = {
    "gae": both(
        "∇J for γ = λ = 1 with any critic, and for any λ with V = V^π; otherwise the recursion",
        exact.test_gae_without_a_critic_is_the_gradient,
        exact.test_gae_with_any_critic_is_the_gradient_where_lambda_is_one,
        exact.test_gae_with_the_true_value_is_the_gradient_for_any_lambda,
        restated.test_gae,
        restated.test_gae_whitened,
        restated.test_gae_bootstraps_truncated_rollouts,
    ),
    "grpo": formula("the formula; not a multiple of ∇J", *biased(restated.test_grpo)),
    "dr_grpo": both(
        "(n − 1)/n · ∇J, divided by the configured constant",
        exact.test_dr_grpo_is_the_gradient_times_n_less_one_over_n,
        exact.test_dr_grpo_divides_by_the_configured_constant,
        restated.test_dr_grpo,
    ),
    "batch_mean": formula("the formula", restated.test_batch_mean),
    "batch_std": formula("the formula", restated.test_batch_std),
    "rloo": both(
        "∇J; with token-mean, not a multiple of ∇J",
        exact.test_rloo_is_the_gradient,
        exact.test_token_mean_is_not_proportional_to_the_gradient,
        restated.test_rloo,
    ),
    "reinforce++": formula("the formula", restated.test_reinforce_pp),
    "reinforce++_baseline": formula("the formula", restated.test_reinforce_pp_baseline),
    "remax": both("∇J", exact.test_remax_is_the_gradient, restated.test_remax),
    "opo": formula("the formula; not a multiple of ∇J", *biased(restated.test_opo)),
    "gpg": formula("the formula", restated.test_gpg),
    "maxrl": both(
        "for rewards of 0 and 1, ∇ of the series of log p cut after order n − 1",
        exact.test_maxrl_is_the_truncated_gradient_of_log_p,
        restated.test_maxrl,
    ),
    "gdpo": formula("the formula", restated.test_gdpo),
    "pass_at_k": both(
        "∇E[maximum reward of the group]",
        exact.test_pass_at_k_is_the_gradient_of_the_best,
        restated.test_pass_at_k,
    ),
    "pkpo": both(
        "∇E[maximum reward of k], k ≤ n",
        exact.test_pkpo_is_the_gradient_of_the_best_of_k,
        restated.test_pkpo,
    ),
    "opob": both(
        "the constant baseline with the least variance of the weighted gradient, by enumeration; not a multiple of ∇J",
        *biased(exact.test_opob_is_the_baseline_of_least_variance, restated.test_opob),
    ),
    "token_baseline": formula(
        "the formula; not a multiple of ∇J; π and Σπ² of two policies are refused",
        *biased(restated.test_token_baseline),
        restated.test_token_baseline_refuses_probabilities_of_two_policies,
    ),
    "step_rewards": both(
        "∇J with rewards to go, with and without the group's baseline; otherwise the formula",
        exact.test_step_rewards_to_go_are_the_gradient,
        restated.test_step_rewards,
    ),
    "turn_baseline": both(
        "∇J, also for rollouts with different numbers of turns",
        exact.test_turn_baseline_is_the_gradient,
        restated.test_turn_baseline,
    ),
    "turn_baseline_biased": formula(
        "the formula; not a multiple of ∇J",
        exact.test_the_biased_turn_baseline_is_biased,
        restated.test_turn_baseline_biased,
    ),
    "gigpo": formula("the formula", restated.test_gigpo),
    "mt_grpo": formula("the formula", restated.test_mt_grpo),
    "rae": both("∇J, and the averages that it keeps", exact.test_rae_is_the_gradient, restated.test_rae),
    "distillation": both(
        "∇KL(π ‖ teacher) for each token, with the visited states held fixed",
        exact.test_distillation_is_the_gradient_of_the_reverse_kl_to_the_teacher,
        restated.test_distillation,
    ),
}

UNITS = losses.test_losses_of_units_over_turns

POLICY_LOSSES: dict[str, Item] = {
    "ppo": surrogate("both clips, with four reductions", losses.test_ppo),
    "gspo": surrogate("the token form, over rollouts and turns", losses.test_gspo, UNITS),
    "cispo": surrogate("the bounded weight has no gradient, and log π_θ has", losses.test_cispo),
    "sapo": surrogate("both temperatures", losses.test_sapo),
    "gmpo": surrogate(
        "one value per rollout or turn, clipped on the side given by the sign of A", losses.test_gmpo, UNITS
    ),
    "dppo": surrogate("both divergences, a threshold for each sign of A, and the cap", losses.test_dppo),
    "clip_cov": surrogate(
        "the loss, and which tokens are picked",
        losses.test_clip_cov,
        losses.test_clip_cov_picks_by_hash_within_the_band,
    ),
    "kl_cov": surrogate(
        "the loss, which tokens are picked, and how ties are broken",
        losses.test_kl_cov,
        losses.test_kl_cov_picks_the_highest,
        losses.test_kl_cov_breaks_ties_by_hash,
    ),
    "dro": surrogate("the formula", losses.test_dro),
    "reinforce": surrogate(
        "∇J exactly in expectation; with a cap, the formula",
        exact.test_reinforce_is_the_gradient,
        losses.test_reinforce,
        losses.test_reinforce_with_a_capped_weight,
    ),
    "gpg": surrogate("the formula", losses.test_gpg),
    "decoupled_ppo": surrogate(
        "a recomputed and an interpolated proximal policy",
        losses.test_decoupled_ppo,
        losses.test_decoupled_ppo_log_linear,
        losses.test_log_linear_decoupled_ppo_is_reinforce_on_policy,
    ),
    "vespo": surrogate("the soft weight of a rollout or a turn has no gradient", losses.test_vespo, UNITS),
    "m2po": surrogate(
        "the loss; the fewest possible tokens are dropped",
        losses.test_m2po,
        losses.test_m2po_drops_the_fewest_tokens_that_lower_the_second_moment_enough,
    ),
    "ipo": surrogate("which tokens are dropped, for both signs of A; the ratio has no cap", losses.test_ipo),
    "flash_reinforce": surrogate(
        "which rollouts or turns are dropped; the others have the whole ratio", losses.test_flash_reinforce, UNITS
    ),
}

SUPERVISED: dict[str, Item] = {
    "sft": slope("the formula", supervised.test_sft),
    "dpo": slope("the formula, with and without label smoothing", supervised.test_dpo),
    "reward_model": slope("the formula", supervised.test_reward_model),
    "value": slope(
        "the larger of both squared errors, and no clip; every reduction",
        supervised.test_value,
        supervised.test_value_reductions,
    ),
    "distill_topk": slope(
        "both directions with a bucket for the tail; a case that needs the bucket; every reduction",
        supervised.test_distill_topk,
        supervised.test_distill_topk_reductions,
        supervised.test_without_the_tail_the_truncated_divergence_can_be_negative,
    ),
    "echo": slope("only tool output is trained on", supervised.test_echo),
}

KLS: dict[str, Item] = {
    "reverse": gradient(
        "∇KL(π_θ ‖ π_ref) with the visited states held fixed, off-policy with a detached weight; "
        "the sum over tokens is not the gradient of whole sequences",
        kl.test_reverse_is_the_reverse_gradient,
        kl.test_reverse_off_policy,
        kl.test_a_token_weight_leaves_the_samplers_states,
        kl.test_summed_reverse_is_not_that_of_sequences,
        kl.test_two_other_combinations_are_wrong,
        kl.test_the_coefficient_multiplies_the_reduced_term,
    ),
    "forward": gradient(
        "∇KL(π_ref ‖ π_θ); the reverse gradient to first order only; the gradient is never cut off",
        kl.test_forward_is_the_forward_gradient,
        kl.test_forward_is_the_reverse_gradient_to_first_order_only,
        kl.test_summed_forward_is_not_that_of_sequences,
        kl.test_k3_has_a_gradient_at_any_distance,
    ),
    "total_variation": gradient(
        "2 ∇TV(π_θ, π_ref)",
        kl.test_total_variation_is_twice_its_gradient,
        kl.test_total_variation_off_policy,
    ),
    "full": gradient(
        "∇KL(π_θ ‖ π_ref), off-policy without a weight",
        kl.test_full_is_the_reverse_gradient,
        kl.test_full_needs_no_weight,
    ),
    "weighted_reverse": gradient(
        "∇KL(π_θ ‖ π_ref) through an attached weight, with k1 and with k3",
        kl.test_weighted_reverse_is_the_reverse_gradient,
        kl.test_weighted_reverse_off_policy,
        kl.test_k1_as_a_loss_has_no_gradient,
    ),
    "sequence": gradient(
        "∇KL between distributions of whole sequences, also off-policy",
        kl.test_sequence_is_the_reverse_gradient_of_sequences,
        kl.test_sequence_off_policy,
    ),
    "in_reward": gradient(
        "∇KL of whole sequences, as a reward to go and as a total; with k3 it would be biased",
        kl.test_k1_in_the_reward_is_the_reverse_gradient_of_sequences,
        kl.test_k3_in_the_reward_is_biased,
    ),
}

CONTROLLERS: dict[str, Item] = {
    "fixed": formula("the coefficient does not change", kl.test_fixed_coefficient),
    "adaptive": formula("the update, within and beyond its bound", kl.test_adaptive_coefficient),
}

CORRECTIONS: dict[str, Item] = {
    "weights": both(
        "not truncated: ∇J for weights of sequences, the gradient in the sampler's states for weights of tokens; "
        "truncated, masked or rescaled: the formula; applied after PPO's maximum",
        corrections.test_sequence_weights_give_the_gradient,
        corrections.test_token_weights_give_the_gradient_in_the_samplers_states,
        corrections.test_truncation_is_biased,
        corrections.test_truncated_weights,
        corrections.test_masked_weights,
        corrections.test_weights_rescaled_to_mean_one,
        corrections.test_the_weight_multiplies_ppo_after_its_maximum,
    ),
    "rejection": formula(
        "every statistic over every scope, and several rules",
        corrections.test_rejection,
        corrections.test_rules_combine_and_vetoes_drop_whole_rollouts,
    ),
    "opsm": formula("which rollouts are dropped", corrections.test_opsm),
    "two policies": formula("PPO's ratio is π_θ/μ", corrections.test_with_two_policies_the_ratio_is_over_the_sampler),
    "mismatch": formula("each metric", corrections.test_the_metrics_of_the_mismatch_are_their_formulas),
    "step scaling": formula(
        "the square root of the rollouts' effective sample size, for any split over ranks",
        corrections.test_a_step_is_scaled_by_the_square_root_of_the_effective_sample_size,
    ),
    "staleness": formula("each metric", corrections.test_the_metrics_of_staleness_are_their_formulas),
}

REDUCTIONS: dict[str, Item] = {
    "reductions": formula(
        "all of them, over rollouts and over turns; rejected tokens still count",
        losses.test_reductions,
        losses.test_reduction_by_a_constant,
        losses.test_rejected_tokens_still_count,
    ),
    "entropy bonus": formula("reduced like the loss", shaping.test_the_entropy_bonus_is_reduced_like_the_loss),
    "top entropy": formula("which tokens are kept", shaping.test_top_entropy_keeps_the_most_uncertain_tokens),
    "overlong": formula("DAPO's penalty, also above the limit, and its default buffer", shaping.test_overlong_penalty),
    "truncated": formula("which rollouts are left out", shaping.test_truncated_rollouts_are_left_out),
    "refill": formula(
        "DAPO's filter as the scheduler applies it: by exact sums, and by one named part of the reward",
        shaping.test_the_filter_keeps_groups_whose_rewards_differ,
        shaping.test_the_filter_keeps_groups_of_one,
        shaping.test_the_filter_compares_the_named_part,
    ),
    "the enumerated MDP": gradient(
        "the enumeration is complete, and its gradients equal finite differences",
        exact.test_the_enumeration_is_complete,
        exact.test_the_true_gradient_equals_finite_differences_of_the_objective,
    ),
}

CHECKS: dict[str, dict[str, Item]] = {
    "Advantages": ADVANTAGES,
    "Policy losses": POLICY_LOSSES,
    "Supervised losses": SUPERVISED,
    "KL terms": KLS,
    "KL coefficients": CONTROLLERS,
    "Corrections": CORRECTIONS,
    "Reductions and shaping": REDUCTIONS,
}
