"""What a run shows and where it sends its numbers."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from etude.observe.log import LogLevel

__all__ = ["ConsoleStyle", "MlflowConfig", "ObserveConfig", "WandbConfig"]

ConsoleStyle = Literal["auto", "rich", "plain", "off"]


class WandbConfig(BaseModel):
    """Weights & Biases."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: Literal["disabled", "offline", "online"] = Field(
        default="disabled",
        description="disabled: not used; offline: written into the run directory, to be sent with `wandb sync`; "
        "online: sent as the run goes (needs WANDB_API_KEY or `wandb login` beforehand: nothing is asked)",
    )
    project: str = Field(default="etude", min_length=1, description="the W&B project the run belongs to")
    entity: str | None = Field(default=None, description="the W&B user or team; by default, the one of the key")
    name: str | None = Field(default=None, description="the run's name in W&B; by default, the name of the run")


class MlflowConfig(BaseModel):
    """MLflow."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enabled: bool = Field(default=False, description="log to MLflow")
    uri: str | None = Field(
        default=None,
        description="tracking URI (http://…, file:///…; sqlite:///… where all of mlflow is installed); by default, the "
        "folder `mlruns` of the run directory (MLflow shows such a folder when MLFLOW_ALLOW_FILE_STORE=true is set)",
    )
    experiment: str = Field(default="etude", min_length=1, description="the MLflow experiment the run belongs to")


class ObserveConfig(BaseModel):
    """How a run is watched. Besides what is chosen here, `metrics.jsonl` is always written."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    console: ConsoleStyle = Field(
        default="auto",
        description="rich: a line per step and a live progress bar; plain: lines only; off: neither, only what is said "
        "in words, which has its own `level`; auto: rich on a terminal, plain elsewhere",
    )
    level: LogLevel = Field(default="info", description="the least serious log message that is shown")
    every: int = Field(
        default=1,
        ge=1,
        description="write the metrics of each n steps together, means and sums over all; a save ends a line too",
    )
    tensorboard: bool = Field(
        default=False, description="write TensorBoard events to `tensorboard` in the run directory"
    )
    wandb: WandbConfig = Field(default_factory=WandbConfig, description="Weights & Biases")
    mlflow: MlflowConfig = Field(default_factory=MlflowConfig, description="MLflow")
