"""The models of a run besides the policy, by the columns that they compute."""

from __future__ import annotations

from etude.rewards import RewardFunction, RewardModelScore

ROLLOUT_COLUMNS = frozenset(
    ["reward", "metric", "reward_parts", "truncated", "version", "turn", "behavior_logp", "token_reward", "source"]
) | {"trainer_version", "rollout_id", "role", "observation", "greedy_reward", "alternative_ids", "alternative_logp"}
"""Columns that come with the rollouts."""

POLICY_COLUMNS = frozenset({"old_logp", "old_alternative_logp", "entropy", "sum_pi_squared"})
"""Columns that the policy itself computes."""

REFERENCE_COLUMNS = frozenset({"ref_logp"})
"""Columns that the reference policy computes."""

TEACHER_COLUMNS = frozenset({"teacher_logp"})
"""Columns that the teacher computes."""

CRITIC_COLUMNS = frozenset({"value", "final_value"})
"""Columns that the critic computes."""

MODEL_COLUMNS = POLICY_COLUMNS | REFERENCE_COLUMNS | TEACHER_COLUMNS | CRITIC_COLUMNS

ENVIRONMENT_COLUMNS = frozenset({"anchor"})
"""Columns that an environment provides."""


def model_rewards(reward: RewardFunction) -> list[RewardModelScore]:
    """Return the rewards that a model in this process computes: this one, or members of it."""
    if isinstance(reward, RewardModelScore):
        return [reward]
    return [reward_model for member in reward.members().values() for reward_model in model_rewards(member)]
