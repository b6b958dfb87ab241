"""One block of attention, forward and backward: torch's flash kernel on a CPU where possible, else matrix products.

The kernel takes padded rows and any mask. Capped scores use matrix products, and so does a block on a GPU: one that the
calls of `tree_attention` do not compute.
"""

from __future__ import annotations

import torch
from torch import Tensor

from etude.models.blocks import Block, BlockInputs

_SHORT = 128
"""Rows up to this length use float32 in the backward pass. The CPU kernel for bfloat16 has a high cost for each row, of
any length. Below this length the float32 kernel is faster, by fifteen times at 16 tokens."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attention_forward(met: BlockInputs) -> tuple[Tensor, Tensor]:
    """Return the output [B, Lq, Hq, D] and log-sum-exp [B, Lq, Hq] of this block."""
    if met.softcap is not None or met.q.device.type != "cpu":
        return _eager_forward(met)
    block, mask = met.block, _additive(met.block, met.q.dtype)
    turned = (x.transpose(1, 2) for x in (met.q, met.k, met.v))
    out, lse = _flash(*turned, 0.0, block.causal, attn_mask=mask, scale=met.scale)
    lse = lse.transpose(1, 2)
    if block.mask is not None:  # the kernel gives a row that sees nothing a log-sum-exp of 0
        lse = lse.masked_fill(~block.mask.any(2)[..., None], -torch.inf)
    return out.transpose(1, 2), lse


def attention_backward(met: BlockInputs, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, given the output and log-sum-exp of the whole softmax, not of this block."""
    if met.softcap is not None or met.q.device.type != "cpu":
        return _eager_backward(met, grad, out, lse)
    block, dtype = met.block, met.q.dtype
    work = torch.promote_types(dtype, torch.float32) if max(met.q.shape[1], met.k.shape[1]) <= _SHORT else dtype
    turned = (x.to(work).transpose(1, 2) for x in (grad, met.q, met.k, met.v, out))
    mask = _additive(block, work)
    grads = _flash_backward(*turned, lse.transpose(1, 2), 0.0, block.causal, attn_mask=mask, scale=met.scale)
    of_q, of_k, of_v = (x.transpose(1, 2).to(dtype) for x in grads)
    return of_q, of_k, of_v


def _additive(block: Block, dtype: torch.dtype) -> Tensor | None:
    """Return the additive mask of the kernel, [B, 1, Lq, Lk]: 0 where seen, −∞ elsewhere."""
    if block.mask is None:
        return None
    return torch.zeros(block.mask.shape, dtype=dtype, device=block.mask.device).masked_fill_(~block.mask, -torch.inf)[
        :, None
    ]


def _eager_forward(met: BlockInputs) -> tuple[Tensor, Tensor]:
    scores, _ = _scores(met)
    lse = scores.logsumexp(-1, keepdim=True)
    shares = (scores - lse.clamp(min=torch.finfo(lse.dtype).min)).exp()
    out = _ungroup_heads(shares.to(met.v.dtype) @ met.v.transpose(1, 2), met.q)
    return out, _ungroup_heads(lse, met.q)[..., 0]


def _eager_backward(met: BlockInputs, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q = met.q
    k = met.k
    v = met.v
    heads = k.shape[2]
    scores, slope = _scores(met)
    shares = (scores - _group_heads(lse[..., None], heads)).exp()
    rows_grad = _group_heads(grad, heads)
    of_v = shares.to(v.dtype).transpose(2, 3) @ rows_grad
    delta = _group_heads((grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1, keepdim=True), heads)
    of_scores = shares * ((rows_grad @ v.permute(0, 2, 3, 1)).to(lse.dtype) - delta) * met.scale
    if slope is not None:
        of_scores = of_scores * slope
    of_scores = of_scores.to(q.dtype)
    of_q = _ungroup_heads(of_scores @ k.transpose(1, 2), q)
    of_k = of_scores.transpose(2, 3) @ _group_heads(q, heads)
    return of_q, of_k.transpose(1, 2), of_v.transpose(1, 2)


def _scores(met: BlockInputs) -> tuple[Tensor, Tensor | None]:
    """[B, Hk, G · Lq, Lk]: scores in float32 or wider, −∞ where not seen, and the derivative of their cap."""
    block = met.block
    q = met.q
    k = met.k
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (_group_heads(q, k.shape[2]) @ k.permute(0, 2, 3, 1)).to(wide) * met.scale
    slope = None
    if met.softcap is not None:
        bent = torch.tanh(scores / met.softcap)
        scores, slope = bent * met.softcap, 1 - bent.square()
    seen = block.mask
    if block.causal:
        seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril()[None]
    if seen is not None:
        group = q.shape[2] // k.shape[2]
        scores = scores.masked_fill(~seen.repeat(1, group, 1)[:, None], -torch.inf)
    return scores, slope


def _group_heads(x: Tensor, heads: int) -> Tensor:
    """[B, L, Hk · G, D] → [B, Hk, G · L, D]: the query heads that share a key head, one after the other."""
    return x.view(*x.shape[:2], heads, -1, x.shape[3]).permute(0, 2, 3, 1, 4).flatten(2, 3)


def _ungroup_heads(x: Tensor, q: Tensor) -> Tensor:
    """[B, Hk, G · Lq, D] → [B, Lq, Hk · G, D]: the inverse of `_group_heads`."""
    return x.view(*x.shape[:2], -1, q.shape[1], x.shape[3]).permute(0, 3, 1, 2, 4).flatten(2, 3)
