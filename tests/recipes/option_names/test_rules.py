"""Option names of other trainers, answered by their words."""

from __future__ import annotations

import re

import pytest
from pydantic import BaseModel

from etude.config.compose import compose
from etude.config.foreign_names import has_option
from etude.errors import UnknownKeyError
from etude.recipes.option_names.rules import OPTION_RULES, PATTERNS
from etude.recipes.registry import SUPERVISED
from etude.recipes.run.config import Run
from tests.sweeps import sweep

CODE = re.compile(r"`([^`]*)`")
NOT_NEEDED = "and none is needed"
ANSWERED = {
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": "`train.warmup_steps`: a number of updates",
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": "train.max_tokens_per_micro_batch",
    "actor_rollout_ref.rollout.val_kwargs.top_k": "evaluate.sampling.top_k",
    "actor_rollout_ref.rollout.enable_prefix_caching": NOT_NEEDED,
    "critic.optim.lr_warmup_steps": "critic.train.warmup_steps",
    "critic.strategy": "`critic.train.engine`",
    "reward_model.model.path": "`reward=reward_model reward.path=my-judge`",
    "data.val_max_samples": "evaluate.limit",
    "eval_strategy": "evaluate.every",
    "logging_steps": "observe.every",
    "warmup_ratio": "`train.warmup_steps`",
    "load_best_model_at_end": NOT_NEEDED,
    "vllm_server_host": "`rollout=vllm rollout.url=[http://host:8000]`",
    "n_samples_per_prompt": "collect.group_size",
    "n_samples_per_eval_prompt": "evaluate.samples",
    "generate_max_len": "sampling.max_tokens",
    "prompt_max_len": "data.max_prompt_length",
    "critic_learning_rate": "critic.train.learning_rate",
    "value_lr": "critic.train.learning_rate",
    "checkpoint.top_k": "checkpoint.keep",
    "eps_clip_low_high": "loss.clip_low and loss.clip_high",
    "num_rollout": "steps",
    "num_steps_per_rollout": "mini_batches",
    "rollout_num_gpus_per_engine": "`rollout=vllm rollout.devices=[2,3]`",
    "orchestrator.max_off_policy_steps": "max_staleness",
    "orchestrator.eval.interval": "evaluate.every",
    "trainer.model.cp": "mesh.context",
    "trainer.optim.max_norm": "train.max_grad_norm",
    "inference.parallel.tp": "`rollout=vllm rollout.tensor_parallel=2`",
    "grpo.num_prompts_per_step": "collect.tasks",
    "grpo.async_grpo.max_trajectory_age_steps": "max_staleness",
    "loss_fn.ratio_clip_max": "loss.clip_high",
    "checkpointing.keep_top_k": "checkpoint.keep",
    "policy.dtensor_cfg.cpu_offload": "train.offload",
    "policy.generation.stop_strings": "sampling.stop",
    "cluster.gpus_per_node": "`ranks`",
    "trainer.ref.model.path": "reference.path",
    "trainer.policy_mini_batch_size": "`mini_batches`",
    "trainer.eval_before_train": "evaluate.first",
    "generator.eval_sampling_params.temperature": "evaluate.sampling.temperature",
    "generator.max_num_batched_tokens": "rollout.max_num_batched_tokens",
    "presence_penalty": NOT_NEEDED,
    "pipeline_parallel_size": "`mesh.tensor` and `mesh.replicas`",
    "expert_parallel_size": "mesh.expert",
    "logger.wandb.name": "observe.wandb.name",
    "actor_rollout_ref.rollout.seed": "seed",
    "reward_weights": "`reward=combined`, each part of which has a `weight`",
}


@sweep(("name", "answer"), list(ANSWERED.items()))
def test_a_name_is_answered_by_its_last_parts_and_by_their_words(name: str, answer: str) -> None:
    with pytest.raises(UnknownKeyError) as refused:
        compose(Run, [f"{name}=1"])
    sentence = f"{name} is not an option, " if answer == NOT_NEEDED else f"{name} is not an option; here it is "
    assert f"{sentence}{answer}" in str(refused.value)


@pytest.mark.parametrize(
    "name",
    [
        *("rpo_alpha", "revision", "local_rank", "f_divergence_type", "greater_is_better", "tf32", "max_async_tasks"),
        *(
            "trainer.val_only",
            "trainer.max_critic_ckpt_to_keep",
            "reward_model.lr",
            "judge.temperature",
            "actor_rollout_ref.actor.profiler.x",
        ),
    ],
)
def test_a_name_that_is_merely_similar_is_not_hinted(name: str) -> None:
    with pytest.raises(UnknownKeyError) as refused:
        compose(Run, [f"{name}=1"])
    message = str(refused.value)
    assert "here it is" not in message and "Did you mean" not in message
    assert message.endswith("No option has a name like it: `etude config show` prints all."), "no list of all sections"


def test_all_names_in_a_section_of_another_trainer_are_answered_together() -> None:
    with pytest.raises(UnknownKeyError) as refused:
        compose(Run, ["trainer.ckpt.interval=1", "trainer.ckpt.color=1"])
    message = str(refused.value)
    assert "trainer.ckpt.interval is not an option; here it is checkpoint.every." in message
    assert "trainer.ckpt.color is not an option." in message


def test_a_command_is_answered_with_its_own_options() -> None:
    for given, answer in (("train_batch_size", "batch_size"), ("num_epochs", "epochs"), ("max_len", "data.max_tokens")):
        with pytest.raises(UnknownKeyError, match=f"{given} is not an option; here it is {answer}"):
            compose(SUPERVISED["sft"], [f"{given}=1"])


def test_every_pattern_answers_the_name_that_it_spells() -> None:
    for pattern, answer in PATTERNS.items():
        name = "_".join(item.split("|")[0] for item in pattern.split() if not item.endswith("?"))
        assert OPTION_RULES.find_answers(name) == [answer], pattern


def test_every_answer_names_existing_options() -> None:
    roots: list[type[BaseModel]] = [Run, *SUPERVISED.values()]
    for pattern, answer in PATTERNS.items():
        for part in answer.split(" | "):
            codes = CODE.findall(part) or ([] if part.startswith("nothing: ") else part.split(" and "))
            words = [
                word
                for code in codes
                if not code.startswith(("etude ", "system", "low_var_kl"))
                for word in code.split()
            ]
            for name in (word.partition("=")[0] for word in words):
                assert name == "weight" or any(has_option(root, name) for root in roots), (pattern, name)
