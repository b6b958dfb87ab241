"""A copy of published weights over those of the embedded engine's model, in place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from etude.errors import EngineError

if TYPE_CHECKING:
    from etude.models import Model


class WeightCopy:
    """One copy, weight by weight. Frozen weights may be missing."""

    def __init__(self, model: Model) -> None:
        self._missing = dict(model.named_weights())
        self._count = len(self._missing)

    @property
    def has_begun(self) -> bool:
        """True if a weight was written."""
        return len(self._missing) < self._count

    @property
    def is_whole(self) -> bool:
        """True if every weight was written, frozen ones too."""
        return not self._missing

    def run(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Write all of these weights, or none if there are none. After an error they may be a mixture."""
        with torch.inference_mode(False), torch.no_grad():
            for name, weight in weights:
                if name not in self._missing or self._missing[name].shape != weight.shape:
                    raise EngineError(
                        f"The weight {name} {list(weight.shape)} was sent. The engine's model does not have it, has it "
                        f"in another shape, or got it before. The two models are of different architectures."
                    )
                self._missing.pop(name).copy_(weight)
        unsent = [name for name, held in self._missing.items() if held.requires_grad]
        if self.has_begun and unsent:
            raise EngineError(f"{len(unsent)} weights were not sent, {min(unsent)} among them: send all or none.")
