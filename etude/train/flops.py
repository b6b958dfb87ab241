"""What a pass through a model costs in floating-point operations, and what a device can do of them."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import nn

from etude.batch import Pack
from etude.models import Model

__all__ = ["ModelFlops", "measure_matmul_flops"]


@dataclass(frozen=True)
class ModelFlops:
    """The operations that the model's definition asks for: a forward pass's, and a backward pass's for the gradients of
    what goes through it and of the weights that are trained.

    Only products of matrices count, as is usual: norms, activations and the look-up of embeddings are small beside
    them. Activations that are computed twice to save memory count once.
    """

    per_token: float
    """For each token that goes through the layers."""
    per_predicted: float
    """For each token that gets logits."""
    per_pair: float
    """For each token that a token attends to."""
    trained_per_token: float
    """Of the first, what goes through weights that are trained."""
    trained_per_predicted: float
    """Of the second, the same."""

    @classmethod
    def from_model(cls, model: Model) -> ModelFlops:
        """Read from the shapes of a model."""
        embeddings = {id(part.weight) for part in model.module.modules() if isinstance(part, nn.Embedding)}
        head = model.head_weight
        excluded = {*embeddings, id(head)}
        matrices = [w for _, w in model.named_weights() if w.ndim == 2 and id(w) not in excluded]
        pair = 4 * model.num_layers * model.query_heads * model.head_dim
        return cls(
            per_token=2.0 * sum(w.numel() for w in matrices),
            per_predicted=2.0 * head.numel(),
            per_pair=float(pair),
            trained_per_token=2.0 * sum(w.numel() for w in matrices if w.requires_grad),
            trained_per_predicted=2.0 * head.numel() if head.requires_grad else 0.0,
        )

    def forward(self, pack: Pack, predicted: int) -> float:
        """Of one pass over a pack, a shared prefix counted once. A sliding window is counted as if it were open."""
        return self.per_token * len(pack.ids) + self.per_pair * _attention_pairs(pack) + self.per_predicted * predicted

    def update(self, pack: Pack, predicted: int) -> float:
        """Of one pass forward and backward. The gradient is counted as if it went down to the first layer."""
        trained = self.trained_per_token * len(pack.ids) + self.trained_per_predicted * predicted
        return 2 * self.forward(pack, predicted) + trained + self.per_pair * _attention_pairs(pack)


def _attention_pairs(pack: Pack) -> float:
    return float(pack.positions.sum()) + len(pack.ids)


def measure_matmul_flops(dtype: torch.dtype, device: torch.device, size: int = 2048, seconds: float = 0.5) -> float:
    """Operations a second in the best product of two large square matrices: what this device can really do.

    size: the largest rows that are tried. Fewer come first, and more while there is time: one product of 2048 rows
    takes half a minute on a processor that does not multiply such numbers itself.
    """
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    rows = min(size, 256)
    a[:rows, :rows] @ b[:rows, :rows]  # the first one waits for threads and kernels
    best, until = 0.0, time.perf_counter() + seconds
    while True:
        start = _now(device)
        a[:rows, :rows] @ b[:rows, :rows]
        now = _now(device)
        best = max(best, 2.0 * rows**3 / (now - start))
        if now >= until:
            return best
        if rows < size and now + 10 * (now - start) < until:  # twice the rows take eight times as long
            rows = min(size, 2 * rows)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
