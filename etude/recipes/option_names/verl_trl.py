"""The tables of the pages for users of verl and TRL: a name there, and the option here that does its work.

Both pages show these tables, and a test holds them equal. Text in backticks is code; a value without any is the name of
an option.
"""

from __future__ import annotations

from collections.abc import Mapping

VERL: Mapping[str, str] = {
    "data.train_files": "data.train",
    "data.val_files": "data.val",
    "data.prompt_key": "data.columns.prompt",
    "data.reward_fn_key": "data.columns.source",
    "data.train_batch_size": "collect.tasks",
    "data.max_prompt_length": "data.max_prompt_length",
    "data.max_response_length": "sampling.max_tokens",
    "data.filter_overlong_prompts": "`data.overlong=filter`, which is the default",
    "data.truncation": "`data.overlong=truncate` or `data.overlong=error`",
    "data.shuffle": "`data.sampler=shuffled` or `data.sampler=sequential`",
    "data.seed": "`seed`, for all chance in a run",
    "data.custom_cls": "`data.train=[my_tasks:rows]`: a function that returns rows",
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "`train.activation_checkpointing=full`",
    "actor_rollout_ref.model.enable_activation_offload": "`train.activation_checkpointing=offload`",
    "actor_rollout_ref.actor.optim.lr": "train.learning_rate",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": "train.warmup_steps",
    "actor_rollout_ref.actor.optim.lr_scheduler_type": "train.lr_scheduler",
    "actor_rollout_ref.actor.optim.weight_decay": "train.weight_decay",
    "actor_rollout_ref.actor.grad_clip": "train.max_grad_norm",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "`mini_batches`: how many, not how large",
    "actor_rollout_ref.actor.ppo_epochs": "ppo_epochs",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "train.max_tokens_per_micro_batch",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "train.max_tokens_per_micro_batch",
    "actor_rollout_ref.actor.clip_ratio": "`loss.clip_low=0.2 loss.clip_high=0.2`",
    "actor_rollout_ref.actor.clip_ratio_low": "loss.clip_low",
    "actor_rollout_ref.actor.clip_ratio_high": "loss.clip_high",
    "actor_rollout_ref.actor.clip_ratio_c": "loss.dual_clip",
    "actor_rollout_ref.actor.loss_agg_mode": "loss.reduction",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "`loss`: `loss=gspo`, `loss=clip_cov`, …",
    "actor_rollout_ref.actor.policy_loss.flash_reinforce_kl_threshold": "`loss=flash_reinforce loss.threshold=0.001`",
    "actor_rollout_ref.actor.entropy_coeff": "entropy.coefficient",
    "actor_rollout_ref.actor.use_kl_loss": "`kl=reverse`",
    "actor_rollout_ref.actor.kl_loss_coef": "`kl=reverse kl.coefficient=0.001`",
    "actor_rollout_ref.actor.kl_loss_type": (
        "`kl`, named by its gradient: what verl calls `low_var_kl` (k3) is `kl=forward`; k2 and full are "
        "`kl=reverse` and `kl=full`"
    ),
    "actor_rollout_ref.actor.fsdp_config.model_dtype": "train.precision",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": "train.max_tokens_per_micro_batch",
    "actor_rollout_ref.rollout.name": "`rollout`: `rollout=vllm`, `rollout=sglang`, or the embedded engine",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "`rollout=vllm rollout.tensor_parallel=2`",
    "actor_rollout_ref.rollout.n": "collect.group_size",
    "actor_rollout_ref.rollout.temperature": "sampling.temperature",
    "actor_rollout_ref.rollout.gpu_memory_utilization": (
        "`rollout.kv_gib`, in GiB for keys and values; of a server, `rollout=vllm rollout.gpu_memory_utilization=0.5`"
    ),
    "actor_rollout_ref.rollout.max_num_seqs": "rollout.max_num_seqs",
    "actor_rollout_ref.rollout.max_num_batched_tokens": "rollout.max_num_batched_tokens",
    "actor_rollout_ref.rollout.val_kwargs.n": "evaluate.samples",
    "actor_rollout_ref.rollout.val_kwargs.temperature": "evaluate.sampling.temperature",
    "actor_rollout_ref.rollout.val_kwargs.top_p": "evaluate.sampling.top_p",
    "algorithm.adv_estimator": "`advantage`: `advantage=gae`, `advantage=grpo`, `advantage=rloo`, …",
    "algorithm.gamma": "`advantage=gae advantage.gamma=1.0`",
    "algorithm.lam": "`advantage=gae advantage.lam=0.95`",
    "algorithm.norm_adv_by_std_in_grpo": "`advantage=dr_grpo`, which is without",
    "algorithm.use_kl_in_reward": "`kl=in_reward`",
    "algorithm.kl_ctrl.kl_coef": "`kl=in_reward kl.coefficient=0.001`",
    "algorithm.kl_ctrl.type": (
        "`kl=in_reward kl.controller=adaptive kl.controller.target=0.1 kl.controller.horizon=10000`"
    ),
    "algorithm.filter_groups.enable": "`collect.refill=10`",
    "algorithm.filter_groups.metric": "`collect.metric`: the part of the reward that groups are compared by",
    "algorithm.rollout_correction.rollout_is": "`correction.weight=truncate correction.level=token`",
    "algorithm.rollout_correction.bypass_mode": "`correction.policies=two`",
    "critic.model.path": "`advantage=gae critic.path=my-critic`",
    "critic.optim.lr": "`advantage=gae critic.train.learning_rate=1e-5`",
    "critic.cliprange_value": "`advantage=gae critic.loss.clip=0.2`",
    "critic.grad_clip": "`advantage=gae critic.train.max_grad_norm=1.0`",
    "critic.ppo_micro_batch_size_per_gpu": "`advantage=gae critic.train.max_tokens_per_micro_batch=16384`",
    "trainer.critic_warmup": "`advantage=gae critic.warmup=10`",
    "custom_reward_function.path": "`reward=function reward.path=my_reward.py:score`",
    "custom_reward_function.name": "`reward=function reward.path=my_reward.py:score`: the word after the colon",
    "reward_model.reward_manager": "`reward`: `reward=gsm8k`, `reward=math`, …",
    "reward_model.overlong_buffer.len": "`overlong.max_length=8192 overlong.buffer=4096`",
    "reward.num_workers": "judging.workers",
    "actor_rollout_ref.actor.strategy": "`train.engine`: fsdp is FSDP2, by default for several ranks",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": "mesh.context",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": "mesh.tensor",
    "actor_rollout_ref.actor.fsdp_config.fsdp_size": "`mesh.replicas`: copies of the shards",
    "trainer.n_gpus_per_node": "`ranks`: training processes, one for each GPU",
    "trainer.nnodes": "`cluster=ray ranks=16`: processes on all nodes of a Ray cluster",
    "trainer.total_training_steps": "steps",
    "trainer.total_epochs": "`steps`: a step asks `collect.tasks` rows",
    "trainer.test_freq": "evaluate.every",
    "trainer.val_before_train": "evaluate.first",
    "trainer.save_freq": "checkpoint.every",
    "trainer.max_actor_ckpt_to_keep": "checkpoint.keep",
    "actor_rollout_ref.actor.checkpoint.async_save": "checkpoint.async_save",
    "trainer.default_local_dir": "directory",
    "trainer.resume_mode": "`directory`: a run that is there is taken up; or `etude train --resume RUN`",
    "trainer.logger": "`observe.tensorboard`, `observe.wandb.mode`, `observe.mlflow.enabled`",
    "trainer.project_name": "observe.wandb.project",
    "trainer.experiment_name": "observe.wandb.name",
}
"""The full verl names of the options of a run."""

TRL: Mapping[str, str] = {
    "model_name_or_path": "model.path",
    "output_dir": "directory",
    "num_generations": "collect.group_size",
    "per_device_train_batch_size": "`collect.tasks`: tasks, not answers",
    "gradient_accumulation_steps": "train.max_tokens_per_micro_batch",
    "steps_per_generation": "mini_batches",
    "num_iterations": "ppo_epochs",
    "max_steps": "steps",
    "num_train_epochs": "`steps`: a step asks `collect.tasks` rows",
    "max_prompt_length": "data.max_prompt_length",
    "max_completion_length": "sampling.max_tokens",
    "temperature": "sampling.temperature",
    "learning_rate": "train.learning_rate",
    "lr_scheduler_type": "train.lr_scheduler",
    "warmup_steps": "train.warmup_steps",
    "weight_decay": "train.weight_decay",
    "adam_beta1": "train.betas",
    "max_grad_norm": "train.max_grad_norm",
    "bf16": "`train.precision=bf16`, the default on a GPU",
    "gradient_checkpointing": "`train.activation_checkpointing=full`",
    "activation_offloading": "`train.activation_checkpointing=offload`",
    "beta": (
        "`kl=forward kl.coefficient=0.04`: TRL's penalty is k3, which is named here by its gradient; `kl=reverse` is k2"
    ),
    "epsilon": "`loss.clip_low=0.2 loss.clip_high=0.2`",
    "epsilon_high": "loss.clip_high",
    "delta": "loss.dual_clip",
    "loss_type": (
        "`loss` and `loss.reduction`: TRL's `grpo` is `loss.reduction=seq-mean-token-mean`, `dapo` is "
        "`loss.reduction=token-mean`, `dr_grpo` is `loss.reduction=seq-mean-token-sum-norm "
        "loss.norm_length=1024`"
    ),
    "use_vllm": "`rollout=vllm`",
    "vllm_mode": "`rollout=vllm`, which starts servers; `rollout=vllm rollout.url=[http://host:8000]` joins one",
    "vllm_gpu_memory_utilization": "`rollout=vllm rollout.gpu_memory_utilization=0.5`",
    "vllm_tensor_parallel_size": "`rollout=vllm rollout.tensor_parallel=2`",
    "importance_sampling_level": "`loss=gspo` for sequences",
    "scale_rewards": (
        "`advantage=grpo` by the group, `advantage=batch_std` by the batch, `advantage=dr_grpo` not at all"
    ),
    "multi_objective_aggregation": "`advantage=gdpo`, which normalizes each part first",
    "mask_truncated_completions": "mask_truncated",
    "top_entropy_quantile": "`entropy.top_share=0.2`, which trains on a fifth",
    "entropy_coef": "entropy.coefficient",
    "vllm_importance_sampling_correction": "`correction.weight=truncate`",
    "off_policy_mask_threshold": "correction.opsm_delta",
    "eval_steps": "evaluate.every",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "report_to": "`observe.tensorboard`, `observe.wandb.mode`, `observe.mlflow.enabled`",
    "run_name": "observe.wandb.name",
    "log_completions": "`observe.rollouts=8`, the rollouts of a step that trackers get",
    "seed": "seed",
    "reward_model_path": "`reward`: what judges an answer",
    "sft_model_path": "model.path",
    "cliprange": "`loss.clip_low=0.2 loss.clip_high=0.2`",
    "cliprange_value": "`advantage=gae critic.loss.clip=0.2`",
    "gamma": "`advantage=gae advantage.gamma=1.0`",
    "lam": "`advantage=gae advantage.lam=0.95`",
    "whiten_rewards": "`advantage=gae advantage.whiten=true`: the advantages, not the rewards",
    "kl_coef": "`kl=in_reward kl.coefficient=0.05`",
    "num_mini_batches": "mini_batches",
    "num_ppo_epochs": "ppo_epochs",
    "rloo_k": "`advantage=rloo collect.group_size=4`",
}
"""The full TRL names of the options of a run."""

VERL_TRL_OPTIONS: Mapping[str, str] = {**VERL, **TRL}
"""Both tables; no name is in both."""
