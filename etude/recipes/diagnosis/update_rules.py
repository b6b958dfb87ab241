"""Rules about the policy's updates."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from etude.recipes.diagnosis.evidence import Evidence, RunFinding, Series, has_learned, rise

ESS = "mismatch/rollout_effective_sample_size"
GONE_NATS, GONE_SHARE = 0.01, 0.1
"""Entropy in nats a token, and as a share of the first steps, under which it is gone."""
LARGE_KL = 0.05
LARGE_REFERENCE_KL = 0.1
LARGE_MISMATCH = 0.01
"""Divergences in nats a token that count as large if they grow."""
GROWTH = 3.0
"""Growth since the first steps that counts."""
UNMOVED = 1e-7
"""Divergence in nats a token under which the policy has not moved."""
MOSTLY_CLIPPED = 0.5
DEFAULT_ESS_FLOOR = 0.1


def entropy_gone(evidence: Evidence) -> Iterator[RunFinding]:
    """Find a policy that has become deterministic: it tries nothing new."""
    entropy = _entropy(evidence)
    if len(entropy) < 20:
        return
    first, now = entropy.head().mean, entropy.tail()
    if now.mean < min(GONE_NATS, GONE_SHARE * first) and not has_learned(evidence):
        what = f"The entropy fell from {first:.2g} to {now.mean:.2g} nats a token: the policy tries nothing new."
        remedy = (
            "`loss.clip_high=0.28` keeps rare good answers, `entropy.coefficient=0.001` rewards variety, `kl=reverse` "
            "holds the policy near its start; or lower `train.learning_rate`."
        )
        perplexity = float(np.exp(now.mean))
        yield now.finding(what, remedy, 0.85, **{"first": first, "mismatch/sampler_perplexity": perplexity})


def kl_grows(evidence: Evidence) -> Iterator[RunFinding]:
    """Find a policy that moves too far in a step, or away from its reference without a gain."""
    step = evidence.series("policy_kl")
    if len(step) >= 10 and _grows(step, LARGE_KL):
        what = f"In a step the policy moves {step.tail().mean:.2g} nats a token, and {_middle(step):.2g} at first."
        remedy = "Fewer `mini_batches` or `ppo_epochs`, a lower `train.learning_rate`, a smaller `train.max_grad_norm`."
        yield step.tail().finding(what, remedy, 0.6 + step.tail().mean)
    drift, reward = evidence.series("kl"), evidence.series("reward")
    if len(drift) < 20 or drift.tail().mean < LARGE_REFERENCE_KL:
        return
    gain, error = rise(reward.tail(max(len(reward) // 2, 10)))
    grown, noise = rise(drift.tail(max(len(drift) // 2, 10)))
    if grown > 3 * noise and gain <= error and not has_learned(evidence):
        what = (
            f"The divergence from the reference has grown to {drift.tail().mean:.2g} nats a token, and the reward has "
            f"not risen meanwhile."
        )
        remedy = "A larger `kl.coefficient`, or a lower `train.learning_rate`."
        yield drift.tail().finding(what, remedy, 0.6, reward_gain=gain)


def mismatch_grows(evidence: Evidence) -> Iterator[RunFinding]:
    """Find a sampler and a trainer that disagree more and more."""
    mismatch = evidence.series("mismatch/k3")
    if len(mismatch) >= 10 and _grows(mismatch, LARGE_MISMATCH):
        what = (
            f"Sampler and trainer differ by {mismatch.tail().mean:.2g} nats a token, and by {_middle(mismatch):.2g} at "
            "first."
        )
        remedy = (
            "`train.precision=fp32` if memory allows, `correction.weight=truncate`, and a lower `max_staleness` if it "
            "is above 0."
        )
        yield mismatch.tail().finding(what, remedy, 0.7)


def sample_size_low(evidence: Evidence) -> Iterator[RunFinding]:
    """Find updates that few rollouts decide."""
    size = evidence.recent(ESS)
    floor = evidence.number("ess_floor", DEFAULT_ESS_FLOOR)
    if size is None or np.median(size.values) >= floor:
        return
    what = f"The effective sample size is {size.mean:.2g} of the rollouts, under `ess_floor={floor:g}`."
    remedy = "Bound the ratios: `correction.weight=truncate` or `loss=ipo`. Or lower `max_staleness`, `mini_batches`."
    yield size.finding(what, remedy, 0.9 - 0.3 * size.mean)


def gradient_zero(evidence: Evidence) -> Iterator[RunFinding]:
    """Find updates without a gradient."""
    gradient = evidence.recent("grad_norm")
    if gradient is not None and not gradient.values.any():
        what = "The gradient is 0 in each step, so nothing is learned."
        remedy = (
            "Compare `zero_variance_share`, `clip_share` and `dropped_share`; `etude answers RUN` shows the rewards."
        )
        yield gradient.finding(what, remedy, 0.95)


def no_effect(evidence: Evidence) -> Iterator[RunFinding]:
    """Find updates that do not move the policy, although they have a gradient."""
    rate, gradient = evidence.recent("learning_rate"), evidence.recent("grad_norm")
    raise_it = "Raise `train.learning_rate`, and set `train.precision=fp32`: bf16 rounds small changes away."
    if rate is not None and not rate.values.any():
        yield rate.finding("The learning rate is 0, so nothing is learned.", raise_it, 1.0)
        return
    if gradient is not None and not gradient.values.any():
        return
    updates, moved, drift = (evidence.recent(name) for name in ("optimizer_steps", "policy_kl", "kl"))
    if moved is not None and updates is not None and updates.mean > 1 and moved.mean < UNMOVED:
        what = f"The updates of a step move the policy by {moved.mean:.1g} nats a token: next to nothing."
        yield moved.finding(what, raise_it, 0.8)
    elif drift is not None and drift.steps[-1] > 20 and np.abs(drift.values).max() < UNMOVED:
        what = f"After {drift.steps[-1]} steps the policy is still its reference (`kl` {drift.mean:.1g})."
        yield drift.finding(what, raise_it, 0.8)


def clip_extreme(evidence: Evidence) -> Iterator[RunFinding]:
    """Find a clip that cuts most tokens, or none in many updates."""
    share, updates = evidence.recent("clip_share"), evidence.recent("optimizer_steps")
    if share is None or updates is None:
        return
    if share.mean > MOSTLY_CLIPPED:
        what = f"{share.mean:.0%} of the tokens are clipped, and have no gradient."
        remedy = "Fewer `mini_batches` or `ppo_epochs`, a lower `train.learning_rate`, or a wider clip."
        yield share.finding(what, remedy, 0.4 + share.mean / 2)
    elif len(share) >= 10 and updates.mean > 1 and not share.values.any() and evidence.option("loss.clip_high"):
        what = f"No token was clipped in {len(share)} steps of {updates.mean:g} updates: the updates are small."
        yield share.finding(what, "A higher `train.learning_rate`, or more `ppo_epochs`.", 0.3)


def _entropy(evidence: Evidence) -> Series:
    """Return the entropy, or its estimate by the log-probs of the sampled tokens, in nats a token."""
    entropy = evidence.series("entropy")
    if len(entropy):
        return entropy
    perplexity = evidence.series("mismatch/sampler_perplexity")
    return Series("sampled_entropy", perplexity.steps, np.log(np.maximum(perplexity.values, 1.0)))


def _middle(series: Series) -> float:
    return float(np.median(series.head().values))


def _grows(series: Series, large: float) -> bool:
    now = series.tail(5).mean
    return now > large and now > GROWTH * _middle(series)
