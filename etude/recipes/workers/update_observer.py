"""The interface of an observer of updates: it sees what each update computes with, and changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from etude.algorithms import AlgorithmState, Denominators, Outputs
from etude.batch import Batch


class UpdateObserver(Protocol):
    """Sees the policy's updates as they are computed, on the rank that computes them."""

    def see_loss(self, batch: Batch, outputs: Outputs, whole: Denominators, state: AlgorithmState) -> None:
        """See the arguments of a micro-batch's loss. The outputs belong to the gradient that is being computed."""
        ...

    def see_gradient(self, gradient: Mapping[str, Tensor], factor: float) -> None:
        """See the whole gradient of an update before it is clipped. factor: removes the loss scale. The tensors are
        the optimizer's own."""
        ...
