"""What the tests of losses share: an off-policy batch, a forward pass over it, and a loss with its gradient."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.algorithms.base import Loss
from etude.algorithms.reduce import Denominators
from etude.algorithms.view import Outputs, Ranks, View
from etude.batch import Batch, Column, ColumnKind
from tests.batches import random_batch

T = TypeVar("T")
Array = NDArray[np.float64]


def off_policy(seed: int = 0, sizes: Sequence[int] = (3, 1, 4), *, drift: float = 0.3) -> Batch:
    """A random batch with one advantage a rollout, of both signs, and everything that any loss needs."""
    batch = random_batch(seed, sizes, drift=drift)
    rng = np.random.default_rng(seed + 1)
    worth = torch.from_numpy(rng.choice([-1, 1], batch.num_rollouts) * rng.uniform(0.3, 2, batch.num_rollouts))
    worth[:2] = torch.tensor([1.3, -0.7])
    view = View(batch)
    teacher = torch.from_numpy(np.log(rng.dirichlet(np.ones(6), batch.num_tokens)[:, :3]))
    return batch.replace(
        advantage=view.scatter(view.rollouts.broadcast(worth), fill=float("nan")),
        chosen=torch.from_numpy(rng.random(batch.num_tokens) < 0.2),
        teacher_topk_ids=torch.zeros(batch.num_tokens, 3, dtype=torch.int64),
        teacher_topk_logp=torch.where(batch.action[:, None], teacher, float("nan")),
        trainer_version=torch.full((batch.num_rollouts,), 5),
    )


def couples(seed: int = 0, groups: int = 4) -> Batch:
    """A batch whose groups are pairs of different rewards."""
    batch = off_policy(seed, (2,) * groups)
    return batch.replace(reward=torch.from_numpy(np.random.default_rng(seed + 3).permutation(batch.num_rollouts) / 2.0))


def said(batch: Batch, seed: int = 0, *, drift: float = 0.3) -> dict[str, Tensor]:
    """What a model says of the batch: leaves that take gradients, NaN where no action is."""
    rng = np.random.default_rng(seed + 2)
    noise = torch.from_numpy(rng.normal(size=batch.num_tokens))
    student = torch.from_numpy(np.log(rng.dirichlet(np.ones(4), batch.num_tokens)))
    return {
        "logp": (batch.require("old_logp") + drift * noise).clamp(max=-1e-3),
        "value": batch.require("value") + drift * noise,
        "topk_logp": torch.where(batch.action[:, None], student, float("nan")),
        "score": torch.from_numpy(rng.normal(size=batch.num_rollouts)),
    }


def found(
    loss: Loss, batch: Batch, spoken: dict[str, Tensor], whole: Denominators | None = None
) -> tuple[float, Tensor]:
    """The loss and its gradient by the one output that it reads, at every token (or rollout)."""
    (name,) = loss.forward_outputs()
    leaf = spoken[name].detach().clone().requires_grad_()
    view = View(batch, Outputs(**{name: leaf}))
    value = loss(view, whole or Denominators.from_view(view))
    assert all(np.isfinite(number) for number in value.metrics.reduce().values())
    (gradient,) = torch.autograd.grad(value.loss, leaf)
    return float(value.loss.detach()), gradient


def found_in_parts(loss: Loss, batch: Batch, spoken: dict[str, Tensor], parts: int) -> tuple[float, Tensor]:
    """The same, summed over micro-batches."""
    (name,) = loss.forward_outputs()
    per_rollout = len(spoken[name]) == batch.num_rollouts
    kind = ColumnKind.UNIT if per_rollout else ColumnKind.TOKEN
    carried = {
        "said": Column(ColumnKind.TOKEN_K if spoken[name].ndim == 2 else kind, spoken[name].detach()),
        "place": Column(kind, torch.arange(len(spoken[name]))),
    }
    total, gradient = 0.0, torch.zeros_like(spoken[name])
    whole = Denominators.from_view(View(batch))
    pieces = batch.replace(extra={**batch.extra, **carried}).split(parts, by=loss.split_unit)
    assert len(pieces) > 1
    for piece in pieces:
        value, own = found(loss, piece, {name: piece.require("said")}, whole)
        total += value
        gradient[piece.require("place")] = own
    return total, gradient


def slope(written: Callable[[Array], float], at: Array, step: float = 1e-6) -> Array:
    """The gradient of a written formula by central differences."""
    gradient = np.zeros_like(at)
    for i in np.ndindex(at.shape):
        up, down = at.copy(), at.copy()
        up[i] += step
        down[i] -= step
        gradient[i] = (written(up) - written(down)) / (2 * step)
    return gradient


class Seat:
    """One rank among threads that meet at a barrier."""

    def __init__(self, place: int, board: list[Tensor], barrier: threading.Barrier) -> None:
        self.place, self.board, self.barrier = place, board, barrier

    def all_reduce(self, values: Tensor) -> Tensor:
        return torch.stack(self._told(values)).sum(0)

    def all_gather(self, values: Tensor) -> Tensor:
        return torch.cat(self._told(values))

    def _told(self, values: Tensor) -> list[Tensor]:
        self.board[self.place] = values
        self.barrier.wait()
        everyone = list(self.board)
        self.barrier.wait()
        return everyone


def on_ranks(shares: Sequence[Batch], work: Callable[[Batch, Ranks], T]) -> list[T]:
    """`work(share, ranks)` for every share at once, each in a thread of its own."""
    barrier, board = threading.Barrier(len(shares), timeout=20), [torch.empty(0)] * len(shares)
    results: dict[int, T] = {}

    def sit(place: int) -> None:
        results[place] = work(shares[place], Seat(place, board, barrier))

    threads = [threading.Thread(target=sit, args=(place,)) for place in range(len(shares))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[place] for place in range(len(shares))]
