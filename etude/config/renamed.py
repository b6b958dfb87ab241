"""Former names of options, choices, values and metrics, so that each is answered with the name that is in force.

A name that a run directory, a script or a habit still has is refused like any unknown name, and the error tells the new
one. Names of other trainers are in `etude.recipes.option_names`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

RENAMED_OPTIONS: Mapping[str, str] = {
    "updates": "mini_batches",
    "epochs": "ppo_epochs",
    "train.clip": "train.max_grad_norm",
    "train.micro_tokens": "train.max_tokens_per_micro_batch",
    "train.schedule": "train.lr_scheduler",
    "train.weights": "train.engine",
    "mesh.sequence": "mesh.tensor",
    "train.warmup": "train.warmup_steps",
    "rollout.arguments": "rollout.server_args",
    "rollout.carrier": "rollout.weight_transport",
    "rollout.key_from": "rollout.api_key_env",
    "rollout.line": "rollout.max_waiting",
    "rollout.max_running": "rollout.max_num_seqs",
    "rollout.meet": "rollout.rendezvous",
    "rollout.memory": "rollout.gpu_memory_utilization",
    "rollout.prefill_tokens": "rollout.max_num_batched_tokens",
    "advantage.normalise": "advantage.normalize",
    "correction.normalise": "correction.normalize",
    "correction.sequence_mask": "correction.opsm_delta",
    "chat.variables": "chat.template_kwargs",
    "data.learn": "data.train_on",
    "data.max_prompt": "data.max_prompt_length",
    "data.sampler.rest": "data.sampler.cooldown",
    "largest": "max_number",
    "highest": "max_target",
    "crew.silence": "crew.heartbeat_timeout",
    "env.at_once": "env.max_concurrency",
    "env.options": "env.kwargs",
    "agent.at_once": "agent.max_concurrency",
    "agent.calls": "agent.max_calls",
    "agent.failed": "agent.failed_reward",
    "agent.patience": "agent.runner_timeout",
    "agent.silence": "agent.heartbeat_timeout",
    "reward.at_once": "reward.max_concurrency",
    "reward.extra": "reward.extra_body",
    "reward.micro_tokens": "reward.max_tokens_per_micro_batch",
    "reward.total": "reward.total_timeout",
    "reward=choice": "reward=multiple_choice",
    "reward=exact": "reward=exact_match",
    "reward=model": "reward=reward_model",
    "reward=program": "reward=code",
}
"""Options, and after `=` choices, by their former names. An entry applies to every section that has the field, such as
`critic.train` or `reward.parts.NAME`."""

RENAMED_NOTES: Mapping[str, str] = {
    "epochs": "passes over the rollouts of a step. For passes over the data, set `steps`; a step asks `collect.tasks` "
    "tasks",
    "train.weights": "several ranks always have shards, `fsdp`, and one rank may have whole weights, `local`",
}
"""Notes that the answer to a former name of an option adds."""

RENAMED_VALUES: Mapping[str, Mapping[str, str]] = {
    "activation_checkpointing": {"true": "full", "false": "none"},
}
"""Former values of options, by the options' last names."""

RENAMED_METRICS: Mapping[str, str] = {
    "device_utilisation": "device_utilization",
    "engine/at_once": "engine/concurrency_limit",
    "engine/begun_anew": "engine/requests_restarted",
    "engine/resumed": "engine/requests_resumed",
    "left_out_rows": "skipped_rows",
    "level_groups": "zero_variance_share",
    "level_share": "zero_variance_share",
    "mismatch/sample_size": "mismatch/effective_sample_size",
    "publish_hold_ms": "publish_pause_ms",
    "publish_withdrawn": "publish_failed_replicas",
    "sequence_mask_share": "opsm_dropped_share",
    "zero_variance_groups": "zero_variance_share",
}
"""Metrics by their former names."""


def new_option_name(old: str, fields: Collection[str]) -> str | None:
    """Return the field that a former name of an option stands for, among the fields of its section; None if none."""
    return next((new for new in _last_names(old, ".") if new in fields), None)


def new_choice_name(old: str, choices: Collection[str]) -> str | None:
    """Return the choice that a former name stands for, among the possible ones; None if none."""
    return next((new for new in _last_names(old, "=") if new in choices), None)


def new_value(path: str, old: object) -> str | None:
    """Return the value that a former value of an option stands for; None if none."""
    return RENAMED_VALUES.get(path.rpartition(".")[2], {}).get(str(old).lower())


def new_metric_name(old: str) -> str | None:
    """Return the metric that a former name stands for, also of an evaluation; None if none."""
    prefix = "eval/" if old.startswith("eval/") else ""
    new = RENAMED_METRICS.get(old.removeprefix(prefix))
    return None if new is None else prefix + new


def _last_names(old: str, separator: str) -> list[str]:
    """Return the last parts of the new names of all entries whose former name ends in a name."""
    return [
        new.rpartition(separator)[2]
        for former, new in RENAMED_OPTIONS.items()
        if former.rpartition(separator)[2] == old and ("=" in former) is (separator == "=")
    ]
