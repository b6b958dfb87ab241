"""Names of options in other trainers, so that the error for such a name can suggest the option here."""

from __future__ import annotations

from collections.abc import Mapping

OPTION_ALIASES: Mapping[str, str] = {
    "n": "collect.group_size",
    "num_iterations": "ppo_epochs",
    **dict.fromkeys(("gpus", "n_gpus", "num_gpus", "nproc_per_node", "num_processes"), "ranks"),
    "filter_overlong_prompts": "data.overlong",
    "loss_type": "loss",
    "beta": "kl",
    "target_modules": "lora.targets",
    "pretrained": "model.path",
    "reward_fn_key": "data.columns.source",
    "environment_factory": "env.hub",
    "interaction_config_path": "env.path",
    "timeout_seconds": "agent.timeout",
    "unresponsive_seconds": "agent.heartbeat_timeout",
    "max_attempts": "collect.retries",
    "n_runners": "agent.runners",
    "default_local_dir": "directory",
    "experiment_name": "observe.wandb.name",
    "run_name": "observe.wandb.name",
}
"""The option here for the last part of another trainer's option name, or for a name that is often guessed, where its
words do not tell (`rules`). Full names are in `verl_trl`."""

SHARED = ("train", "model", "checkpoint", "directory", "observe", "ranks", "cluster")
"""The sections and options that every run has."""

SUPERVISED_ALIASES: dict[str, str] = {
    **{name: option for name, option in OPTION_ALIASES.items() if option.split(".")[0] in SHARED},
    "train_batch_size": "batch_size",
    "per_device_train_batch_size": "batch_size",
    "micro_batch_size_per_gpu": "train.max_tokens_per_micro_batch",
    "packing": "train.max_tokens_per_micro_batch",
    "max_length": "data.max_tokens",
    "max_seq_length": "data.max_tokens",
    "truncation": "data.overlong",
    "truncation_mode": "data.overlong",
    "train_files": "data.train",
    "train_dataset": "data.train",
    "dataset": "data.train",
    "val_files": "data.val",
    "eval_dataset": "data.val",
    "prompt_key": "data.columns.prompt",
    "num_train_epochs": "epochs",
    "total_epochs": "epochs",
    "max_steps": "steps",
    "total_training_steps": "steps",
    "test_freq": "evaluate.every",
    "eval_steps": "evaluate.every",
    "val_before_train": "evaluate.first",
    "eval_on_start": "evaluate.first",
}
"""The same for supervised runs."""

DEMONSTRATION_ALIASES = {
    "dataset_text_field": "data.columns.text",
    "messages_key": "data.columns.messages",
    "assistant_only_loss": "data.train_on",
    "completion_only_loss": "data.train_on",
}
DPO_ALIASES = {
    "beta": "loss.beta",
    "label_smoothing": "loss.label_smoothing",
    "ref_model": "reference.path",
    "ref_model_name_or_path": "reference.path",
}
DISTILLATION_ALIASES = DEMONSTRATION_ALIASES | {
    "teacher_model": "teacher.path",
    "teacher_model_name_or_path": "teacher.path",
    "beta": "loss.direction",
}
"""Names that only one of these recipes has."""
