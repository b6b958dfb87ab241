"""Helpers for the tests of losses: an off-policy batch, a forward pass over it, and a loss with its gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.algorithms.base import Loss
from etude.algorithms.reduce import Denominators
from etude.algorithms.view import Outputs, View
from etude.batch import Batch, Column, ColumnKind
from tests.batches import random_batch

T = TypeVar("T")
Array = NDArray[np.float64]


def off_policy(seed: int = 0, sizes: Sequence[int] = (3, 1, 4), *, drift: float = 0.3) -> Batch:
    """Return a random batch with every column that a loss needs. Each rollout has one advantage; both signs occur."""
    batch = random_batch(seed, sizes, drift=drift)
    rng = np.random.default_rng(seed + 1)
    advantage = torch.from_numpy(rng.choice([-1, 1], batch.num_rollouts) * rng.uniform(0.3, 2, batch.num_rollouts))
    advantage[:2] = torch.tensor([1.3, -0.7])
    view = View(batch)
    teacher = torch.from_numpy(np.log(rng.dirichlet(np.ones(6), batch.num_tokens)[:, :3]))
    return batch.replace(
        advantage=view.scatter(view.rollouts.broadcast(advantage), fill=float("nan")),
        chosen=torch.from_numpy(rng.random(batch.num_tokens) < 0.2),
        teacher_topk_ids=torch.zeros(batch.num_tokens, 3, dtype=torch.int64),
        teacher_topk_logp=torch.where(batch.action[:, None], teacher, float("nan")),
        trainer_version=torch.full((batch.num_rollouts,), 5),
    )


def preference_pairs(seed: int = 0, groups: int = 4) -> Batch:
    """Return a batch whose groups are pairs with different rewards."""
    batch = off_policy(seed, (2,) * groups)
    return batch.replace(reward=torch.from_numpy(np.random.default_rng(seed + 3).permutation(batch.num_rollouts) / 2.0))


def model_outputs(batch: Batch, seed: int = 0, *, drift: float = 0.3) -> dict[str, Tensor]:
    """Return a model's outputs for the batch: leaves with gradients, NaN at context tokens."""
    rng = np.random.default_rng(seed + 2)
    noise = torch.from_numpy(rng.normal(size=batch.num_tokens))
    student = torch.from_numpy(np.log(rng.dirichlet(np.ones(4), batch.num_tokens)))
    return {
        "logp": (batch.require("old_logp") + drift * noise).clamp(max=-1e-3),
        "value": batch.require("value") + drift * noise,
        "topk_logp": torch.where(batch.action[:, None], student, float("nan")),
        "score": torch.from_numpy(rng.normal(size=batch.num_rollouts)),
    }


def loss_and_gradient(
    loss: Loss, batch: Batch, outputs: dict[str, Tensor], denominators: Denominators | None = None
) -> tuple[float, Tensor]:
    """Return the loss and its gradient by the one output that it reads, for each token (or rollout)."""
    (name,) = loss.forward_outputs()
    leaf = outputs[name].detach().clone().requires_grad_()
    view = View(batch, Outputs(**{name: leaf}))
    value = loss(view, denominators or Denominators.from_view(view))
    assert all(np.isfinite(number) for number in value.metrics.reduce().values())
    (gradient,) = torch.autograd.grad(value.loss, leaf)
    return float(value.loss.detach()), gradient


def summed_over_parts(loss: Loss, batch: Batch, outputs: dict[str, Tensor], parts: int) -> tuple[float, Tensor]:
    """Return the loss and its gradient, summed over micro-batches."""
    (name,) = loss.forward_outputs()
    per_rollout = len(outputs[name]) == batch.num_rollouts
    kind = ColumnKind.UNIT if per_rollout else ColumnKind.TOKEN
    extra = {
        "output": Column(ColumnKind.TOKEN_K if outputs[name].ndim == 2 else kind, outputs[name].detach()),
        "index": Column(kind, torch.arange(len(outputs[name]))),
    }
    total, gradient = 0.0, torch.zeros_like(outputs[name])
    denominators = Denominators.from_view(View(batch))
    pieces = batch.replace(extra={**batch.extra, **extra}).split(parts, by=loss.split_unit)
    assert len(pieces) > 1
    for piece in pieces:
        value, part_gradient = loss_and_gradient(loss, piece, {name: piece.require("output")}, denominators)
        total += value
        gradient[piece.require("index")] = part_gradient
    return total, gradient


def finite_differences(formula: Callable[[Array], float], at: Array, step: float = 1e-6) -> Array:
    """Return the gradient of a formula by central differences."""
    gradient = np.zeros_like(at)
    for i in np.ndindex(at.shape):
        up, down = at.copy(), at.copy()
        up[i] += step
        down[i] -= step
        gradient[i] = (formula(up) - formula(down)) / (2 * step)
    return gradient
