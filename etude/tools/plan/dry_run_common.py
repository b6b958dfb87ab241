"""What a rehearsal tells, and how memory is known for what it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from etude.models import Model, adapt, create_empty
from etude.recipes.recipe import Recipe
from etude.tools.plan.memory_tracker import MemoryTracker
from etude.train import TrainConfig
from etude.train.optim import PRECISIONS

__all__ = [
    "MICRO_BATCHES",
    "OFFLOADED_KINDS",
    "DryRunResult",
    "build_policy",
    "label_by_optimizers",
    "loading_phase",
    "logits_labeler",
]

OFFLOADED_KINDS = frozenset({"masters", "optimizer"})
"""What is away while the engine samples, under `train.offload`."""
MICRO_BATCHES = 2
"""So many micro-batches are played, or all of an update if it has fewer: the first finds no gradient, each other one
does."""

TensorLabeler = Callable[[Tensor], str | None]


@dataclass(frozen=True)
class DryRunResult:
    """What a device was asked for."""

    tracker: MemoryTracker
    model: Model
    """The policy, without numbers."""
    kv_tokens: int
    """How many tokens the engine's cache holds; 0 where none samples here."""
    max_concurrency: int
    """How many answers are drawn at once, at most."""
    row: tuple[int, int]
    """How long a prompt and its answer may be."""


def build_policy(run: Recipe) -> Model:
    """The model of a run, as it is trained: its weights are nobody's. Where they are divided, it is made as it is when
    it is loaded."""
    assert run.model.path is not None, "a plan is of a model"
    dtype, keep_float32 = PRECISIONS[run.train.precision], run.train.weights == "divided"
    model = create_empty(run.model.path, dtype=dtype, head=run.head, keep_float32=keep_float32)
    if run.lora.is_enabled:
        model = adapt(model, run.lora, seed=run.seed)
    if run.model.freeze:
        model.freeze(run.model.freeze)
    return model


def loading_phase(tracker: MemoryTracker, *trained: TrainConfig) -> AbstractContextManager[None]:
    """Within, models are loaded that are trained so, and their learners made: a phase where weights are divided, which
    is when they are whole for a moment."""
    return tracker.phase("loading") if any(train.weights == "divided" for train in trained) else nullcontext()


@contextmanager
def label_by_optimizers(tracker: MemoryTracker, model: Model) -> Iterator[None]:
    """What an optimizer steps on says what it is: gradients, moments, and the weights that are kept beside a half-
    precision copy."""
    model_storages = {weight.untyped_storage()._cdata for weight in model.parameters()}

    def before_step(optimizer: Any, *_: object) -> None:
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        tracker.label((w.grad for w in weights if w.grad is not None), "gradients")
        masters = [w for w in weights if w.untyped_storage()._cdata not in model_storages]
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
    """Tells what is as wide as a vocabulary, and what has the form of the head: a gradient on its way. A head that
    scores is nothing to be told by."""
    head = tuple(model.head_weight.shape)
    if model.has_score_head:
        return lambda _: None

    def label(tensor: Tensor) -> str | None:
        shape = tuple(tensor.shape)
        if shape == head:
            return "gradients"
        return "logits" if len(shape) == 2 and shape[1] == head[0] and tensor.is_floating_point() else None

    return label
