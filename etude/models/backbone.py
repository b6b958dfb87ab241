"""The protocols of a backbone, from token ids to final hidden states, and of the attention that its caller provides."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from etude.models.config import ActivationCheckpointing
from etude.models.prepack import LinearWeight


class AttentionFn(Protocol):
    """An attention function. The trainer attends within a pack, the engine over its cache; they share the rest."""

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
        sinks: Tensor | None = None,  # [Hq]
    ) -> Tensor:
        """[P, Hq, D]: for each token the mean of the values it sees, weighted by softmax(scale · q · k).

        With a window w a token sees itself and the w − 1 before it. With a softcap c a score s counts as c · tanh(s/c).
        Query head h reads key head h // (Hq / Hk). A sink is one more score of its head, whose value is zero.
        """
        ...


class Backbone(Protocol):
    """The embedding, the layers and the final norm of one architecture."""

    def __call__(
        self, ids: Tensor, positions: Tensor, attend: AttentionFn, checkpointing: ActivationCheckpointing
    ) -> Tensor:
        """[P], [P] → [P, H]: compute the final normed hidden states.

        checkpointing: the activations of a layer to compute again for its backward pass.
        """
        ...

    def linear_weights(self) -> list[LinearWeight]:
        """Return the weights that are multiplied by `prepack.prepacked_linear`."""
        ...

    def compile(self) -> None:
        """Compile the small steps between products with torch.compile; inference does not use the compiled steps."""
        ...
