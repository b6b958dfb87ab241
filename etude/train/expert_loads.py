"""The tokens that each expert of a model gets in an update, counted in the forward passes of all ranks.

A layer that is computed again in its backward pass counts once. Tokens of a shared prompt count once, as they are
computed once. Under `mesh.tensor` and `mesh.context`, up to a token for each rank is padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from etude.algorithms.view import Ranks
from etude.models import Model
from etude.models.experts import count_loads, find_experts
from etude.observe import Max, Mean, Metrics
from etude.train.optim import local_part


class ExpertLoads:
    """The loads of this rank since `reset`. A model without experts has none, and a plan has no values to count."""

    def __init__(self, model: Model) -> None:
        experts = find_experts(model.module)
        is_planned = isinstance(local_part(next(iter(model.parameters()))), FakeTensor)
        self.experts: Sequence[nn.Module] = () if is_planned else experts
        """The experts of each mixture."""
        self._layers = {id(experts): layer for layer, experts in enumerate(self.experts)}
        self._device = model.device
        self.reset()

    def reset(self) -> None:
        """Begin a new update."""
        self._rows = [torch.zeros(int(x.num_experts), dtype=torch.int64, device=self._device) for x in self.experts]  # type: ignore[arg-type]
        self._entropy = torch.zeros(len(self.experts), dtype=torch.float64, device=self._device)
        self._tokens = torch.zeros(len(self.experts), dtype=torch.float64, device=self._device)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the mixtures of a forward pass in this context."""
        with count_loads(self._count if self.experts else None):
            yield

    @torch.no_grad()
    def _count(self, experts: nn.Module, rows: Tensor, weights: Tensor) -> None:
        layer = self._layers[id(experts)]
        shares = weights.float()
        shares = shares / shares.sum(-1, keepdim=True)
        self._rows[layer] += rows
        self._entropy[layer] += torch.special.entr(shares).sum()
        self._tokens[layer] += len(weights)

    def sum_over(self, ranks: Ranks) -> ExpertLoad | None:
        """Return the loads of an update over all ranks; None without experts. All ranks call it together."""
        if not self.experts:
            return None
        rows = ranks.all_reduce(torch.cat(self._rows))
        entropy, tokens = ranks.all_reduce(torch.stack([self._entropy, self._tokens])).cpu()
        return ExpertLoad(torch.split(rows.cpu(), [len(own) for own in self._rows]), entropy / tokens.clamp(min=1))


class ExpertLoad:
    """The loads of one update, over all ranks."""

    def __init__(self, rows: Sequence[Tensor], entropy: Tensor) -> None:
        """rows: [E] of each layer, the tokens of each expert. entropy: [L], the mean over tokens."""
        self.rows = rows
        self.entropy = entropy

    def metrics(self) -> Metrics:
        """Return the metrics of an update; none without a token."""
        if not any(rows.any() for rows in self.rows):
            return Metrics()
        largest = [float(rows.max() / rows.double().mean()) for rows in self.rows]
        metrics = Metrics({"moe/load_max": Max.of(max(largest))})
        for rows, load, entropy in zip(self.rows, largest, self.entropy.tolist(), strict=True):
            metrics.add("moe/load", Mean.of(load))
            metrics.add("moe/idle", Mean.of((rows == 0).double().mean()))
            metrics.add("moe/router_entropy", Mean.of(entropy))
        return metrics
