"""A run, whole: every option of `etude train`, as one frozen object.

It *is* its `Algorithm`: what a test flips there is what a run trains with. The rooms' own options hang below it, each
written where it acts: `data`, `rollout`, `train`, `reward`. What is here is what belongs to no room: the order of the
loop, and the length of its groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from etude.algorithms import AlgorithmConfig
from etude.algorithms.losses.supervised import ValueLoss
from etude.config import Choice, Config
from etude.data import DataConfig
from etude.errors import ConfigError
from etude.recipes.collect.agent_rollouts import AgentConfig
from etude.recipes.collect.config import CollectionConfig
from etude.recipes.collect.environment import EnvConfig
from etude.recipes.collect.sampling import SamplingConfig
from etude.recipes.evaluate import EvaluationConfig
from etude.recipes.recipe import Recipe, ReferenceConfig, TeacherConfig
from etude.recipes.run.option_aliases import OPTION_ALIASES
from etude.recipes.run.placement import PlacementConfig
from etude.recipes.run.verl_trl_options import VERL_TRL_OPTIONS
from etude.rewards import REWARDS, JudgingConfig, RewardFunction
from etude.rollout import ENGINES, RolloutConfig, TorchEngineConfig
from etude.train import TrainConfig

__all__ = ["CHANGEABLE_OPTIONS", "CriticConfig", "Run"]

CHANGEABLE_OPTIONS = (
    *("steps", "directory", "observe", "evaluate", "data.val", "checkpoint", "collect.timeout", "judging.timeout"),
    *(
        "judging.workers",
        "train.max_tokens_per_micro_batch",
        "train.activation_checkpointing",
        "train.compile",
        "train.offload",
    ),
    *("critic.train.max_tokens_per_micro_batch", "critic.train.activation_checkpointing"),
    *("train.weights", "critic.train.weights"),
    *("critic.train.compile", "critic.train.offload", "ranks", "mesh", "cluster", "device", "crew.heartbeat_timeout"),
    "crew.timeout",
    *("rollout.kv_gib", "rollout.max_num_seqs", "rollout.max_num_batched_tokens", "rollout.prepack", "lora.publish"),
    *("rollout.url", "rollout.api_key_env", "rollout.python", "rollout.replicas", "rollout.tensor_parallel"),
    *("rollout.nodes", "rollout.rendezvous"),
    *(
        "rollout.devices",
        "rollout.gpu_memory_utilization",
        "rollout.max_waiting",
        "rollout.start_timeout",
        "rollout.restarts",
    ),
    *("rollout.weight_transport", "rollout.bucket_mib", "rollout.running", "rollout.update_timeout", "rollout.address"),
    "rollout.adapters",
    *("env.timeout", "env.max_concurrency", "placement.layout", "placement.reference", "placement.teacher"),
    *("placement.critic", "placement.reward"),
    *(
        "agent.strategy",
        "agent.runners",
        "agent.max_concurrency",
        "agent.timeout",
        "agent.heartbeat_timeout",
        "agent.runner_timeout",
    ),
    *("agent.max_calls", "agent.listen", "agent.store"),
    *("reward.max_concurrency", "reward.prices", "reward.requests_per_minute", "reward.tokens_per_minute"),
)
"""Options that a resumed run may change: how long it is, what is scored, kept, shown and waited for, how much memory
is used, and by how many processes. `steps` is among them only while every schedule is constant, and so does not depend
on it. None changes what is trained on, but that a timeout decides which answers fail; those of memory and processes may
change the last bits."""


class CriticConfig(Config):
    """Who foresees what will be earned, for advantages that compare with that."""

    path: Path | None = Field(
        None,
        description="a model directory to begin from; null is the policy's. What it foresees begins at 0, unless it "
        "has a score head",
    )
    warmup: int = Field(0, ge=0, description="steps at the beginning in which the critic learns and the policy rests")
    loss: ValueLoss = Field(ValueLoss(), description="how it is brought to the returns")
    train: TrainConfig = Field(TrainConfig(learning_rate=1e-5), description="its own optimizer and precision")


class Run(Recipe, AlgorithmConfig):
    """Everything `etude train` needs to know."""

    aliases: ClassVar[Mapping[str, str]] = OPTION_ALIASES
    verl_trl_options: ClassVar[Mapping[str, str]] = VERL_TRL_OPTIONS
    changeable: ClassVar[tuple[str, ...]] = CHANGEABLE_OPTIONS
    path_options: ClassVar[dict[str, str]] = Recipe.path_options | {
        "reference": "reference.path",
        "teacher": "teacher.path",
        "critic": "critic.path",
    }

    recipe: Literal["train"] = Field("train", description="the command that these options are for")
    reference: ReferenceConfig = Field(ReferenceConfig(), description="the policy that `kl` compares with")
    teacher: TeacherConfig = Field(TeacherConfig(), description="the policy that `advantage=distillation` learns from")
    critic: CriticConfig = Field(CriticConfig(), description="what `advantage=gae` compares with")
    placement: PlacementConfig = Field(PlacementConfig(), description="which device each model is on")
    data: DataConfig = Field(DataConfig(), description="the tasks")
    env: EnvConfig = Field(EnvConfig(), description="whom it speaks with, where a rollout is more than one answer")
    agent: AgentConfig = Field(AgentConfig(), description="who plays rollouts, where an agent does")
    reward: Annotated[RewardFunction, Choice(REWARDS)] = Field(
        REWARDS["exact"](),
        description="what an answer earns; `function` calls one of your own, `combined` adds several, `environment` "
        "leaves it to `env`",
    )
    judging: JudgingConfig = Field(
        JudgingConfig(), description="how rewards are computed, and what their failures mean"
    )
    sampling: SamplingConfig = Field(SamplingConfig(), description="how answers are drawn for training")
    rollout: Annotated[RolloutConfig, Choice(ENGINES)] = Field(
        TorchEngineConfig(),
        description="what samples: `embedded` is an engine in this process, `vllm` and `sglang` are servers",
    )
    collect: CollectionConfig = Field(CollectionConfig(), description="which rollouts a step trains on")
    evaluate: EvaluationConfig = Field(EvaluationConfig(), description="scoring the policy on `data.val` as it learns")

    steps: int = Field(100, ge=1, description="how often rollouts are collected and trained on")
    mini_batches: int = Field(
        1, ge=1, description="optimizer steps a step; from the second on, the policy is off its data"
    )
    ppo_epochs: int = Field(1, ge=1, description="passes over the rollouts of a step")
    max_staleness: int = Field(0, ge=0, description="how many versions old a rollout may be; 0 is on-policy")

    def schedules(self) -> dict[str, str]:
        """The policy's and the critic's."""
        return {**super().schedules(), "critic.train.lr_scheduler": self.critic.train.lr_scheduler}

    @model_validator(mode="after")
    def _fits_together(self) -> Run:
        if self.max_staleness > 0:
            raise ConfigError(
                f"`max_staleness={self.max_staleness}` asks for collecting while training, which is not built yet. "
                f"Leave it at 0."
            )
        if 0 < self.steps <= self.critic.warmup:
            raise ConfigError(
                f"`critic.warmup={self.critic.warmup}` leaves the policy none of the {self.steps} `steps` to learn in. "
                f"Shorten it, or ask for more steps."
            )
        rollouts = self.collect.tasks * self.collect.group_size
        if rollouts < self.mini_batches:
            raise ConfigError(
                f"A step has {rollouts} rollouts, fewer than `mini_batches` = {self.mini_batches}. Raise "
                f"`collect.tasks` or `collect.group_size`, or lower `mini_batches`."
            )
        return self
