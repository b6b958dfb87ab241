"""What other trainers call the options of a run, so that a name from there is answered with the one from here."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["KNOWN_AS", "KNOWN_AS_EXAMPLES", "OF_DEMONSTRATIONS", "OF_DISTILLATION", "OF_DPO"]

KNOWN_AS: Mapping[str, str] = {
    "batch_size": "collect.tasks",
    "train_batch_size": "collect.tasks",
    "per_device_train_batch_size": "collect.tasks",
    "n": "collect.group_size",
    "num_generations": "collect.group_size",
    "ppo_mini_batch_size": "updates",
    "ppo_epochs": "epochs",
    "num_iterations": "epochs",
    "ppo_micro_batch_size_per_gpu": "train.micro_tokens",
    "ppo_max_token_len_per_gpu": "train.micro_tokens",
    "gradient_accumulation_steps": "train.micro_tokens",
    "total_epochs": "steps",
    "total_training_steps": "steps",
    "num_train_epochs": "steps",
    "max_steps": "steps",
    "lr": "train.learning_rate",
    "lr_scheduler_type": "train.schedule",
    "lr_warmup_steps": "train.warmup",
    "warmup_steps": "train.warmup",
    "grad_clip": "train.clip",
    "max_grad_norm": "train.clip",
    "adam_beta1": "train.betas",
    "dtype": "train.precision",
    "gradient_checkpointing": "train.activation_checkpointing",
    "enable_gradient_checkpointing": "train.activation_checkpointing",
    "max_new_tokens": "sampling.max_tokens",
    "max_response_length": "sampling.max_tokens",
    "max_completion_length": "sampling.max_tokens",
    "max_prompt_length": "data.max_prompt",
    "filter_overlong_prompts": "data.overlong",
    "truncation": "data.overlong",
    "gpu_memory_utilization": "rollout.kv_gib",
    "max_num_seqs": "rollout.max_running",
    "adv_estimator": "advantage",
    "loss_type": "loss",
    "loss_agg_mode": "loss.reduction",
    "clip_ratio": "loss.clip_low",
    "clip_ratio_low": "loss.clip_low",
    "clip_ratio_high": "loss.clip_high",
    "cliprange": "loss.clip_low",
    "epsilon": "loss.clip_low",
    "epsilon_high": "loss.clip_high",
    "beta": "kl",
    "kl_coef": "kl",
    "kl_loss_coef": "kl",
    "use_kl_loss": "kl",
    "entropy_coeff": "entropy.coefficient",
    "mask_truncated_completions": "mask_truncated",
    "model_name_or_path": "model.path",
    "pretrained": "model.path",
    "train_files": "data.train",
    "train_dataset": "data.train",
    "dataset": "data.train",
    "val_files": "data.val",
    "eval_dataset": "data.val",
    "prompt_key": "data.columns.prompt",
    "reward_fn_key": "data.columns.source",
    "custom_reward_function": "reward",
    "reward_funcs": "reward",
    "reward_fn": "reward",
    "test_freq": "evaluate.every",
    "eval_steps": "evaluate.every",
    "val_before_train": "evaluate.first",
    "save_freq": "checkpoint.every",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "output_dir": "directory",
    "default_local_dir": "directory",
    "resume_from_path": "directory",
    "logger": "observe",
    "report_to": "observe",
    "project_name": "observe.wandb.project",
    "experiment_name": "observe.wandb.name",
    "run_name": "observe.wandb.name",
}
"""The last name of an option of verl or TRL, or one that is often guessed, and the option of a run that does its work.
Where the two count differently, the meaning that `etude config show` prints says how."""

SHARED = ("train", "model", "checkpoint", "directory", "observe")
"""The sections that every run has, whatever it learns from."""

KNOWN_AS_EXAMPLES: dict[str, str] = {
    **{name: option for name, option in KNOWN_AS.items() if option.split(".")[0] in SHARED},
    "train_batch_size": "batch_size",
    "per_device_train_batch_size": "batch_size",
    "micro_batch_size_per_gpu": "train.micro_tokens",
    "packing": "train.micro_tokens",
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
"""The same for runs that learn from examples."""

OF_DEMONSTRATIONS = {
    "dataset_text_field": "data.columns.text",
    "messages_key": "data.columns.messages",
    "assistant_only_loss": "data.learn",
    "completion_only_loss": "data.learn",
}
OF_DPO = {
    "beta": "loss.beta",
    "label_smoothing": "loss.label_smoothing",
    "ref_model": "reference.path",
    "ref_model_name_or_path": "reference.path",
}
OF_DISTILLATION = OF_DEMONSTRATIONS | {
    "teacher_model": "teacher.path",
    "teacher_model_name_or_path": "teacher.path",
    "beta": "loss.direction",
}
"""What only one of them has."""
