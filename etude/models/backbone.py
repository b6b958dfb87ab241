"""What lies between token ids and final hidden states, and the one thing it leaves to its caller: attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from etude.models.prepack import LinearWeight

if TYPE_CHECKING:
    from etude.models.strand import Side
    from etude.models.visit import Visits

__all__ = ["AttentionFn", "Backbone"]


class AttentionFn(Protocol):
    """Who sees whom. The trainer attends within a pack, the engine over its cache; everything else they share."""

    def __call__(
        self,
        layer: int,
        q: Tensor,  # [P, Hq, D], positions already applied
        k: Tensor,  # [P, Hk, D], positions already applied
        v: Tensor,  # [P, Hk, D]
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """[P, Hq, D]: for each token the mean of the values it sees, weighted by softmax(scale · q · k).

        With a window w a token sees itself and the w − 1 before it. With a softcap c a score s counts as c · tanh(s/c).
        Query head h reads key head h // (Hq / Hk).
        """
        ...


class Backbone(Protocol):
    """The embedding, the layers and the final norm of one architecture."""

    def __call__(
        self, ids: Tensor, positions: Tensor, attend: AttentionFn, *, checkpoint: bool, visits: Visits | None = None
    ) -> Tensor:
        """[P], [P] → [P, H]. With `checkpoint`, a layer's activations are computed again for its backward pass.
        `visits`: who is told of each layer."""
        ...

    def linear_weights(self) -> list[LinearWeight]:
        """The weights whose products go through `prepack.prepacked_linear`."""
        ...

    def compile(self) -> None:
        """Outside of inference, run the small steps between products by what torch.compile makes of them."""
        ...

    def parted(self, tensor: Side) -> Backbone:
        """What one of these ranks computes of it, with the same weights; refused where it cannot be cut."""
        ...
