"""The result of a dry run, and the labels of its kinds of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import register_optimizer_step_pre_hook

from etude.checkpoint import TensorTree, flat
from etude.models import Head, Model, adapt, create_empty
from etude.models.loading import create_on_meta
from etude.recipes.recipe import Recipe
from etude.tools.plan.fake_tensors import use_fake_tensors
from etude.tools.plan.memory_trace import MemoryTrace
from etude.tools.plan.memory_tracker import MemoryTracker
from etude.train import TrainConfig
from etude.train.backend import HeldModel
from etude.train.optim import PRECISIONS, local_part
from etude.train.sharded_loading import create_shards

OFFLOADED_KINDS = frozenset({"masters", "optimizer"})
"""The kinds that `train.offload` moves to the CPU while the engine samples."""
MICRO_BATCHES = 2
"""The number of micro-batches in a dry run: the first allocates the gradients, and the second adds to them."""

TensorLabeler = Callable[[Tensor], str | None]


@dataclass(frozen=True)
class Depth:
    """The number of layers of a model."""

    built: int
    """The layers that a dry run builds."""
    total: int


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

    @cached_property
    def model(self) -> Model:
        """The policy with all its layers, as it is trained, without memory."""
        path, dtype = self.run.model.path, PRECISIONS[self.run.train.precision]
        assert path is not None, "a plan is of a model"
        with use_fake_tensors(MemoryTracker()):  # new adapters have memory
            return _choose_trained(self.run, create_on_meta(path, dtype=dtype, head=self.run.head))


def build_policy(run: Recipe, mesh: DeviceMesh | None, layers: Layers = ALL_LAYERS) -> HeldModel:
    """Build the model of a run as it is trained, with empty weights."""
    assert run.model.path is not None, "a plan is of a model"
    dtype, prepare = PRECISIONS[run.train.precision], partial(_choose_trained, run)
    return build_model(run.model.path, dtype, mesh, layers, head=run.head, prepare=prepare)


def _choose_trained(run: Recipe, model: Model) -> Model:
    """Return the policy with its adapters, or with its frozen parts."""
    if run.lora.is_enabled:
        model = adapt(model, run.lora, seed=run.seed)
    if run.model.freeze:
        model.freeze(run.model.freeze)
    return model


def build_frozen(path: Path, dtype: torch.dtype, mesh: DeviceMesh | None, layers: Layers = ALL_LAYERS) -> HeldModel:
    """Build a model that is never trained, with empty weights."""

    def freeze(model: Model) -> Model:
        for weight in model.parameters():
            weight.requires_grad_(False)
        return model

    return build_model(path, dtype, mesh, layers, prepare=freeze)


def build_model(
    path: Path,
    dtype: torch.dtype,
    mesh: DeviceMesh | None,
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


def copy_for_save(tensors: TensorTree) -> list[Tensor]:
    """Return memory for the copy of a learner's state that a save in the background writes."""
    local = [local_part(tensor) for tensor in flat(tensors).values()]
    return [torch.empty_like(part, device="cpu", pin_memory=part.device.type == "cuda") for part in local]


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
