"""The options that every run has: a model, an optimizer, a directory, logging and checkpoints.

A recipe is a command and its options, one frozen tree. Options of only one recipe are in that recipe's file. Options
here mean the same in all of them, so directories, resumption and export share their code.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PrivateAttr, field_validator, model_validator

from etude.chat import ChatConfig
from etude.checkpoint import CheckpointConfig, ProcessorFiles
from etude.config import Config
from etude.config.name_rules import NameRules
from etude.config.resume_marks import MAY_CHANGE
from etude.data import DataFiles
from etude.dispatch import ClusterBackend, CrewConfig
from etude.errors import ConfigError
from etude.models import Head, LoraAdapterConfig, VisionConfig
from etude.observe import ObserveConfig
from etude.recipes.option_names.rules import OPTION_RULES
from etude.recipes.run.machine.device import select_device
from etude.recipes.run.machine.threads import ThreadShares, rank_threads
from etude.train import MeshConfig, TrainConfig

if TYPE_CHECKING:
    import torch

    from etude.rollout import ServerConfig, TorchEngineConfig


class ModelSource(Config):
    """The source of the policy."""

    path: Path | None = Field(
        None,
        description="a Hugging Face model directory with config.json, weights and tokenizer; or a model name "
        "on the hub",
    )
    tokenizer: Path | None = Field(
        None, description="another directory with the tokenizer and the chat template; null is the model's"
    )
    freeze: tuple[str, ...] = Field(
        (), description="parts that are not trained, such as embed_tokens or layers.0; they need no optimizer state"
    )


class ReferenceConfig(Config):
    """The reference model that the policy is compared with."""

    path: Path | None = Field(
        None, description="a model directory; null is the model that the run begins with. Its weights never change"
    )


class TeacherConfig(Config):
    """The teacher model that the policy imitates, or the teacher of each data source."""

    path: Path | None = Field(None, description="a model directory of the policy's tokenizer; its weights never change")
    paths: dict[str, Path] = Field(
        {},
        description="instead of `path`, the teacher of each data source, by the source's name",
    )

    @property
    def is_given(self) -> bool:
        """True if there is a teacher."""
        return self.path is not None or bool(self.paths)

    @model_validator(mode="after")
    def _is_given_one_way(self) -> Self:
        if self.path is not None and self.paths:
            raise ConfigError(
                f"`teacher.path={self.path}` is the teacher of all tasks, and `teacher.paths` has one for each data "
                "source. Give one of them."
            )
        return self


class Recipe(Config):
    """The options that every run has."""

    option_rules: ClassVar[NameRules] = OPTION_RULES
    sections_elsewhere: ClassVar[Mapping[str, str]] = {
        "launch": "It describes a job, for `etude launch slurm`. Leave it out here."
    }
    """Sections of another command, with a sentence about them."""
    path_options: ClassVar[dict[str, str]] = {
        "model": "model.path",
        "tokenizer": "model.tokenizer",
        "adapter": "lora.path",
        "template": "chat.template",
    }
    """Options with paths of files, by the role of the files in the run. A run is identified by the contents of the
    files, and not by their paths."""
    path_mappings: ClassVar[dict[str, str]] = {}
    """The same for options with several paths by name."""
    head: ClassVar[Head] = "language"
    """The head on the model's hidden states."""

    model: ModelSource = Field(ModelSource(), description="the model to train")
    lora: LoraAdapterConfig = Field(
        LoraAdapterConfig(), description="low-rank adapters, trained instead of the model's weights"
    )
    chat: ChatConfig = Field(ChatConfig(), description="rendering of conversations for the model")
    vision: VisionConfig = Field(VisionConfig(), description="images, for a model that takes them")
    data: DataFiles = Field(DataFiles(), description="the training data")
    train: TrainConfig = Field(TrainConfig(), description="the optimizer and its precision")
    checkpoint: Annotated[CheckpointConfig, MAY_CHANGE] = Field(CheckpointConfig(), description="checkpoints on disk")
    observe: Annotated[ObserveConfig, MAY_CHANGE] = Field(
        ObserveConfig(), description="the console, and the trackers that get metrics"
    )

    device: Annotated[Literal["auto", "cpu", "cuda"], MAY_CHANGE] = Field(
        "auto", description="device that computes; auto is a GPU for each rank if torch reaches any, else the CPU"
    )
    seed: int = Field(0, ge=0, lt=2**63, description="seed of all randomness in the run")
    ranks: Annotated[int, MAY_CHANGE] = Field(
        1, ge=1, description="training processes that share the work, usually one per GPU"
    )
    mesh: Annotated[MeshConfig, MAY_CHANGE] = Field(
        MeshConfig(), description="number of ranks that work on the same rollouts, and their division of the work"
    )
    cluster: Annotated[ClusterBackend, MAY_CHANGE] = Field(
        "local",
        description="local: ranks are processes of this machine; ray: ranks are Ray actors, on the cluster of "
        "RAY_ADDRESS or on one started for the run",
    )
    crew: CrewConfig = Field(CrewConfig(), description="time limits of ranks: to be silent, and to wait for each other")
    threads: int | None = Field(
        None, ge=1, description="CPU threads of each process; null divides torch's default among ranks"
    )
    directory: Annotated[Path | None, MAY_CHANGE] = Field(
        None, description="the run's directory; a run in it is resumed. By default a new one in `runs`"
    )
    recipe: str = Field(description="the command that these options are for")
    _preset: str = PrivateAttr("")

    @property
    def preset(self) -> str:
        """The name of the preset that it was composed from; empty if there was none."""
        return self._preset

    def with_preset(self, preset: Path | None) -> Self:
        """Return the same run, which names the file of its preset."""
        run = self.model_copy()
        run._preset = "" if preset is None else preset.stem
        return run

    @property
    def in_process(self) -> bool:
        """True if the only rank trains in the controller's own process."""
        return self.ranks == 1 and self.cluster == "local" and self.train.choose_engine(1) == "local"

    @property
    def embedded_engine(self) -> TorchEngineConfig | None:
        """The options of the engine that samples in the processes of ranks; None if none does."""
        return None

    @property
    def servers(self) -> ServerConfig | None:
        """The options of the servers that sample, with their GPUs if the run computes on GPUs; None without servers."""
        return None

    @property
    def policy_head(self) -> Head:
        """The head by which the model is loaded: that of the recipe, with or without a vision tower."""
        return "seeing" if self.vision.tower else self.head

    @property
    def trains_tower(self) -> bool:
        """True if the vision tower of a model that takes images is trained too."""
        return self.vision.train

    @property
    def max_pixels(self) -> int | None:
        """The most pixels that an image is resized to; None is the limit of the model's image processor."""
        return self.vision.max_pixels

    @property
    def processor_files(self) -> ProcessorFiles | None:
        """The image processor of the run's model, as exports have it; of a model of text, no files."""
        return None if self.model.path is None else ProcessorFiles(self.model.path, self.max_pixels)

    def compute_device(self) -> torch.device:
        """Return the device of this process, as one of the run's ranks or the only one."""
        return select_device(self.device, ranks=self.ranks, cluster=self.cluster)

    def role_device(self, role: str, policy: torch.device) -> torch.device:  # noqa: ARG002
        """Return the device of a role's model in the process whose policy is on this one."""
        return policy

    def rank_threads(self) -> int:
        """Return the number of processor threads of each rank."""
        return rank_threads(self.threads, self.ranks)

    def trainer_threads(self) -> int:
        """Return the number of processor threads that the trainer of a rank computes with."""
        total = self.rank_threads()
        return self.share_threads(total).trainer if self.compute_device().type == "cpu" else total

    def share_threads(self, total: int) -> ThreadShares:
        """Divide the threads of a rank that computes on the CPU among what computes there."""
        return ThreadShares(total)

    def describe_threads(self) -> str:
        """Return the numbers of threads of each rank, as its inputs record them; empty where a GPU computes.

        Call it before the run's models are built, which takes the engine's threads from those of this process.
        """
        return str(self.share_threads(self.rank_threads())) if self.compute_device().type == "cpu" else ""

    def path_at(self, option: str) -> Path | None:
        """Return the path that an option holds, by the option's dotted path."""
        value = self._value_at(option)
        assert value is None or isinstance(value, Path), f"`{option}` names no place"
        return value

    def paths_at(self, option: str) -> Mapping[str, Path]:
        """Return the paths that an option holds by name, by the option's dotted path."""
        value = self._value_at(option)
        assert isinstance(value, dict), f"`{option}` names no places"
        return value

    def _value_at(self, option: str) -> Any:
        value: Any = self
        for name in option.split("."):
            value = getattr(value, name)
        return value

    def learners(self) -> dict[str, TrainConfig]:
        """Return the options of each trained model, by their path."""
        return {"train": self.train}

    def schedules(self) -> dict[str, str]:
        """Return the learning-rate schedule of each trained model, by its option."""
        return {f"{path}.lr_scheduler": train.lr_scheduler for path, train in self.learners().items()}

    @property
    def length_may_change(self) -> bool:
        """True if the results of the run are independent of its length: all schedules are constant."""
        return set(self.schedules().values()) == {"constant"}

    @abstractmethod
    def longest_row(self, room: int) -> tuple[int, str]:
        """Return the most tokens of a row that is trained on, and a change that lowers it; empty if no option does.

        room: the most tokens that model and engine have room for.
        """

    def double_length_option(self, steps: int) -> str:
        """Return the option, with its value, that makes a run of `steps` twice as long."""
        return f"steps={2 * steps}"

    @field_validator("recipe", mode="before")
    @classmethod
    def _is_of_this_command(cls, value: Any) -> Any:
        """Refuse options of another command."""
        expected = cls.model_fields["recipe"].default
        if value != expected:
            raise ConfigError(f"These options are of `etude {value}`, and this is `etude {expected}`: give them there.")
        return value

    @model_validator(mode="after")
    def _ranks_are_meshes(self) -> Self:
        self.mesh.check_ranks(self.ranks)
        if self.train.engine == "local" and self.ranks > 1:
            raise ConfigError(
                f"`train.engine=local` trains on one rank, and `ranks={self.ranks}`. Choose `train.engine=fsdp`, which "
                "shards the weights over ranks, or leave it out."
            )
        return self

    @model_validator(mode="after")
    def _trains_one_way(self) -> Self:
        if self.lora.is_enabled and self.model.freeze:
            raise ConfigError(
                "`model.freeze` chooses among the weights of a model that is trained itself, and with `lora` adapters "
                "are trained in their place. Leave it out; `lora.targets` chooses what gets an adapter."
            )
        return self
