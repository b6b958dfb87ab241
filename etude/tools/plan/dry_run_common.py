"""The shared parts of the dry runs: building models, naming phases and kinds of memory, and the result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from etude.batch import Batch
from etude.checkpoint import flat
from etude.images.pixel_cache import PixelCache
from etude.models import Head, Model, create_empty
from etude.models.loading import create_on_meta
from etude.models.shapes import LayerSizes
from etude.models.transformers_backbone import decoder_layers
from etude.recipes.recipe import Recipe, TeacherConfig
from etude.recipes.run.builders import auxiliary_models
from etude.recipes.run.builders.policy import choose_trained
from etude.recipes.workers.checkpointed import CheckpointedWorker
from etude.tools.plan.fake_tensors import use_fake_tensors
from etude.tools.plan.memory_tracker import MemoryTrace, MemoryTracker, TensorLabeler
from etude.tools.plan.worst_images import WorstImages
from etude.train import FrozenModel, ScoringModel, TrainConfig
from etude.train.backend import HeldModel, model_of
from etude.train.device_mesh import ShardMeshes
from etude.train.optim import PRECISIONS, local_part
from etude.train.sharded_loading import create_shards

OFFLOADED_KINDS = frozenset({"masters", "optimizer"})
"""The kinds that `train.offload` moves to the CPU while the engine samples."""
R = TypeVar("R", bound=Recipe)
MICRO_BATCHES = 2
"""The number of micro-batches in a dry run: the first allocates the gradients, and the second adds to them."""


@dataclass(frozen=True)
class Depth:
    """The number of layers of a model."""

    built: int
    """The layers that a dry run builds."""
    total: int
    period: int
    """Layer i + period is like layer i."""
    start: int = 0
    """The layers at the start that do not repeat."""

    def extend(self, sizes: LayerSizes) -> LayerSizes:
        """Return the sizes of all layers, from those of the layers that are built."""
        return sizes.repeated(self.total, self.period, self.start)


Layers = Mapping[Path, Depth]
"""The number of layers of each model directory; a dry run builds all layers of one that is not here."""
ALL_LAYERS: Layers = {}


@dataclass(frozen=True)
class DryRunResult:
    """The memory of a device during a dry run."""

    memory: MemoryTrace
    run: Recipe
    kv_tokens: int
    """The capacity of the engine's KV cache, in tokens; 0 without an engine on this device."""
    max_concurrency: int
    """The most answers that are sampled at the same time."""
    row: tuple[int, int]
    """The longest prompt and the longest answer, in tokens."""
    depth: Depth | None = None
    """The number of the policy's layers; None if the dry run built all of them."""

    @cached_property
    def model(self) -> Model:
        """The policy with all its layers, as it is trained, without memory."""
        path, dtype = self.run.model.path, PRECISIONS[self.run.train.precision]
        assert path is not None, "a plan is of a model"
        with use_fake_tensors(MemoryTracker()):  # new adapters have memory
            model = create_on_meta(path, dtype=dtype, head=self.run.policy_head)
            model = _choose_trained(self.run)(model)
            layers = None if self.depth is None else self.depth.built
            sizes = create_empty(path, dtype=dtype, head=self.run.policy_head, layers=layers).sizes
        return model.with_sizes(sizes if self.depth is None else self.depth.extend(sizes))


@dataclass(frozen=True)
class Setting:
    """The setting of a dry run."""

    tracker: MemoryTracker
    fake_device: AbstractContextManager[Any]
    """A context in which tensors report the planned device."""
    roles: frozenset[str]
    """The models that have memory on the device."""
    layers: Layers
    real: bool = False
    """True for real tensors."""


class DryRun(ABC, Generic[R]):
    """The dry run of one kind of run."""

    def __init__(self, run: R, setting: Setting, changes: Mapping[str, Any]) -> None:
        """changes: the options besides `train` that have other values in the dry run."""
        self.requested = run
        self.setting = setting
        self.tracker = setting.tracker
        self.run = run.model_copy(update={"train": dry_run_options(run.train), **changes})
        self.mesh = auxiliary_models.build_mesh(run)
        with self.tracker.labeled_as("weights" if "policy" in setting.roles else None):
            self.held = build_policy(run, self.mesh, setting.layers)
        self.policy = model_of(self.held)
        self.images: WorstImages | None = None
        """The images of each prompt, of a model that takes some."""
        self.kept_alive: list[object] = []
        """Tensors that stay allocated during all later phases."""

    @property
    def pixels(self) -> PixelCache | None:
        """The pixels of the images of prompts."""
        return None if self.images is None else self.images.pixels

    @property
    def path(self) -> Path:
        """The directory of the policy."""
        assert self.run.model.path is not None, "a plan is of a model"
        return self.run.model.path

    @abstractmethod
    def execute(self) -> DryRunResult:
        """Execute each phase once."""

    @contextmanager
    def phase(self, name: str, model: Model) -> Iterator[None]:
        """Run a phase of the model on the planned device. New tensors in the block are activations, or logits."""
        labeled = self.tracker.labeled_as("activations", logits_labeler(model))
        with self.setting.fake_device, self.tracker.phase(name), labeled:
            yield

    def frozen(self, role: str, path: Path | None, temperature: float = 1.0) -> FrozenModel:
        """Build the reference or the teacher, by default from the policy's directory. The reference may be the policy
        without its adapters."""
        max_tokens = self.run.train.max_tokens_per_micro_batch
        if role == "reference" and path is None and self.run.lora.rank:
            return FrozenModel(self.held, max_tokens, disable_adapters=True, pixels=self.pixels)
        with self.tracker.labeled_as(role):
            dtype = PRECISIONS[self.run.train.precision]
            model = build_model(path or self.path, dtype, self.mesh, self.setting.layers, prepare=_freeze)
        pixels = self.pixels if model_of(model).has_vision else None
        return FrozenModel(model, max_tokens, temperature=temperature, pixels=pixels)

    def teachers(self, teacher: TeacherConfig, temperature: float = 1.0) -> Teachers:
        """Build the teacher, or those of all data sources."""
        paths: list[Path | None] = list(dict.fromkeys(teacher.paths.values()))
        models = {path: self.frozen("teacher", path, temperature) for path in paths or [teacher.path]}

        def size(path: Path | None) -> int:
            depth = None if path is None else self.setting.layers.get(path)
            return _weight_bytes(models[path].model, depth)

        for path in sorted(models, key=size)[:-1]:
            self.tracker.label(map(local_part, models[path].model.parameters()), "other teachers")
        return Teachers(list(models.values()))

    def prepare_update(self, worker: CheckpointedWorker) -> None:
        """Set the requested checkpointing, and allocate the copy of the state that a save in the background writes."""
        self.policy.activation_checkpointing = self.requested.train.activation_checkpointing
        if self.run.checkpoint.async_save:
            with self.setting.fake_device, self.tracker.labeled_as("copy"):
                for part in map(local_part, flat(worker.tensors()).values()):
                    is_pinned = part.device.type == "cuda"
                    self.kept_alive.append(torch.empty_like(part, device="cpu", pin_memory=is_pinned))


class Teachers(ScoringModel):
    """The teachers of a run. Each computes the whole batch, because all tasks of a step may be of its data source."""

    def __init__(self, models: Sequence[FrozenModel]) -> None:
        self.models = models

    @property
    def vocab_size(self) -> int:
        return min(model.vocab_size for model in self.models)

    def logp(self, batch: Batch) -> Tensor:
        for model in self.models:
            logp = model.logp(batch)
        return logp

    def top_tokens(self, batch: Batch, count: int, among: int) -> tuple[Tensor, Tensor]:
        for model in self.models:
            top = model.top_tokens(batch, count, among)
        return top


def _weight_bytes(model: Model, depth: Depth | None) -> int:
    """Return the bytes of a model's weights with all its layers. depth: the number of them, if not all are built."""
    total = sum(local_part(weight).nbytes for weight in model.parameters())
    if depth is None:
        return total
    layers = decoder_layers(model.module, model.num_layers)
    in_layers = sum(local_part(weight).nbytes for layer in layers for weight in layer.parameters())
    return total + in_layers * (depth.total - depth.built) // depth.built


def build_policy(run: Recipe, mesh: ShardMeshes | None, layers: Layers = ALL_LAYERS) -> HeldModel:
    """Build the model of a run as it is trained, with empty weights."""
    assert run.model.path is not None, "a plan is of a model"
    dtype = PRECISIONS[run.train.precision]
    return build_model(run.model.path, dtype, mesh, layers, head=run.policy_head, prepare=_choose_trained(run))


def _choose_trained(run: Recipe) -> Callable[[Model], Model]:
    """Return the function that attaches adapters to a run's model and freezes parts."""
    return partial(choose_trained, lora=run.lora, freeze=run.model.freeze, tower=run.trains_tower, seed=run.seed)


def _freeze(model: Model) -> Model:
    for weight in model.parameters():
        weight.requires_grad_(False)
    return model


def build_model(
    path: Path,
    dtype: torch.dtype,
    mesh: ShardMeshes | None,
    layers: Layers,
    *,
    head: Head = "language",
    prepare: Callable[[Model], Model] = lambda model: model,
) -> HeldModel:
    """Build a model that computes in this dtype, with empty weights: whole without a mesh, else one rank's shards."""
    count = layers[path].built if path in layers else None
    if mesh is None:
        return prepare(create_empty(path, dtype=dtype, head=head, layers=count))
    model = prepare(create_on_meta(path, dtype=dtype, head=head, layers=count))
    sharded = create_shards(model, mesh, dtype, torch.device("cpu"))
    with torch.no_grad():
        for weight in model.parameters():  # memory without values may hold numbers that are not finite
            local_part(weight).normal_(std=0.02)
    return sharded


def dry_run_options(train: TrainConfig) -> TrainConfig:
    """Return the options of a learner of fake tensors, which is built on the CPU and runs without a compiler.

    Offloaded tensors are subtracted when the peak is read. The model gets the option of offloaded activations.
    """
    offloads = train.activation_checkpointing == "offload"
    changes = {"offload": False, "compile": False} | ({"activation_checkpointing": "full"} if offloads else {})
    return train.model_copy(update=changes)


@contextmanager
def label_by_optimizers(tracker: MemoryTracker, model: Model) -> Iterator[None]:
    """Label gradients, optimizer states and float32 master weights when an optimizer steps, from its parameters."""
    model_storages = {local_part(weight).untyped_storage()._cdata for weight in model.parameters()}

    def before_step(optimizer: Any, *_: object) -> None:
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        tracker.label((w.grad for w in weights if w.grad is not None), "gradients")
        masters = [w for w in weights if local_part(w).untyped_storage()._cdata not in model_storages]
        tracker.label((w for w in masters if tracker.kind_of(w) == "optimizer"), "masters")
        for weight in weights:
            tracker.label(
                (state for state in optimizer.state[weight].values() if isinstance(state, Tensor)), "optimizer"
            )

    handle = register_optimizer_step_pre_hook(before_step)
    try:
        yield
    finally:
        handle.remove()


def logits_labeler(model: Model) -> TensorLabeler:
    """Return a labeler: tensors as wide as the vocabulary are logits, tensors of the head's shape are its gradients.

    A scoring head is too small to distinguish them, and labels none.
    """
    head = tuple(model.head_weight.shape)
    if model.has_score_head:
        return lambda _: None

    def label(tensor: Tensor) -> str | None:
        shape = tuple(tensor.shape)
        if shape == head:
            return "gradients"
        return "logits" if len(shape) == 2 and shape[1] == head[0] and tensor.is_floating_point() else None

    return label
