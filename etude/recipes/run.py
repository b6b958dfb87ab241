"""A run, whole: every option of `etude train`, as one frozen object.

It *is* its `Algorithm`: what a test flips there is what a run trains with. The rooms' own options hang below it, each
written where it acts: `data`, `rollout`, `train`, `reward`. What is here is what belongs to no room: the order of the
loop, and the length of its groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from etude.algorithms import Algorithm
from etude.chat import ChatConfig
from etude.checkpoint import CheckpointConfig
from etude.config import Choice, Config
from etude.data import Data
from etude.errors import ConfigError
from etude.observe import Observe
from etude.recipes.evaluate import Evaluation
from etude.recipes.names import KNOWN_AS
from etude.recipes.sampling import Sampling
from etude.recipes.sources import Collection
from etude.rewards import REWARDS, Judging, RewardFunction
from etude.rollout import EngineConfig
from etude.train import Train

__all__ = ["FREE", "ModelSource", "Reference", "Run"]

FREE = (
    *("steps", "directory", "observe", "evaluate", "data.val", "checkpoint", "collect.timeout", "judging.timeout"),
    *("judging.workers", "train.micro_tokens", "train.activation_checkpointing"),
    *("rollout.kv_gib", "rollout.max_running", "rollout.prefill_tokens", "rollout.prepack"),
    *("reward.at_once", "reward.prices", "reward.requests_per_minute", "reward.tokens_per_minute"),
)
"""Options that a resumed run may change: how long it is, what is scored, kept, shown and waited for, and how much
memory is used. `steps` is among them only while the schedule is constant, which does not depend on it. None changes
what is trained on, but that a timeout decides which answers fail; those of memory may change the last bits."""


class ModelSource(Config):
    """Where the policy comes from."""

    path: Path | None = Field(None, description="a Hugging Face model directory: config.json, weights, tokenizer")
    tokenizer: Path | None = Field(None, description="another directory to read the tokenizer and template from")


class Reference(Config):
    """What the policy is held to, where a KL term or an advantage compares with it."""

    path: Path | None = Field(
        None, description="a model directory; null is the model that the run begins with. Its weights never change"
    )


class Run(Algorithm):
    """Everything `etude train` needs to know."""

    known_as: ClassVar[Mapping[str, str]] = KNOWN_AS

    model: ModelSource = Field(ModelSource(), description="the policy to train")
    reference: Reference = Field(Reference(), description="the policy that `kl` compares with")
    chat: ChatConfig = Field(ChatConfig(), description="how conversations are shown to it")
    data: Data = Field(Data(), description="the tasks")
    reward: Annotated[RewardFunction, Choice(REWARDS)] = Field(
        REWARDS["exact"](),
        description="what an answer earns; `function` calls one of your own, `combined` adds several",
    )
    judging: Judging = Field(Judging(), description="how rewards are computed, and what their failures mean")
    sampling: Sampling = Field(Sampling(), description="how answers are drawn for training")
    rollout: EngineConfig = Field(EngineConfig(), description="the engine that samples")
    collect: Collection = Field(Collection(), description="which rollouts a step trains on")
    train: Train = Field(Train(), description="the optimizer and its precision")
    evaluate: Evaluation = Field(Evaluation(), description="scoring the policy on `data.val` as it learns")
    checkpoint: CheckpointConfig = Field(CheckpointConfig(), description="what is kept on disk")
    observe: Observe = Field(Observe(), description="what is shown, and where numbers go")

    seed: int = Field(0, ge=0, lt=2**63, description="what all chance in the run is derived from")
    steps: int = Field(100, ge=1, description="how often rollouts are collected and trained on")
    updates: int = Field(1, ge=1, description="optimizer steps a step; from the second on, the policy is off its data")
    epochs: int = Field(1, ge=1, description="passes over the rollouts of a step")
    threads: int | None = Field(None, ge=1, description="CPU threads that compute; null leaves it to torch")
    max_staleness: int = Field(0, ge=0, description="how many versions old a rollout may be; 0 is on-policy")
    directory: Path | None = Field(
        None, description="the run's own directory; a run that is there is taken up. By default a new one in `runs`"
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Run:
        if self.max_staleness > 0:
            raise ConfigError(
                f"`max_staleness={self.max_staleness}` asks for collecting while training, which is not built yet. "
                f"Leave it at 0."
            )
        rollouts = self.collect.tasks * self.collect.group_size
        if rollouts < self.updates:
            raise ConfigError(
                f"A step has {rollouts} rollouts, fewer than `updates` = {self.updates}. Raise `collect.tasks` or "
                f"`collect.group_size`, or lower `updates`."
            )
        return self
