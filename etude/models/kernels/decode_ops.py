"""The small steps of a decode layer as Triton kernels, forward only.

Each reads and writes memory once, where torch's operations take ten passes for a norm. Sums are in float32, and results
are rounded where `layer_ops` rounds them, except for rotary positions: those are rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from etude.models.step_ops import StepMemory, StepRows

SILU_BLOCK = 1024
"""The numbers of one program of the activation."""


def add_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """[P, H] → [P, H]: add `x` to the residual in place, and return the root-mean-square norm of the sum.

    Without a residual, return the norm of `x`.
    """
    out = torch.empty_like(x)
    _add_norm[(len(x),)](
        x,
        x if residual is None else residual,
        weight,
        out,
        eps,
        H=x.shape[1],
        BLOCK=triton.next_power_of_2(x.shape[1]),
        ADD=residual is not None,
        num_warps=4 if x.shape[1] <= 2048 else 8,
        enable_fp_fusion=True,
    )
    return out


def norm_rotate_write(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    memory: StepMemory,
    layer: int,
    rows: StepRows,
) -> Tensor:
    """[R, Hq + 2 Hk, D] → [R, Hq, D]: norm and rotate queries and keys, write keys and values, return the queries."""
    keys, values = memory.keys_values[layer]
    key_heads, _, size, width = keys.shape
    heads = qkv.shape[1]
    query_heads = heads - 2 * key_heads
    out = torch.empty(len(qkv), query_heads, width, dtype=qkv.dtype, device=qkv.device)
    _norm_rotate_write[len(qkv), heads](
        qkv,
        qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm,
        memory.cos,
        memory.sin,
        rows.positions,
        rows.slots,
        memory.table,
        out,
        keys,
        values,
        eps,
        memory.table.stride(0),
        keys.stride(0),
        HQ=query_heads,
        HK=key_heads,
        D=width,
        SIZE=size,
        NORM=q_norm is not None,
        num_warps=1,
        enable_fp_fusion=True,
    )
    return out


def gated_silu(x: Tensor) -> Tensor:
    """[P, 2I] → [P, I]: silu(gate) · up; the first half is the gate."""
    size = x.shape[1] // 2
    out = torch.empty(len(x), size, dtype=x.dtype, device=x.device)
    grid = (len(x), triton.cdiv(size, SILU_BLOCK))
    _gated_silu[grid](x, out, size, BLOCK=SILU_BLOCK, num_warps=4, enable_fp_fusion=True)
    return out


@triton.jit
def _add_norm(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
) -> None:
    """A program has one row. The sum is rounded to the residual's type before the norm, as a separate addition is."""
    n = tl.arange(0, BLOCK)
    exists = n < H
    place = tl.program_id(0).to(tl.int64) * H + n
    value = tl.load(x + place, mask=exists, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    if ADD:
        before = tl.load(residual + place, mask=exists, other=0.0).to(tl.float32)
        rounded = (value + before).to(residual.dtype.element_ty)
        tl.store(residual + place, rounded, mask=exists)
        value = rounded.to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(value * value, 0) / H + eps)
    normed = (value * inverse).to(kind).to(tl.float32)
    scaled = normed * tl.load(weight + n, mask=exists, other=0.0).to(tl.float32)
    tl.store(out + place, scaled.to(kind), mask=exists)


@triton.jit
def _norm_rotate_write(
    qkv: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    table: tl.tensor,
    out: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    eps: tl.tensor,
    table_stride: tl.tensor,
    head_stride: tl.tensor,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    SIZE: tl.constexpr,
    NORM: tl.constexpr,
) -> None:
    """A program has one head of one row: of the queries, then the keys, then the values."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    n = tl.arange(0, D)
    partner = (n + D // 2) % D
    position = tl.load(positions + row).to(tl.int32)
    block = tl.load(table + tl.load(slots + row) * table_stride + position // SIZE)
    place = (block.to(tl.int64) * SIZE + position % SIZE) * D
    source = qkv + (row.to(tl.int64) * (HQ + 2 * HK) + head) * D
    if head < HQ + HK:
        kind = out.dtype.element_ty
        x = tl.load(source + n).to(tl.float32)
        y = tl.load(source + partner).to(tl.float32)
        if NORM:
            weight = q_norm if head < HQ else k_norm
            inverse = 1.0 / tl.sqrt(tl.sum(x * x, 0) / D + eps)
            x = (x * inverse).to(kind).to(tl.float32) * tl.load(weight + n).to(tl.float32)
            y = (y * inverse).to(kind).to(tl.float32) * tl.load(weight + partner).to(tl.float32)
            x = x.to(kind).to(tl.float32)
            y = y.to(kind).to(tl.float32)
        cosines = tl.load(cos + position * D + n).to(tl.float32)
        sines = tl.load(sin + position * D + n).to(tl.float32)
        rotated = x * cosines + y * sines
        if head < HQ:
            tl.store(out + (row * HQ + head) * D + n, rotated.to(kind))
        else:
            tl.store(keys + (head - HQ).to(tl.int64) * head_stride + place + n, rotated.to(keys.dtype.element_ty))
    else:
        head_values = values + (head - HQ - HK).to(tl.int64) * head_stride
        tl.store(head_values + place + n, tl.load(source + n).to(values.dtype.element_ty))


@triton.jit
def _gated_silu(x: tl.tensor, out: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr) -> None:
    """A program has a part of one row. The activation is rounded before the product, as a separate one is."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = n < size
    gate = tl.load(x + row * 2 * size + n, mask=exists, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * size + size + n, mask=exists, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    gated = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    tl.store(out + row * size + n, (gated * up).to(kind), mask=exists)
