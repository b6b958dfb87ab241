"""Mistakes in supervised losses, KL terms, corrections and filters."""

from __future__ import annotations

from functools import partial

from etude.algorithms import AlgorithmConfig, kl
from etude.algorithms import overlong as filters
from etude.algorithms.advantages.statistics import measure_staleness
from etude.algorithms.corrections import (
    CorrectionConfig,
    acceptance_mask,
    effective_share,
    importance_weight,
    measure_mismatch,
    opsm_mask,
    rescale_to_mean_one,
    rollout_weights,
)
from etude.algorithms.entropy import top_entropy_mask, top_share_threshold
from etude.algorithms.losses import distill
from etude.algorithms.losses import preference as pairs
from etude.algorithms.losses.supervised import SFT, EchoLoss, ValueLoss, clipped_value_loss
from etude.data.samples import _SampleBuilder, find_observation_starts
from etude.recipes.collect.config import CollectionConfig
from etude.recipes.collect.scheduler import CollectionScheduler
from etude.recipes.collect.step_windows import TaskGroup
from etude.records import has_zero_variance
from tests.conformance import test_assembled as assembled
from tests.conformance import test_corrections as corrections
from tests.conformance import test_kl as kls
from tests.conformance import test_law_supervised as law
from tests.conformance import test_shaping as shaping
from tests.conformance import test_supervised as supervised
from tests.conformance.mutations import Mutation
from tests.data import test_samples as samples

HAS_ZERO_VARIANCE = vars(TaskGroup)["has_zero_variance"].fget

MUTATIONS = [
    Mutation(
        "sign flip", SFT.__call__, "logp = view.logp", "logp = -view.logp", partial(supervised.test_sft, "token-mean")
    ),
    Mutation(
        "sign flip",
        pairs.preference_loss,
        "-(1 - label_smoothing)",
        "(1 - label_smoothing)",
        supervised.test_reward_model,
    ),
    Mutation(
        "minimum for maximum", clipped_value_loss, "near > plain", "near < plain", partial(supervised.test_value, 0.2)
    ),
    Mutation(
        "dropped tail",
        distill.topk_kl,
        " + torch.where(held, rest_teacher * (log_teacher - torch.where(held, rest, 0.0)), 0.0)",
        "",
        partial(supervised.test_distill_topk, "forward"),
    ),
    Mutation(
        "dropped mask",
        EchoLoss.__call__,
        'view.batch.require("observation", needed_by="ECHO") & ~view.batch.action',
        "~view.batch.action",
        supervised.test_echo,
    ),
    Mutation("dropped half", kl.k2, "0.5 * ", "", kls.test_reverse_is_the_reverse_gradient),
    Mutation("sign flip", kl.k3, "expm1(-cut) + cut", "expm1(cut) - cut", kls.test_forward_is_the_forward_gradient),
    Mutation(
        "gradient cut off",
        kl._clamp_straight_through,
        "x + (bare.clamp(-CLAMP, CLAMP) - bare)",
        "x.clamp(-CLAMP, CLAMP)",
        partial(kls.test_k3_has_a_gradient_at_any_distance, -25.0),
    ),
    Mutation(
        "attached weight", kl.OffPolicyKLTerm.weight, "view.logp.detach()", "view.logp", kls.test_reverse_off_policy
    ),
    Mutation(
        "detached weight",
        kl.WeightedReverseKL.per_token_kl,
        "(view.logp - start).exp()",
        "(view.logp - start).exp().detach()",
        partial(kls.test_weighted_reverse_off_policy, "k1"),
    ),
    Mutation(
        "wrong normalizer",
        kl.sequence_k2,
        " / rollouts.lengths.clamp(min=1)",
        "",
        kls.test_sequence_is_the_reverse_gradient_of_sequences,
    ),
    Mutation(
        "tokens for sequences",
        kl.sequence_k2,
        "k2(rollouts.sum(delta))",
        "rollouts.sum(k2(delta))",
        kls.test_sequence_is_the_reverse_gradient_of_sequences,
    ),
    Mutation(
        "sign flip",
        kl.RewardKL.subtract_from_reward,
        "-value * delta",
        "value * delta",
        partial(kls.test_k1_in_the_reward_is_the_reverse_gradient_of_sequences, "rloo"),
    ),
    Mutation("wrong bound", kl.adapt_coefficient, "-0.2), 0.2)", "-0.5), 0.5)", kls.test_adaptive_coefficient),
    Mutation(
        "mean for product",
        importance_weight,
        "rollouts.sum(log_rho)",
        "rollouts.mean(log_rho)",
        partial(corrections.test_sequence_weights_give_the_gradient, 2),
    ),
    Mutation(
        "dropped truncation",
        CorrectionConfig._compute_weight,
        "rho.clamp(max=high)",
        "rho",
        partial(corrections.test_truncated_weights, "token", 1.1),
    ),
    Mutation(
        "dropped mask",
        CorrectionConfig._compute_weight,
        "torch.where(cut, 0.0, rho)",
        "rho",
        partial(corrections.test_masked_weights, "token"),
    ),
    Mutation(
        "wrong denominator",
        rescale_to_mean_one,
        "int((rollouts.lengths > 0).sum())",
        "rollouts.count",
        partial(corrections.test_weights_rescaled_to_mean_one, "rollouts"),
    ),
    Mutation(
        "wrong statistic",
        acceptance_mask,
        "0.5 * log_rho.square()",
        "log_rho.square()",
        partial(corrections.test_rejection, "k2", "token"),
    ),
    Mutation("any for all", acceptance_mask, "== 0", "< 2", partial(corrections.test_rejection, "k1", "seq_max")),
    Mutation("sign flip", opsm_mask, "drift > delta", "drift < delta", partial(corrections.test_opsm, 0.05)),
    Mutation(
        "wrong center",
        measure_mismatch,
        "squares - n, n",
        "squares, n",
        corrections.test_the_metrics_of_the_mismatch_are_their_formulas,
    ),
    Mutation(
        "mean for product",
        rollout_weights,
        "rollouts.sum(",
        "rollouts.mean(",
        corrections.test_the_metrics_of_the_mismatch_are_their_formulas,
    ),
    Mutation(
        "dropped root",
        CorrectionConfig.step_scale,
        "math.sqrt(effective_share(*sums))",
        "float(effective_share(*sums))",
        corrections.test_a_step_is_scaled_by_the_square_root_of_the_effective_sample_size,
    ),
    Mutation(
        "dropped square",
        effective_share,
        "total.square()",
        "total",
        corrections.test_the_metrics_of_the_mismatch_are_their_formulas,
    ),
    Mutation(
        "newest for oldest",
        measure_staleness,
        "view.rollouts.min(",
        "view.rollouts.max(",
        corrections.test_the_metrics_of_staleness_are_their_formulas,
    ),
    Mutation(
        "idle rollouts counted",
        measure_staleness,
        "view.rollouts.lengths > 0",
        "view.rollouts.lengths >= 0",
        corrections.test_the_metrics_of_staleness_are_their_formulas,
    ),
    Mutation(
        "lowest for highest",
        top_entropy_mask,
        "entropy >= ",
        "entropy <= ",
        shaping.test_top_entropy_keeps_the_most_uncertain_tokens,
    ),
    Mutation(
        "off by one",
        filters.overlong_penalty,
        "(max_length - buffer)",
        "(max_length - buffer + 1)",
        shaping.test_overlong_penalty,
    ),
    Mutation("wrong buffer", filters.OverlongPenalty.penalty, "// 5", "// 4", shaping.test_overlong_penalty),
    Mutation(
        "stops at the limit",
        filters.overlong_penalty,
        "over.clamp(min=0)",
        "over.clamp(min=0, max=buffer)",
        shaping.test_overlong_penalty,
    ),
    Mutation(
        "rounded down",
        top_share_threshold,
        "round(share * count)",
        "int(share * count)",
        shaping.test_top_entropy_keeps_the_most_uncertain_tokens,
    ),
    Mutation(
        "inverted mask",
        AlgorithmConfig._apply_corrections,
        "keep &= ~view",
        "keep &= view",
        shaping.test_truncated_rollouts_are_left_out,
    ),
    Mutation(
        "rounding makes a difference",
        has_zero_variance,
        "4 * precision * (1 + abs(high) + abs(low))",
        "0",
        shaping.test_the_filter_keeps_groups_whose_rewards_differ,
    ),
    Mutation(
        "inverted filter",
        CollectionScheduler._classify,
        "self._refill and group.has_zero_variance",
        "self._refill and not group.has_zero_variance",
        shaping.test_the_filter_keeps_groups_whose_rewards_differ,
    ),
    Mutation(
        "groups of one",
        HAS_ZERO_VARIANCE,
        "len(values) > 1 and ",
        "",
        shaping.test_the_filter_keeps_groups_of_one,
    ),
    Mutation(
        "total for one part",
        CollectionConfig.group_metric,
        "return parts[self.metric]",
        "return total",
        shaping.test_the_filter_compares_the_named_part,
    ),
    Mutation(
        "own denominator",
        EchoLoss.__call__,
        "max(denominators.observations, 1)",
        "max(len(logp), 1)",
        law.test_supervised_losses_do_not_depend_on_micro_batches_or_their_order,
    ),
    Mutation(
        "own denominator",
        SFT.__call__,
        "self.reduce_terms(logp, view, denominators)",
        "self.reduce_terms(logp, view, Denominators.from_view(view))",
        law.test_supervised_losses_do_not_depend_on_micro_batches_or_their_order,
    ),
    Mutation(
        "own denominator",
        pairs.DPO.__call__,
        "max(denominators.groups, 1)",
        "max(len(margin), 1)",
        law.test_supervised_losses_do_not_depend_on_micro_batches_or_their_order,
    ),
    Mutation(
        "own denominator",
        pairs.RewardModelLoss.__call__,
        "max(denominators.groups, 1)",
        "max(len(margin), 1)",
        law.test_supervised_losses_do_not_depend_on_micro_batches_or_their_order,
    ),
    Mutation(
        "mean for sum",
        pairs.DPO.__call__,
        "view.rollouts.sum(",
        "view.rollouts.mean(",
        partial(supervised.test_dpo, 0.0),
    ),
    Mutation(
        "dropped mask",
        SFT.__call__,
        "logp = view.logp",
        'logp = view.full_output("logp")[: len(view.action_index)]',
        law.test_supervised_losses_train_on_their_tokens_and_ignore_all_others,
    ),
    Mutation(
        "dropped reduction",
        ValueLoss.__call__,
        "self.reduce_terms(loss, view, denominators)",
        "loss.sum() / max(denominators.tokens, 1)",
        supervised.test_value_reductions,
    ),
    Mutation(
        "dropped reduction",
        distill.TopKDistillation.__call__,
        "self.reduce_terms(loss, view, denominators)",
        "loss.sum() / max(denominators.tokens, 1)",
        supervised.test_distill_topk_reductions,
    ),
    Mutation(
        "after a row's first action alone",
        _SampleBuilder.add,
        "max(observation_start, self.length)",
        "max(observation_start, self.length or len(turn.prompt))",
        samples.test_a_rewritten_history_has_the_observation_that_its_turn_records,
    ),
    Mutation(
        "prefilled tokens observed",
        _SampleBuilder.add,
        "len(turn.prompt) - turn.opened)",
        "len(turn.prompt))",
        partial(samples.test_the_prefix_of_an_answer_is_not_observed, 2),
    ),
    Mutation(
        "observed in each prompt",
        find_observation_starts,
        "_common_prefix_length(prompt, earlier_prompt, before)",
        "before",
        partial(samples.test_a_token_that_prompts_have_in_common_is_observed_once, 3),
    ),
    Mutation(
        "masked KL",
        AlgorithmConfig.compute_loss,
        "self.loss.reduce_terms(self.kl.per_token_kl(view), view, denominators)",
        'self.loss.reduce_terms(self.kl.per_token_kl(view) * view.column("keep"), view, denominators)',
        assembled.test_corrections_change_neither_the_kl_nor_the_entropy,
    ),
    Mutation(
        "weighted KL",
        AlgorithmConfig.compute_loss,
        "self.loss.reduce_terms(self.kl.per_token_kl(view), view, denominators)",
        'self.loss.reduce_terms(self.kl.per_token_kl(view) * view.column("weight"), view, denominators)',
        assembled.test_corrections_change_neither_the_kl_nor_the_entropy,
    ),
    Mutation(
        "masked entropy",
        AlgorithmConfig.compute_loss,
        "self.loss.reduce_terms(entropy, view, denominators)",
        'self.loss.reduce_terms(entropy * view.column("keep"), view, denominators)',
        assembled.test_corrections_change_neither_the_kl_nor_the_entropy,
    ),
    Mutation(
        "wrong unit",
        AlgorithmConfig.apply_sequence_mask,
        "self.loss.unit",
        '"rollout"',
        partial(assembled.test_the_sequence_mask_drops_whole_units_that_drifted, "turn"),
    ),
    Mutation(
        "next step's coefficient",
        AlgorithmConfig.estimate,
        "EstimatedBatch(batch, state, found.state or following, metrics)",
        "EstimatedBatch(batch, found.state or following, found.state or following, metrics)",
        partial(assembled.test_a_step_trains_with_the_coefficient_that_it_logs, "reverse"),
    ),
]
