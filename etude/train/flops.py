"""The floating-point operations of a pass through a model, and the rate that a device reaches."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from etude.batch import Pack
from etude.models import Model


@dataclass(frozen=True)
class ModelFlops:
    """The operations that a model's definition requires, of a forward pass and of a backward pass.

    The backward pass computes the gradients of activations and of the weights that are trained. Only products of
    matrices count, as is usual: norms, activation functions and embedding look-ups are small in comparison.
    Activations that are computed twice to save memory count once.
    """

    per_token: float
    """Operations for each token that goes through the layers."""
    per_predicted: float
    """Operations for each token that gets logits."""
    per_pair: float
    """Operations for each token that a token attends to."""
    trained_per_token: float
    """The part of `per_token` in weights that are trained."""
    trained_per_predicted: float
    """The part of `per_predicted` in weights that are trained."""

    @classmethod
    def from_model(cls, model: Model) -> ModelFlops:
        """Compute the costs from the shapes of a model's weights."""
        embeddings = {id(part.weight) for part in model.module.modules() if isinstance(part, nn.Embedding)}
        head = model.head_weight
        excluded = {*embeddings, id(head)}
        used = [(w, _used_numbers(name, w, model)) for name, w in model.named_weights() if id(w) not in excluded]
        pair = 2 * sum(shape.products_per_pair for shape in model.attention_shapes if shape is not None)
        return cls(
            per_token=2.0 * (sum(numbers for _, numbers in used) + model.sizes.state_products),
            per_predicted=2.0 * head.numel(),
            per_pair=float(pair),
            trained_per_token=2.0 * sum(numbers for w, numbers in used if w.requires_grad),
            trained_per_predicted=2.0 * head.numel() if head.requires_grad else 0.0,
        )

    def forward(self, pack: Pack, predicted: int) -> float:
        """Return the operations of a forward pass over a pack. predicted: the number of tokens that get logits.

        A shared prefix counts once. Sliding-window attention counts as full attention.
        """
        return self.per_token * len(pack.ids) + self.per_pair * _attention_pairs(pack) + self.per_predicted * predicted

    def update(self, pack: Pack, predicted: int) -> float:
        """Return the operations of a forward and a backward pass, which counts as if it reached the first layer."""
        trained = self.trained_per_token * len(pack.ids) + self.trained_per_predicted * predicted
        return 2 * self.forward(pack, predicted) + trained + self.per_pair * _attention_pairs(pack)


def count_active(model: Model) -> int:
    """Return the number of parameters that one token uses: all, but of a mixture's experts only the chosen ones."""
    return round(sum(weight.numel() * _used_share(weight, model) for _, weight in model.named_weights()))


def weight_bytes_read(model: Model, tokens: int) -> float:
    """Return the bytes of the weights that a pass over so many tokens reads. Experts that no token chooses are not
    read; every expert is chosen equally often."""
    return sum(weight.nbytes * (1 - (1 - _used_share(weight, model)) ** tokens) for weight in model.parameters())


def _used_share(weight: Tensor, model: Model) -> float:
    """Return the share of a weight that one token uses: that of its experts, if a weight has those of all tokens."""
    chosen = getattr(model.module.config.get_text_config(), "num_experts_per_tok", None)
    holds_experts = weight.ndim == 3 and weight.shape[1] > 1  # not a short convolution
    return int(chosen) / len(weight) if chosen and holds_experts else 1.0


def _used_numbers(name: str, weight: Tensor, model: Model) -> float:
    """Return how many numbers of a weight one token is multiplied by: in a mixture, those of its experts alone."""
    if weight.ndim == 2 and "bias" not in name:
        return weight.numel()
    share = _used_share(weight, model)
    return weight.numel() * share if share < 1 else 0


def _attention_pairs(pack: Pack) -> float:
    """Return the pairs of tokens of which one attends to the other, by the layout alone: no device is read."""
    ends: list[int] = []
    pairs = 0
    for length, parent in zip(pack.offsets.diff().tolist(), pack.parent.tolist(), strict=True):
        start = ends[parent] if parent >= 0 else 0
        ends.append(start + length)
        pairs += length * start + length * (length + 1) // 2
    return float(pairs)


def measure_matmul_flops(
    dtype: torch.dtype,
    device: torch.device,
    size: int = 2048,
    seconds: float = 0.5,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the operations per second of the fastest product of two large square matrices on this device.

    size: the largest number of rows to try. Smaller products come first, and larger ones while time is left. A product
    of 2048 rows takes half a minute on a processor without instructions for this dtype. clock: measures the time.
    """
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    rows = min(size, 256)
    a[:rows, :rows] @ b[:rows, :rows]  # the first product also waits for threads and kernels
    best = 0.0
    until = clock() + seconds
    while True:
        start = _now(device, clock)
        a[:rows, :rows] @ b[:rows, :rows]
        now = _now(device, clock)
        best = max(best, 2.0 * rows**3 / (now - start))
        if now >= until:
            return best
        if rows < size and now + 10 * (now - start) < until:  # twice the rows take eight times as long
            rows = min(size, 2 * rows)


@cache
def measure_bf16_speedup() -> float:
    """Return how many times as fast this processor multiplies in bf16 as in fp32, by a trial of milliseconds.

    One thread computes, and its own processor time counts: other programs then take no part in the choice.
    """
    rates, threads = dict.fromkeys((torch.bfloat16, torch.float32), 0.0), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(2):
            for dtype, best in rates.items():
                rate = measure_matmul_flops(dtype, torch.device("cpu"), 512, 0.01, time.thread_time)
                rates[dtype] = max(best, rate)
    finally:
        torch.set_num_threads(threads)
    return rates[torch.bfloat16] / rates[torch.float32]


def _now(device: torch.device, clock: Callable[[], float]) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock()
