"""What a rehearsal tells, and how memory is known for what it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from etude.models import Model, adapt, outlined
from etude.recipes.recipe import Recipe
from etude.tools.ledger import Ledger
from etude.train import Train
from etude.train.optim import PRECISIONS

__all__ = ["AT_REST", "FULL", "Rehearsed", "loading", "named_by_optimizers", "policy", "wide"]

AT_REST = frozenset({"masters", "optimizer"})
"""What is away while the engine samples, under `train.offload`."""
FULL = 2
"""So many micro-batches are played, or all of an update if it has fewer: the first finds no gradient, each other one
does."""

Named = Callable[[Tensor], str | None]


@dataclass(frozen=True)
class Rehearsed:
    """What a device was asked for."""

    ledger: Ledger
    model: Model
    """The policy, without numbers."""
    held: int
    """How many tokens the engine's cache holds; 0 where none samples here."""
    at_once: int
    """How many answers are drawn at once, at most."""
    row: tuple[int, int]
    """How long a prompt and its answer may be."""


def policy(run: Recipe) -> Model:
    """The model of a run, as it is trained: its weights are nobody's. Where they are divided, it is made as it is when
    it is loaded."""
    assert run.model.path is not None, "a plan is of a model"
    dtype, exact = PRECISIONS[run.train.precision], run.train.weights == "divided"
    model = outlined(run.model.path, dtype=dtype, head=run.head, exact=exact)
    if run.lora.on:
        model = adapt(model, run.lora, seed=run.seed)
    if run.model.freeze:
        model.freeze(run.model.freeze)
    return model


def loading(ledger: Ledger, *trained: Train) -> AbstractContextManager[None]:
    """Within, models are loaded that are trained so, and their learners made: a phase where weights are divided, which
    is when they are whole for a moment."""
    return ledger.phase("loading") if any(train.weights == "divided" for train in trained) else nullcontext()


@contextmanager
def named_by_optimizers(ledger: Ledger, model: Model) -> Iterator[None]:
    """What an optimizer steps on says what it is: gradients, moments, and the weights that are kept beside a half-
    precision copy."""
    computed = {weight.untyped_storage()._cdata for weight in model.parameters()}

    def about_to_step(optimizer: Any, *_: object) -> None:
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        ledger.name((w.grad for w in weights if w.grad is not None), "gradients")
        beside = [w for w in weights if w.untyped_storage()._cdata not in computed]
        ledger.name((w for w in beside if ledger.kind(w) == "optimizer"), "masters")
        for weight in weights:
            ledger.name((kept for kept in optimizer.state[weight].values() if isinstance(kept, Tensor)), "optimizer")

    handle = register_optimizer_step_pre_hook(about_to_step)
    try:
        yield
    finally:
        handle.remove()


def wide(model: Model) -> Named:
    """Tells what is as wide as a vocabulary, and what has the form of the head: a gradient on its way. A head that
    scores is nothing to be told by."""
    head = tuple(model.head_weight.shape)
    if model.scores:
        return lambda _: None

    def named(tensor: Tensor) -> str | None:
        shape = tuple(tensor.shape)
        if shape == head:
            return "gradients"
        return "logits" if len(shape) == 2 and shape[1] == head[0] and tensor.is_floating_point() else None

    return named
