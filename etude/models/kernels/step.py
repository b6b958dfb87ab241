"""The operations of a decode step by Triton kernels; see `StepOps`. Those that do not hold here are torch's."""

from __future__ import annotations

from collections.abc import Set

from torch import Tensor

from etude.lazy import LazyModule
from etude.models.kernels.shapes import AttentionWork
from etude.models.step_ops import StepMemory, StepRows, TorchStepOps

ATTENTION = "attention"
NORM = "norm"
ROTARY = "rotary positions"
ACTIVATION = "activation"
KERNELS = (ATTENTION, NORM, ROTARY, ACTIVATION)
"""The kernels, by their names in messages."""

attention = LazyModule("etude.models.kernels.paged_attention")
decode_ops = LazyModule("etude.models.kernels.decode_ops")


class KernelStepOps(TorchStepOps):
    """The operations of one pass."""

    def __init__(self, memory: StepMemory, rows: StepRows, work: AttentionWork | None, held: Set[str]) -> None:
        """held: the kernels to use. work: for that of attention."""
        if not held >= frozenset(KERNELS):
            super().__init__(memory, rows)  # it computes addresses, which kernels find by themselves
        self._memory = memory
        self._rows = rows
        self._work = work
        self._held = held

    def add_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if NORM not in self._held:
            return super().add_norm(x, residual, weight, eps)
        normed: Tensor = decode_ops.add_norm(x, residual, weight, eps)
        return x if residual is None else residual, normed

    def write(self, layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, eps: float) -> Tensor:
        if ROTARY not in self._held:
            return super().write(layer, qkv, q_norm, k_norm, eps)
        q: Tensor = decode_ops.norm_rotate_write(qkv, q_norm, k_norm, eps, self._memory, layer, self._rows)
        return q

    def attend(self, layer: int, q: Tensor, *, scale: float, window: int | None) -> Tensor:
        if ATTENTION not in self._held:
            return super().attend(layer, q, scale=scale, window=window)
        scoring = attention.Scoring(scale, window)
        out: Tensor = attention.paged_attention(q, self._memory, layer, self._rows, self._work, scoring)
        return out

    def gated_silu(self, x: Tensor) -> Tensor:
        if ACTIVATION not in self._held:
            return super().gated_silu(x)
        out: Tensor = decode_ops.gated_silu(x)
        return out
