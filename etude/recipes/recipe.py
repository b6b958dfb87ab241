"""What every run has, whatever it learns from: a model, an optimizer, a directory, and how it is watched and kept.

A recipe is a command and its options, one frozen tree. What belongs to one of them alone hangs in its own file; what
is here means the same in all, and so a directory, a resumption and an export are the same code for each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from etude.chat import ChatConfig
from etude.checkpoint import CheckpointConfig
from etude.config import Config
from etude.data import DataFiles
from etude.dispatch import ClusterBackend, CrewConfig
from etude.errors import ConfigError
from etude.models import Head, LoraAdapterConfig
from etude.observe import ObserveConfig
from etude.train import MeshConfig, TrainConfig

__all__ = ["ModelSource", "Recipe", "ReferenceConfig", "TeacherConfig"]


class ModelSource(Config):
    """Where the policy comes from."""

    path: Path | None = Field(
        None, description="a Hugging Face model directory: config.json, weights, tokenizer; or its name on the hub"
    )
    tokenizer: Path | None = Field(None, description="another directory to read the tokenizer and template from")
    freeze: tuple[str, ...] = Field(
        (), description="parts that stay as they are, such as embed_tokens or layers.0; they cost no optimizer state"
    )


class ReferenceConfig(Config):
    """What the policy is held to, where it is compared with another."""

    path: Path | None = Field(
        None, description="a model directory; null is the model that the run begins with. Its weights never change"
    )


class TeacherConfig(Config):
    """Whom the policy imitates."""

    path: Path | None = Field(None, description="a model directory of the policy's tokenizer; its weights never change")


class Recipe(Config):
    """The options that every run has."""

    changeable: ClassVar[tuple[str, ...]]
    """Options that a resumed run may change."""
    length_options: ClassVar[tuple[str, ...]] = ("steps",)
    """Those of the free ones that say how long it is: they may change only while no schedule depends on them."""
    path_options: ClassVar[dict[str, str]] = {
        "model": "model.path",
        "tokenizer": "model.tokenizer",
        "adapter": "lora.path",
        "template": "chat.template",
    }
    """Options that say where files lie, by what the files are to the run: it is known by what they hold."""
    head: ClassVar[Head] = "language"
    """What its model has on its hidden states."""

    model: ModelSource = Field(ModelSource(), description="the model to train")
    lora: LoraAdapterConfig = Field(
        LoraAdapterConfig(), description="low-rank adapters, trained in place of the model's weights"
    )
    chat: ChatConfig = Field(ChatConfig(), description="how conversations are shown to it")
    data: DataFiles = Field(DataFiles(), description="what it learns from")
    train: TrainConfig = Field(TrainConfig(), description="the optimizer and its precision")
    checkpoint: CheckpointConfig = Field(CheckpointConfig(), description="what is kept on disk")
    observe: ObserveConfig = Field(ObserveConfig(), description="what is shown, and where numbers go")

    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="what computes; auto is a GPU for each rank, where torch reaches any, else the processor"
    )
    seed: int = Field(0, ge=0, lt=2**63, description="what all chance in the run is derived from")
    ranks: int = Field(1, ge=1, description="processes that share the work, each with the whole model")
    mesh: MeshConfig = Field(MeshConfig(), description="how many ranks work on the same rollouts, and divide that how")
    cluster: ClusterBackend = Field(
        "local",
        description="where ranks are: local is processes of this machine; ray is actors, one each, of the Ray that "
        "RAY_ADDRESS names, or of one that is started here and ends with the run",
    )
    crew: CrewConfig = Field(CrewConfig(), description="how long they may be silent, and wait for each other")
    threads: int | None = Field(
        None, ge=1, description="CPU threads that compute in each process; null shares out what torch would take"
    )
    directory: Path | None = Field(
        None, description="the run's own directory; a run that is there is taken up. By default a new one in `runs`"
    )
    recipe: str = Field(description="the command that these options are for")

    def schedules(self) -> dict[str, str]:
        """The schedule of each model that learns, by its option."""
        return {"train.lr_scheduler": self.train.lr_scheduler}

    def double_length_option(self, steps: int) -> str:
        """The option, with its value, that asks for as much again as a run of so many steps has done."""
        return f"steps={2 * steps}"

    @field_validator("recipe", mode="before")
    @classmethod
    def _is_of_this_command(cls, value: Any) -> Any:
        """Options of another command are another run's."""
        expected = cls.model_fields["recipe"].default
        if value != expected:
            raise ConfigError(f"These options are of `etude {value}`, and this is `etude {expected}`: give them there.")
        return value

    @model_validator(mode="after")
    def _ranks_are_meshes(self) -> Self:
        self.mesh.check_ranks(self.ranks)
        return self

    @model_validator(mode="after")
    def _trains_one_way(self) -> Self:
        if self.lora.is_enabled and self.model.freeze:
            raise ConfigError(
                "`model.freeze` chooses among the weights of a model that is trained itself, and with `lora` adapters "
                "are trained in their place. Leave it out; `lora.targets` chooses what gets an adapter."
            )
        return self
