"""Attention over a pack: within segments and to their ancestors only, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from etude.batch import Pack
from etude.models.attention_kernels import attention_backward, attention_forward
from etude.models.blocks import Block, BlockInputs, PaddedRows, Plan
from etude.models.mixers import Mixer
from etude.models.states import Recurrence, Rows, StateTree
from etude.models.tree_attention import FLASH, LevelCall, LevelPlan, PackedRows, VarlenKernel


class PackedAttention(Mixer):
    """A `Mixer` for one pack: causal within a segment, and full attention to its ancestors.

    Nothing is computed between segments that do not descend from each other. All descendants of a shared segment attend
    to its keys and values in one product. All layers share a plan: one call for each level of the tree where the kernel
    supports a layer's attention, and padded blocks elsewhere.
    """

    def __init__(self, pack: Pack, kernel: VarlenKernel = FLASH) -> None:
        """kernel: computes whole levels of the tree where it can."""
        self._pack = pack
        self._kernel = kernel

    @cached_property
    def plan(self) -> Plan:
        """The pack as padded blocks."""
        return Plan(self._pack)

    @cached_property
    def levels(self) -> LevelPlan:
        """The pack as one call for each level."""
        return LevelPlan(self._pack)

    @cached_property
    def states(self) -> StateTree:
        """The order in which recurrent layers go through the segments."""
        pack = self._pack
        return StateTree(pack.offsets.tolist(), pack.parent.tolist(), pack.ids.device)

    def convolve(self, layer: int, run: Callable[[Tensor], Tensor], x: Tensor, width: int) -> Tensor:
        """See `Mixer`."""
        del layer
        return self.states.convolve(run, x, width)

    def scan(self, layer: int, recurrence: Recurrence, inputs: Rows) -> Tensor:
        """See `Mixer`."""
        del layer
        return self.states.scan(recurrence, inputs)

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `AttentionFn`."""
        del layer  # every layer sees the same pack
        by_level = self._kernel.supports(q, softcap) and not len(self._pack.both_ways)
        calls = self.levels.calls(window) if by_level else self.plan.blocks(window)
        kernels = _Kernels(self._kernel, scale, softcap)
        out: Tensor = _Attention.apply(q, k, v, sinks, calls, kernels)  # type: ignore[no-untyped-call]
        return out


@dataclass(frozen=True)
class _Kernels:
    """The kernels of both kinds of calls. Tensors are of the whole pack, and results of a call's own rows."""

    varlen: VarlenKernel
    scale: float
    softcap: float | None

    def forward(self, call: LevelCall | Block, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs [R, Hq, D] and log-sum-exps [R, Hq]."""
        if isinstance(call, LevelCall):
            return self.varlen.forward(call, call.query.read(q), call.key.read(k), call.key.read(v), self.scale)
        out, lse = attention_forward(BlockInputs.of(call, q, k, v, self.scale, self.softcap))
        return call.query.kept(out), call.query.kept(lse)

    def backward(
        self, call: LevelCall | Block, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of queries, keys and values, given the output and log-sum-exp of the whole softmax."""
        if isinstance(call, LevelCall):
            rows = call.query
            return self.varlen.backward(
                call,
                rows.read(grad),
                rows.read(q),
                call.key.read(k),
                call.key.read(v),
                rows.read(out),
                rows.read(lse),
                self.scale,
            )
        query = call.query
        block_grad = query.take(grad)
        if query.real is not None:
            block_grad = query.padded(query.kept(block_grad))
        inputs = BlockInputs.of(call, q, k, v, self.scale, self.softcap)
        of_q, of_k, of_v = attention_backward(inputs, block_grad, query.take(out), query.take(lse))
        return query.kept(of_q), call.key.kept(of_k), call.key.kept(of_v)


class _Attention(torch.autograd.Function):
    """The calls of a plan, merged by their log-sum-exps.

    A call's backward pass needs only the merged output and log-sum-exp: they give its share of the whole softmax. So a
    sink, which is one more score without a value, joins the log-sum-exp at the end, and no call knows of it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        calls: Sequence[LevelCall | Block],
        kernels: _Kernels,
    ) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        if calls and isinstance(calls[0], LevelCall):  # the first call is of the whole pack
            out, lse = kernels.forward(calls[0], q, k, v)
            later = calls[1:]
        else:
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
            lse = q.new_empty(q.shape[:2], dtype=wide)
            later = calls
        for call in later:
            part, part_lse = kernels.forward(call, q, k, v)
            if call.level == 0:
                call.query.write(part, out)
                call.query.write(part_lse, lse)
            else:
                _merge(call.query, part, part_lse, out, lse)
        if sinks is not None:
            whole = torch.logaddexp(lse, sinks.to(wide))
            out.mul_((lse - whole).exp()[..., None])
            lse = whole
        ctx.calls = calls
        ctx.kernels = kernels
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        calls: Sequence[LevelCall | Block] = ctx.calls
        grad = grads[0].contiguous()
        into_sinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            share = (sinks.to(lse.dtype) - lse).exp()
            into_sinks = -(share * (grad.to(lse.dtype) * out).sum(-1)).sum(0).to(sinks.dtype)
        if calls and isinstance(calls[0], LevelCall):
            into_q, into_k, into_v = ctx.kernels.backward(calls[0], grad, q, k, v, out, lse)
            later = calls[1:]
        else:
            into_q, into_k, into_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
            later = calls
        for call in later:
            grad_q, grad_k, grad_v = ctx.kernels.backward(call, grad, q, k, v, out, lse)
            query, key = call.query, call.key
            write = (query.write, key.write) if call.level == 0 else (query.add, key.add)
            write[0](grad_q, into_q)
            write[1](grad_k, into_k)
            write[1](grad_v, into_v)
        return into_q, into_k, into_v, into_sinks, None, None


def _merge(rows: PackedRows | PaddedRows, part: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge the output of some rows into the output of the calls before."""
    old, old_lse = rows.read(out), rows.read(lse)
    merged_lse = torch.logaddexp(old_lse, part_lse)
    old_weight, new_weight = (old_lse - merged_lse).exp()[..., None], (part_lse - merged_lse).exp()[..., None]
    rows.write((old * old_weight + part * new_weight).to(out.dtype), out)
    rows.write(merged_lse, lse)
