"""Attention over a pack: within segments and to their ancestors only, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from etude.batch import Pack
from etude.models.attention_kernels import attention_backward, attention_forward
from etude.models.blocks import Block, BlockInputs, Plan
from etude.models.mixers import Mixer
from etude.models.states import Recurrence, Rows, StateTree


class PackedAttention(Mixer):
    """A `Mixer` for one pack: causal within a segment, and full attention to its ancestors.

    Nothing is computed between segments that do not descend from each other. All descendants of a shared segment attend
    to its keys and values in one product. The constructor plans the blocks for all layers.
    """

    def __init__(self, pack: Pack) -> None:
        self.plan = Plan(pack)

    @cached_property
    def states(self) -> StateTree:
        """The order in which recurrent layers go through the segments."""
        pack = self.plan.pack
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
        out: Tensor = _Attention.apply(q, k, v, sinks, self.plan.blocks(window), scale, softcap)  # type: ignore[no-untyped-call]
        return out


class _Attention(torch.autograd.Function):
    """The blocks of a plan, merged by their log-sum-exps.

    A block's backward pass needs only the merged output and log-sum-exp: they give its share of the whole softmax. So a
    sink, which is one more score without a value, joins the log-sum-exp at the end, and no block knows of it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        blocks: Sequence[Block],
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = q.new_empty(q.shape[:2], dtype=wide)
        for block in blocks:
            part, part_lse = attention_forward(BlockInputs.of(block, q, k, v, scale, softcap))
            if block.level == 0:
                block.query.put(part, out)
                block.query.put(part_lse, lse)
            else:
                _merge(block, part, part_lse, out, lse)
        if sinks is not None:
            whole = torch.logaddexp(lse, sinks.to(wide))
            out.mul_((lse - whole).exp()[..., None])
            lse = whole
        ctx.blocks = blocks
        ctx.scale = scale
        ctx.softcap = softcap
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        grad = grads[0].contiguous()
        into_sinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            share = (sinks.to(lse.dtype) - lse).exp()
            into_sinks = -(share * (grad.to(lse.dtype) * out).sum(-1)).sum(0).to(sinks.dtype)
        into_q, into_k, into_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        for block in ctx.blocks:
            query, key = block.query, block.key
            block_grad = query.take(grad)
            if query.real is not None:
                block_grad = query.padded(query.kept(block_grad))
            inputs = BlockInputs.of(block, q, k, v, ctx.scale, ctx.softcap)
            grad_q, grad_k, grad_v = attention_backward(inputs, block_grad, query.take(out), query.take(lse))
            write = (query.put, key.put) if block.level == 0 else (query.add, key.add)
            write[0](grad_q, into_q)
            write[1](grad_k, into_k)
            write[1](grad_v, into_v)
        return into_q, into_k, into_v, into_sinks, None, None, None


def _merge(block: Block, part: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge a block's output into the output of the blocks before it."""
    tokens = block.query.tokens
    new, new_lse = block.query.kept(part), block.query.kept(part_lse)
    old, old_lse = out.index_select(0, tokens), lse.index_select(0, tokens)
    merged_lse = torch.logaddexp(old_lse, new_lse)
    old_weight, new_weight = (old_lse - merged_lse).exp()[..., None], (new_lse - merged_lse).exp()[..., None]
    out.index_copy_(0, tokens, (old * old_weight + new * new_weight).to(out.dtype))
    lse.index_copy_(0, tokens, merged_lse)
