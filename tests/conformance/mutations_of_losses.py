"""Mistakes in policy losses, and in their common code."""

from __future__ import annotations

from functools import partial

from etude.algorithms.base import PolicyLoss, TokenLoss, log_ratio
from etude.algorithms.losses import clip, covariance, sequence
from etude.algorithms.losses import decoupled_ppo as proximal
from etude.algorithms.losses import reinforce as plain_losses
from etude.algorithms.losses import trust_region as trust
from tests.conformance import test_advantages_exact as exact
from tests.conformance import test_corrections as corrections
from tests.conformance import test_law_micro_batch as micro
from tests.conformance import test_losses as losses
from tests.conformance.mutations import Mutation

UNITS = losses.test_losses_of_units_over_turns

MUTATIONS = [
    Mutation(
        "minimum for maximum",
        clip.surrogate,
        "clipped > plain",
        "clipped < plain",
        partial(losses.test_ppo, None, "token-mean"),
    ),
    Mutation(
        "swapped bounds",
        clip.surrogate,
        "1 - clip_low, 1 + clip_high",
        "1 - clip_high, 1 + clip_low",
        partial(losses.test_ppo, None, "token-mean"),
    ),
    Mutation("dropped condition", clip.ppo, "(advantage < 0) & ", "", partial(losses.test_ppo, 1.5, "token-mean")),
    Mutation(
        "detached ratio",
        clip.ppo,
        "log_ratio(logp, old_logp)",
        "log_ratio(logp.detach(), old_logp)",
        partial(losses.test_ppo, None, "token-mean"),
    ),
    Mutation("attached weight", clip.cispo, "logp.detach()", "logp", losses.test_cispo),
    Mutation("wrong normalizer", clip.sapo, "-4 * advantage / tau", "-2 * advantage", losses.test_sapo),
    Mutation("differentiated s", sequence.gspo, "own = logp.detach()", "own = logp", losses.test_gspo),
    Mutation("sum for mean", sequence.gspo, "units.mean", "units.sum", losses.test_gspo),
    Mutation("sum for mean", sequence.gmpo, "units.mean", "units.sum", losses.test_gmpo),
    Mutation("clip on the wrong side", sequence.gmpo, "clamp(-CLAMP, clip)", "clamp(-clip, CLAMP)", losses.test_gmpo),
    Mutation("wrong unit", sequence.GSPO.per_token_loss, "view.units(self.unit)", "view.rollouts", UNITS),
    Mutation("wrong unit", sequence.GMPO.per_token_loss, "view.units(self.unit)", "view.rollouts", UNITS),
    Mutation("wrong unit", sequence.VESPO.per_token_loss, "view.units(self.unit)", "view.rollouts", UNITS),
    Mutation("mean for product", sequence.vespo, "units.sum(", "units.mean(", losses.test_vespo),
    Mutation(
        "wrong direction",
        trust.dppo_drops,
        "(p - mu) * advantage.sign()",
        "(mu - p) * advantage.sign()",
        partial(losses.test_dppo, "tv", 0.2),
    ),
    Mutation(
        "swapped thresholds",
        trust.dppo_drops,
        "advantage > 0, p.new_tensor(high)",
        "advantage < 0, p.new_tensor(high)",
        partial(losses.test_dppo, "tv", 0.2),
    ),
    Mutation(
        "one threshold for both",
        trust.DPPO.per_token_loss,
        "usual if self.threshold_high is None else self.threshold_high",
        "low",
        partial(losses.test_dppo, "kl", 0.05),
    ),
    Mutation(
        "dropped half",
        trust.binary_kl,
        " + others_mu * (others_mu / others).log()",
        "",
        partial(losses.test_dppo, "kl", 0.05),
    ),
    Mutation("one side", trust.ipo_drops, ".abs()", "", losses.test_ipo),
    Mutation("wrong unit", trust.flash_drops, "units.mean(", "units.sum(", losses.test_flash_reinforce),
    Mutation(
        "arguments exchanged",
        trust.flash_drops,
        "binary_kl(logp, behavior_logp)",
        "binary_kl(behavior_logp, logp)",
        losses.test_flash_reinforce,
    ),
    Mutation("wrong unit", trust.FlashReinforce.per_token_loss, "view.units(self.unit)", "view.rollouts", UNITS),
    Mutation(
        "dropped mask", covariance.clip_cov, "advantage.masked_fill(chosen, 0.0)", "advantage", losses.test_clip_cov
    ),
    Mutation(
        "dropped mask",
        covariance.kl_cov,
        "torch.where(chosen, loss + coefficient * (logp - old_logp).abs(), loss)",
        "loss + coefficient * (logp - old_logp).abs()",
        losses.test_kl_cov,
    ),
    Mutation(
        "rounded to the nearest",
        covariance.quota,
        "int(share * tokens)",
        "round(share * tokens)",
        losses.test_kl_cov_picks_the_highest,
    ),
    Mutation("wrong center", covariance.covariance, "p - means[1]", "p", losses.test_kl_cov_picks_the_highest),
    Mutation(
        "off by one",
        covariance.token_hashes,
        "where - offsets[rollout]",
        "where - offsets[rollout] + 1",
        losses.test_clip_cov_picks_by_hash_within_the_band,
    ),
    Mutation(
        "one seed for all",
        covariance.token_hashes,
        "torch.tensor(seed,",
        "torch.tensor(7,",
        micro.test_random_picks_depend_on_seed_and_step,
    ),
    Mutation(
        "one step for all", covariance.token_hashes, "^ step)", "^ 2)", micro.test_random_picks_depend_on_seed_and_step
    ),
    Mutation(
        "one rollout for all",
        covariance.token_hashes,
        'view.batch.require("rollout_id", needed_by="A random choice").long()[rollout]',
        "torch.zeros_like(rollout)",
        micro.test_random_picks_depend_on_seed_and_step,
    ),
    Mutation(
        "constant",
        covariance.token_hashes,
        "splitmix64(key ^ (where - offsets[rollout]))",
        "torch.zeros_like(where)",
        micro.test_random_picks_depend_on_seed_and_step,
    ),
    Mutation(
        "off by one",
        covariance.select_lowest,
        "kthvalue(count)",
        "kthvalue(count - 1)",
        losses.test_clip_cov_picks_by_hash_within_the_band,
    ),
    Mutation("dropped half", plain_losses.dro, "0.5 * beta", "beta", losses.test_dro),
    Mutation(
        "attached weight",
        plain_losses.capped_ratio,
        "logp.detach()",
        "logp",
        losses.test_reinforce_with_a_capped_weight,
    ),
    Mutation(
        "sign flip",
        plain_losses.reinforce,
        "-advantage",
        "advantage",
        partial(exact.test_reinforce_is_the_gradient, "reinforce"),
    ),
    Mutation(
        "wrong reference",
        proximal.decoupled_ppo,
        "log_ratio(prox_logp, behavior_logp)",
        "log_ratio(behavior_logp, prox_logp)",
        losses.test_decoupled_ppo,
    ),
    Mutation(
        "attached proximal policy", proximal.log_linear, "logp.detach()", "logp", losses.test_decoupled_ppo_log_linear
    ),
    Mutation(
        "detached ratio",
        trust.masked_ratio,
        "log_ratio(logp, behavior_logp)",
        "log_ratio(logp.detach(), behavior_logp)",
        losses.test_m2po,
    ),
    Mutation(
        "drops too few",
        trust.outliers,
        "distance >= ordered[over][0]",
        "distance > ordered[over][0]",
        partial(losses.test_m2po_drops_the_fewest_tokens_that_lower_the_second_moment_enough, 0.04),
    ),
    Mutation("wrong ratio", log_ratio, "logp - other", "other - logp", losses.test_sapo),
    Mutation(
        "dropped mask",
        PolicyLoss.__call__,
        'torch.where(view.column("keep"), terms, 0.0)',
        "terms",
        losses.test_rejected_tokens_still_count,
    ),
    Mutation(
        "dropped weight",
        PolicyLoss.__call__,
        'terms * view.column("weight")',
        "terms",
        corrections.test_the_weight_multiplies_ppo_after_its_maximum,
    ),
    Mutation(
        "wrong denominator",
        TokenLoss.reduce_terms,
        "terms.sum() / max(denominators.tokens, 1)",
        "terms.mean() * count",
        partial(losses.test_reductions, "token-mean", "rollout"),
    ),
    Mutation(
        "sum for mean",
        TokenLoss.reduce_terms,
        "view.units(self.unit).mean(terms).sum()",
        "terms.sum()",
        partial(losses.test_reductions, "seq-mean-token-mean", "turn"),
    ),
    Mutation(
        "dropped constant",
        TokenLoss.reduce_terms,
        "(count * self.norm_length)",
        "count",
        losses.test_reduction_by_a_constant,
    ),
]
