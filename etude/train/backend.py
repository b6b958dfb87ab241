"""The part of a learner that knows where its weights are: one device, or the shards of many.

Learner   objectives, micro-batches, metrics, versions: the same for every engine
Backend   forward and backward passes, the optimizer, the weights, their state
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch
from torch import Tensor

from etude.algorithms.view import Ranks
from etude.batch import Batch
from etude.models import Model
from etude.train.balance_loss import BalanceLoss
from etude.train.forward import ForwardResult
from etude.train.optim import WeightOptimizer

if TYPE_CHECKING:
    from etude.train.fsdp import ShardedModel

HeldModel: TypeAlias = "Model | ShardedModel"
"""A model as an engine holds it: whole, or this rank's shards of it."""


def model_of(held: HeldModel) -> Model:
    """Return the model itself. Where it is sharded, its parameters are shards."""
    return held if isinstance(held, Model) else held.model


class Backend(Protocol):
    """The weights of one model, as an engine holds them. All ranks make the same calls in the same order."""

    model: Model
    ranks: Ranks
    """The ranks that hold the other rollouts of a batch."""
    all_ranks: Ranks
    """Those, and the ranks that compute other tokens of the same rollouts."""
    ranks_per_rollout: int
    """The number of ranks that compute the same rollouts."""
    dtype: torch.dtype
    """The dtype of forward passes."""
    is_sharded: bool
    """True if each rank holds shards of the weights, so that ranks gather whole weights together."""

    @property
    def optimizer(self) -> WeightOptimizer:
        """The optimizer of the trained weights. On each rank it has that rank's rows."""
        ...

    def micro_pass(
        self, wanted: frozenset[str], shows_images: bool = False, *, backward: bool
    ) -> AbstractContextManager[None]:
        """Frame one micro-batch, of which these outputs are computed. Every rank enters it equally often.

        A rank without a micro-batch computes nothing inside; what the others need from it is then done at the end.
        shows_images: any rank has images in it.
        """
        ...

    def forward(
        self,
        batch: Batch,
        wanted: frozenset[str],
        *,
        observations: bool = False,
        balance: BalanceLoss | None = None,
    ) -> ForwardResult:
        """Compute these outputs of a micro-batch. balance: a loss whose gradient the backward pass adds."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a micro-batch's loss."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each weight whole, in the dtype of forward passes. Sharded weights are yielded as copies, and every
        rank consumes all of them."""
        ...

    def merged_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each weight of the equal model without adapters, as `weights` does, for `PublishedNames.publish`:
        experts that ranks divide come one at a time."""
        ...

    def adapter_weights(self) -> dict[str, Tensor]:
        """Return the adapters' weights whole, in the dtype of forward passes. All ranks call it together."""
        ...
