"""Every option of `etude train`, as one frozen object.

The run *is* its `Algorithm`: the options that a test changes there are the options that a run trains with. The options
of other packages are nested in it: `data`, `rollout`, `train`, `reward`. This file has the options that belong to no
package, such as the length of a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from etude.algorithms import AlgorithmConfig
from etude.algorithms.algorithm import OLD_POLICY_COLUMNS
from etude.algorithms.losses.supervised import ValueLoss
from etude.config import Choice, Config
from etude.config.only_with import OnlyWith
from etude.config.resume_marks import MAY_CHANGE, SETS_LENGTH
from etude.data import DataConfig
from etude.errors import ConfigError
from etude.recipes.collect.agent_config import AgentConfig
from etude.recipes.collect.config import CollectionConfig
from etude.recipes.collect.environment import EnvConfig
from etude.recipes.collect.sampling import SamplingConfig
from etude.recipes.evaluate import EvaluationConfig
from etude.recipes.option_names.aliases import OPTION_ALIASES
from etude.recipes.option_names.verl_trl import VERL_TRL_OPTIONS
from etude.recipes.recipe import Recipe, ReferenceConfig, TeacherConfig
from etude.recipes.run.machine.placement import PlacementConfig, engine_device, gpus_of_servers, role_device
from etude.recipes.run.machine.threads import ThreadShares, share_threads
from etude.recipes.run.roles import (
    CRITIC_COLUMNS,
    MODEL_COLUMNS,
    POLICY_COLUMNS,
    REFERENCE_COLUMNS,
    TEACHER_COLUMNS,
    model_rewards,
)
from etude.records import SamplingParams
from etude.rewards import REWARDS, JudgingConfig, RewardFunction
from etude.rollout import ENGINES, RolloutConfig, ServerConfig, TorchEngineConfig
from etude.train import PolicyTrainConfig, TrainConfig

if TYPE_CHECKING:
    import torch


class CriticConfig(Config):
    """The critic, which predicts returns for advantages that subtract a value."""

    path: Path | None = Field(
        None,
        description="model directory to start from; null is the policy's. Predictions start at 0 unless the model "
        "has a score head",
    )
    warmup: int = Field(
        0,
        ge=0,
        description="first steps that train the critic only; larger gives the policy a better baseline but fewer steps",
    )
    loss: ValueLoss = Field(ValueLoss(), description="the loss between predicted values and returns")
    train: TrainConfig = Field(TrainConfig(learning_rate=1e-5), description="the critic's own optimizer and precision")


class Run(Recipe, AlgorithmConfig):
    """All options of `etude train`."""

    aliases: ClassVar[Mapping[str, str]] = OPTION_ALIASES
    verl_trl_options: ClassVar[Mapping[str, str]] = VERL_TRL_OPTIONS
    path_options: ClassVar[dict[str, str]] = Recipe.path_options | {
        "reference": "reference.path",
        "teacher": "teacher.path",
        "critic": "critic.path",
    }
    path_mappings: ClassVar[dict[str, str]] = {"teacher": "teacher.paths"}

    recipe: Literal["train"] = Field("train", description="the command that these options are for")
    reference: Annotated[
        ReferenceConfig,
        OnlyWith(
            "uses_reference",
            bool,
            "names a reference policy, and nothing here compares with one. Choose a `kl`, such as `kl=reverse`, or "
            "leave it out.",
        ),
    ] = Field(ReferenceConfig(), description="the policy that `kl` compares with")
    teacher: Annotated[
        TeacherConfig,
        OnlyWith(
            "uses_teacher",
            bool,
            "names a teacher, and this advantage uses none. Choose `advantage=distillation`, or leave it out.",
        ),
    ] = Field(TeacherConfig(), description="the model that `advantage=distillation` imitates")
    critic: Annotated[
        CriticConfig,
        OnlyWith(
            "uses_critic",
            bool,
            "has options, and this advantage uses no critic. Choose `advantage=gae`, or leave it out.",
        ),
    ] = Field(CriticConfig(), description="the value model of `advantage=gae`")
    placement: PlacementConfig = Field(PlacementConfig(), description="the device of each model")
    data: DataConfig = Field(DataConfig(), description="the tasks")
    train: PolicyTrainConfig = Field(PolicyTrainConfig(), description="the optimizer and its precision")
    env: Annotated[
        EnvConfig,
        OnlyWith(
            "env",
            lambda env: env.is_enabled or env.has_programs,
            "has options, and names neither environment nor tools: they would do nothing. Give `env.path`, "
            "`env.hub` or `env.tools`, or leave them out.",
        ),
    ] = Field(EnvConfig(), description="the environment and tools of multi-turn rollouts")
    agent: AgentConfig = Field(AgentConfig(), description="the agent that makes the rollouts, and its limits")
    reward: Annotated[RewardFunction, Choice(REWARDS)] = Field(
        REWARDS["exact_match"](),
        description="the reward of an answer; `function` calls your own, `combined` adds several, `environment` "
        "leaves it to `env`. Of an agent it judges the last answer where the agent gives no reward itself",
    )
    judging: JudgingConfig = Field(
        JudgingConfig(), description="computation of rewards, and the score of an answer that could not be judged"
    )
    sampling: SamplingConfig = Field(SamplingConfig(), description="sampling of the answers that are trained on")
    rollout: Annotated[RolloutConfig, Choice(ENGINES)] = Field(
        TorchEngineConfig(),
        description="the inference engine: `embedded` runs in this process, `vllm` and `sglang` are servers",
    )
    collect: CollectionConfig = Field(CollectionConfig(), description="the rollouts of a training step")
    evaluate: Annotated[EvaluationConfig, MAY_CHANGE] = Field(
        EvaluationConfig(), description="scoring the policy on `data.val` during training"
    )

    steps: Annotated[int, SETS_LENGTH] = Field(
        100, ge=1, description="training steps; each collects rollouts once and trains on them"
    )
    mini_batches: int = Field(
        1,
        ge=1,
        description="optimizer steps per pass over the rollouts of a step; from the second on the data is off-policy",
    )
    ppo_epochs: int = Field(
        1,
        ge=1,
        description="passes over the rollouts of a step, each of `mini_batches` optimizer steps; more reuse the data, "
        "which is then off-policy",
    )
    max_staleness: Annotated[int, MAY_CHANGE] = Field(
        0,
        ge=0,
        description="most policy versions that a rollout may be older than the weights it trains; above 0, rollouts "
        "are made while the policy trains",
    )

    allow_unbounded_ratios: Annotated[bool, MAY_CHANGE] = Field(
        False,
        description="train on stale rollouts even if nothing bounds the ratio to the policy that sampled them; such "
        "runs are known to collapse",
    )
    ess_floor: Annotated[float, MAY_CHANGE] = Field(
        0.1,
        ge=0,
        le=1,
        description="effective sample size, as a share of a step's rollouts, under which the step is warned of; larger "
        "warns earlier, 0 never",
    )

    @property
    def embedded_engine(self) -> TorchEngineConfig | None:
        return self.rollout if isinstance(self.rollout, TorchEngineConfig) else None

    @property
    def servers(self) -> ServerConfig | None:
        if not isinstance(self.rollout, ServerConfig):
            return None
        return self.rollout.model_copy(update={"devices": gpus_of_servers(self.rollout, self.own_gpus)})

    @property
    def own_gpus(self) -> int:
        """The number of GPUs that the ranks do not share with servers, if the run computes on GPUs."""
        return 0 if self.train.offload else self.ranks

    @property
    def is_episodic(self) -> bool:
        """True if rollouts may have several turns."""
        return self.has_agents or self.env.is_enabled

    @property
    def has_agents(self) -> bool:
        """True if agents make the rollouts, and not the run's own engine: those of `agent`, or of a hub."""
        return self.agent.is_enabled or self.env.has_programs

    def rewards_source(self, source: str) -> bool:
        """Return whether an agent or an environment may give rewards to the tasks of a data source."""
        return self.agent.plays(source) or self.env.rewards_source(source)

    @property
    def has_greedy_baseline(self) -> bool:
        """True if each group is compared with a greedy answer."""
        return "greedy_reward" in self.required_columns()

    def engine_device(self) -> torch.device:
        """Return the device of this process's engine."""
        return engine_device(self.placement, policy=self.compute_device(), ranks=self.ranks)

    def role_device(self, role: str, policy: torch.device) -> torch.device:
        if getattr(self.placement, role) == "policy":
            return policy
        return role_device(self.placement, role, policy=policy, engine=self.engine_device())

    def share_threads(self, total: int) -> ThreadShares:
        engine = self.embedded_engine
        if engine is None:
            return ThreadShares(total)
        return share_threads(total, engine.threads, both_compute=self.max_staleness > 0)

    def longest_row(self, room: int) -> tuple[int, str]:
        if self.has_agents:
            return room, ""
        answered = self.data.max_prompt_length + self.sampling.max_tokens
        if not self.env.is_enabled:
            return answered, "a lower `data.max_prompt_length` or `sampling.max_tokens`"
        played = self.env.longest_rollout(room)
        if not self.env.sources:
            return played, "a lower `env.max_tokens`"
        return max(played, answered), "a lower `max_tokens` in `env` and each section of `env.sources`"

    @property
    def uses_reference(self) -> bool:
        """True if the policy is compared with a reference."""
        return bool(self.required_columns() & REFERENCE_COLUMNS)

    @property
    def uses_teacher(self) -> bool:
        """True if the policy is trained on a teacher."""
        return bool(self.required_columns() & TEACHER_COLUMNS)

    @property
    def uses_critic(self) -> bool:
        """True if a critic predicts returns."""
        return bool(self.required_columns() & CRITIC_COLUMNS)

    @property
    def uses_reward_model(self) -> bool:
        """True if a model in this process computes rewards."""
        return bool(model_rewards(self.reward))

    def active_roles(self) -> frozenset[str]:
        """Return the roles that have a model in this run, besides the policy."""
        present = {
            "reference": self.uses_reference,
            "teacher": self.uses_teacher,
            "critic": self.uses_critic,
            "reward": self.uses_reward_model,
        }
        return frozenset(role for role, is_there in present.items() if is_there)

    @property
    def records_routes(self) -> bool:
        """True if the engine records the experts of each token, for the trainer to replay."""
        return self.train.router_replay == "r3"

    def training_params(self, seed: int | None = None) -> SamplingParams:
        """Return the parameters of requests whose answers are trained on."""
        alternatives = self.correction.recorded_alternatives
        return self.sampling.training_params(seed, alternatives=alternatives, routes=self.records_routes)

    def model_columns(self) -> frozenset[str]:
        """Return the columns that the policy and the auxiliary models compute before a step's estimates.

        π_old is computed even where no loss reads it, because each step compares the sampler with it. It is left out
        where μ stands in for it. It is also left out where the step's only update computes it anyway, so that no pass
        is made for it alone. The critic is trained against its earlier predictions, so its columns are included.
        """
        columns = self.required_columns() & MODEL_COLUMNS
        if self.uses_critic:
            columns |= self.critic.loss.required_columns() & CRITIC_COLUMNS
        updates = self.mini_batches * self.ppo_epochs
        single_update = updates == 1 and not columns & POLICY_COLUMNS - OLD_POLICY_COLUMNS
        if self.correction.policies != "two":
            computed_later = single_update and "old_logp" not in self.columns_before_estimate()
            columns = columns - OLD_POLICY_COLUMNS if computed_later else columns | {"old_logp"}
        needs_routes = updates > 1 or columns & POLICY_COLUMNS or self.train.balance == "loss"
        if self.train.router_replay == "r2" and needs_routes:
            columns |= {"routes"}
        return columns

    def learners(self) -> dict[str, TrainConfig]:
        return {**super().learners(), "critic.train": self.critic.train}

    @model_validator(mode="after")
    def _fits_together(self) -> Run:
        if 0 < self.steps <= self.critic.warmup:
            raise ConfigError(
                f"`critic.warmup={self.critic.warmup}` leaves none of the {self.steps} `steps` to train the policy. "
                "Lower it, or raise `steps`."
            )
        rollouts = self.collect.tasks * self.collect.group_size
        if rollouts < self.mini_batches:
            raise ConfigError(
                f"A step has {rollouts} rollouts, fewer than `mini_batches` = {self.mini_batches}. Raise "
                f"`collect.tasks` or `collect.group_size`, or lower `mini_batches`."
            )
        return self
