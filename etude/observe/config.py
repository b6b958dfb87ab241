"""The options of a run's output: the console, the log level, and the metric trackers."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from etude.observe.log import LogLevel

ConsoleStyle = Literal["auto", "rich", "plain", "off"]


class WandbConfig(BaseModel):
    """The options of Weights & Biases."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: Literal["disabled", "offline", "online"] = Field(
        default="disabled",
        description="disabled: no W&B; offline: write to the run directory, for `wandb sync`; online: send during the "
        "run (needs WANDB_API_KEY or an earlier `wandb login`)",
    )
    project: str = Field(default="etude", min_length=1, description="W&B project of the run")
    entity: str | None = Field(default=None, description="W&B user or team; null is the one of the key")
    name: str | None = Field(default=None, description="name of the run in W&B; null is the name of the run")


class MlflowConfig(BaseModel):
    """The options of MLflow."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enabled: bool = Field(default=False, description="log to MLflow")
    uri: str | None = Field(
        default=None,
        description="tracking URI: http://…, file:///…, or sqlite:///… with the full mlflow package; null is `mlruns` "
        "in the run directory. MLflow displays such a folder only with MLFLOW_ALLOW_FILE_STORE=true",
    )
    experiment: str = Field(default="etude", min_length=1, description="MLflow experiment of the run")


class ObserveConfig(BaseModel):
    """The options of a run's output. `metrics.jsonl` is always written too."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    console: ConsoleStyle = Field(
        default="auto",
        description="rich: a line per step and a progress bar; plain: lines only; off: log messages only (see `level`)"
        "; auto: rich on a terminal, plain elsewhere",
    )
    level: LogLevel = Field(default="info", description="lowest level of log messages to print")
    every: int = Field(
        default=1,
        ge=1,
        description="write metrics every n steps, as means and sums over these steps; larger gives fewer lines; a "
        "saved checkpoint writes them too",
    )
    rollouts: int = Field(
        default=0,
        ge=0,
        le=100,
        description="rollouts of a step in the trackers' table, from the best to the worst; 0 makes no table",
    )
    tensorboard: bool = Field(
        default=False, description="write TensorBoard events to `tensorboard` in the run directory"
    )
    wandb: WandbConfig = Field(default_factory=WandbConfig, description="Weights & Biases")
    mlflow: MlflowConfig = Field(default_factory=MlflowConfig, description="MLflow")

    @property
    def has_tracker(self) -> bool:
        """True if TensorBoard, W&B or MLflow is on."""
        return self.tensorboard or self.wandb.mode != "disabled" or self.mlflow.enabled
