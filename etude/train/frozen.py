"""A model that is asked and never trained: the reference that a policy is held to."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from etude.batch import Batch, Kind, Pack
from etude.data.pack import tree
from etude.models import Model
from etude.train.forward import ForwardPass, cut

__all__ = ["Frozen"]


class Frozen:
    """Tells the log-probs of others' tokens, by weights that stay as they were loaded."""

    def __init__(
        self, model: Model, micro_tokens: int, *, temperature: float = 1.0, pack: Callable[[Batch], Pack] = tree
    ) -> None:
        """temperature: the sampler's, under which the policy's own log-probs are taken too."""
        for weight in model.parameters():
            weight.requires_grad_(False)
        self.model, self._micro_tokens = model, micro_tokens
        self._forward = ForwardPass(model, pack, temperature)

    def logp(self, batch: Batch) -> Tensor:
        """[T]: the log-prob of each action token, NaN elsewhere."""
        found = torch.full((batch.tokens,), torch.nan, dtype=torch.promote_types(self.model.dtype, torch.float32))
        for micro, at in cut(batch, self._micro_tokens, "rollout", self.model.device):
            with torch.no_grad():
                found[at[Kind.TOKEN]] = self._forward(micro, frozenset({"logp"})).columns["logp"].to(found)
        return found.to(batch.device)
