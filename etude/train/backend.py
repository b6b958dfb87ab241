"""The part of a learner that knows where its weights are: one device, or the shards of many.

Learner   objectives, micro-batches, metrics, versions: the same for every engine
Backend   forward and backward passes, the optimizer, the weights, their state
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from etude.algorithms.view import Ranks
from etude.batch import Batch
from etude.checkpoint import TensorTree
from etude.models import Model
from etude.train.forward import ForwardResult
from etude.train.optim import StepResult

__all__ = ["Backend"]


class Backend(Protocol):
    """The weights of one model, as an engine holds them. All ranks make the same calls in the same order."""

    model: Model
    ranks: Ranks
    """The ranks that hold the other rollouts of a batch."""
    ranks_per_rollout: int
    """The number of ranks that compute the same rollouts."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of forward passes."""
        ...

    @property
    def same_passes(self) -> bool:
        """True if every rank makes as many passes as the others, because each pass exchanges weights."""
        ...

    def micro_pass(self, wanted: frozenset[str], *, backward: bool) -> AbstractContextManager[None]:
        """Frame one micro-batch, of which these outputs are computed. Every rank enters it equally often.

        A rank without a micro-batch computes nothing inside; what the others need from it is then done at the end.
        """
        ...

    def forward(self, batch: Batch, wanted: frozenset[str], *, observations: bool = False) -> ForwardResult:
        """Compute these outputs of a micro-batch."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a micro-batch's loss."""
        ...

    def zero_grad(self) -> None:
        """Drop every gradient."""
        ...

    def step(self, learning_rate: float) -> StepResult:
        """Clip the gradient and update the weights. A gradient that is not finite changes no weight."""
        ...

    @property
    def scale(self) -> float:
        """The factor on the loss; 1 except with fp16."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each weight whole, in the dtype of forward passes. If ranks make the same passes, each consumes all of
        them, and they are copies."""
        ...

    def merged_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each weight of the equal model without adapters, as `weights` does."""
        ...

    def adapter_weights(self) -> dict[str, Tensor]:
        """Return the adapters' weights whole, in the dtype of forward passes. All ranks call it together."""
        ...

    def state(self) -> TensorTree:
        """Return what the next update depends on: the tensors themselves."""
        ...

    def refresh(self) -> None:
        """Make the weights of forward passes follow a state that was written into."""
        ...

    def offloadable_tensors(self) -> list[Tensor]:
        """The tensors that only an optimizer step needs."""
        ...

    def assemble(self) -> None:
        """Make the model's own weights whole until the next update, for an engine that shares them."""
        ...

    def disperse(self) -> None:
        """Release the whole weights that `assemble` made."""
        ...

    def exchange_seconds(self) -> float | None:
        """Return the seconds of waiting for other ranks since the last call; None if they are not measured."""
        ...
