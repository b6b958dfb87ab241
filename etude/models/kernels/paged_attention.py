"""Attention over the blocks of a KV cache, in two Triton kernels that walk a flat list of work.

An *entry* of the list is `(split, row, row, …)`: up to R rows that read the same split of 256 keys, by the block table
of the first. Its rows are answers to one prompt, tokens of one chunk of a prompt, or one row and padding (−1). Each
entry leaves a partial result for each of its rows, and a second kernel merges a row's partials in the order of its
splits. A fixed number of programs walks the list, so its length is data: a captured graph works for any list.

The bounds of a split depend only on positions in the context, so a row's bits depend on nothing else in its batch. Keys
that other rows of an entry see add weights that are exactly zero.

A row's splits, up to the one of its position, are in the list once each. Rows may also stand before the splits of a
list, as in a pass of scratch rows with the list of another step: such an entry reads nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from etude.models.kernels.shapes import MIN_LANES, SPLIT, AttentionWork
from etude.models.step_ops import StepMemory, StepRows

BLOCK_KEYS = 64
"""The keys of one turn of the loop."""
WARPS = 8
STAGES = 2
"""The turns that are under way at once."""


@dataclass(frozen=True)
class Scoring:
    """The options by which scores become weights; see `AttentionFn`."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None  # [Hq]


def paged_attention(
    q: Tensor, memory: StepMemory, layer: int, rows: StepRows, work: AttentionWork, scoring: Scoring
) -> Tensor:
    """[R, Hq, D] → [R, Hq, D]: attend over the stored keys of a layer."""
    out = torch.empty_like(q)
    keys, values = memory.keys_values[layer]
    key_heads, _, size, width = keys.shape
    query_heads = q.shape[1]
    group = query_heads // key_heads
    splits = work.partial.shape[1]
    window = scoring.window
    softcap = scoring.softcap
    sinks = scoring.sinks
    _attend_to_splits[work.programs, key_heads](
        q,
        keys,
        values,
        memory.table,
        rows.slots,
        rows.positions,
        work.entries,
        work.count,
        work.partial,
        work.partial_lse,
        scoring.scale,
        window or 0,
        softcap or 1.0,
        keys.stride(0),
        memory.table.stride(0),
        splits,
        GROUP=group,
        ROWS=work.rows_per_entry,
        M=max(MIN_LANES, triton.next_power_of_2(group * work.rows_per_entry)),
        D=width,
        SIZE=size,
        BLOCK=BLOCK_KEYS,
        SPLIT=SPLIT,
        WINDOW=window is not None,
        CAP=softcap is not None,
        num_warps=WARPS,
        num_stages=STAGES,
        enable_fp_fusion=True,
    )
    _merge_splits[len(q), query_heads](
        work.partial,
        work.partial_lse,
        rows.positions,
        work.partial_lse if sinks is None else sinks,
        out,
        window or 0,
        splits,
        HEADS=query_heads,
        D=width,
        SPLIT=SPLIT,
        WINDOW=window is not None,
        SINK=sinks is not None,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return out


@triton.jit
def _attend_to_splits(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    entries: tl.tensor,
    count: tl.tensor,
    partial: tl.tensor,
    partial_lse: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,
    softcap: tl.tensor,
    head_stride: tl.tensor,
    table_stride: tl.tensor,
    splits: tl.tensor,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
) -> None:
    """A program takes every n-th entry, for one key head. A lane is one query head of one row of the entry."""
    head = tl.program_id(1)
    d = tl.arange(0, D)
    lane = tl.arange(0, M)
    member = lane // GROUP
    query_head = head * GROUP + lane % GROUP
    heads = tl.num_programs(1) * GROUP
    k_head = keys + head.to(tl.int64) * head_stride
    v_head = values + head.to(tl.int64) * head_stride
    for entry in range(tl.program_id(0), tl.load(count), tl.num_programs(0)):
        split = tl.load(entries + entry * (ROWS + 1))
        first_row = tl.load(entries + entry * (ROWS + 1) + 1)
        row = tl.load(entries + entry * (ROWS + 1) + 1 + member, mask=member < ROWS, other=-1)
        live = row >= 0
        blocks = table + tl.load(slots + first_row) * table_stride
        position = tl.load(positions + row, mask=live, other=-1).to(tl.int32)
        lanes = (row * heads + query_head)[:, None] * D + d[None, :]
        queries = tl.load(q + lanes, mask=live[:, None], other=0.0)
        start, end = _span(split, position, live, window, BLOCK, SPLIT, WINDOW)
        top = tl.full([M], -float("inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, D], tl.float32)
        for n0 in range(start, end, BLOCK):
            n = n0 + tl.arange(0, BLOCK)
            exists = n < end
            block = tl.load(blocks + n // SIZE, mask=exists, other=0).to(tl.int32)
            place = (block * SIZE + n % SIZE) * D  # in 32 bits: with 64, registers spill
            key = tl.load(k_head + (place[None, :] + d[:, None]), mask=exists[None, :], other=0.0)
            scores = _score(queries, key, n, position, scale, window, softcap, WINDOW, CAP)
            new_top = tl.maximum(top, tl.max(scores, 1))
            safe_top = tl.where(new_top == -float("inf"), 0.0, new_top)
            shares = tl.exp(scores - safe_top[:, None])
            kept = tl.exp(top - safe_top)
            total = total * kept + tl.sum(shares, 1)
            value = tl.load(v_head + (place[:, None] + d[None, :]), mask=exists[:, None], other=0.0)
            acc = acc * kept[:, None] + tl.dot(shares.to(value.dtype), value, input_precision="ieee")
            top = new_top
        part = (row.to(tl.int64) * splits + split) * heads + query_head
        _store(partial, partial_lse, part, live, top, total, acc, D)


@triton.jit
def _span(
    split: tl.tensor,
    position: tl.tensor,
    live: tl.tensor,
    window: tl.tensor,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the first key of a split that an entry reads, a multiple of BLOCK, and the end."""
    start = split * SPLIT
    if WINDOW:
        lowest = tl.min(tl.where(live, position, 2147483647), 0) - window + 1
        start = tl.maximum(start, lowest // BLOCK * BLOCK)
    return start, tl.minimum(split * SPLIT + SPLIT, tl.max(position, 0) + 1)


@triton.jit
def _score(
    queries: tl.tensor,
    key: tl.tensor,
    n: tl.tensor,
    position: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,
    softcap: tl.tensor,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
) -> tl.tensor:
    """[M, D], [D, BLOCK] → [M, BLOCK]: the scores of keys n, with −∞ where a lane does not see a key."""
    scores = tl.dot(queries, key, input_precision="ieee") * scale
    if CAP:  # softcap · tanh(scores / softcap)
        grown = tl.exp(2.0 * scores / softcap)
        scores = softcap * (1.0 - 2.0 / (grown + 1.0))
    seen = n[None, :] <= position[:, None]
    if WINDOW:
        seen = seen & (n[None, :] > position[:, None] - window)
    return tl.where(seen, scores, -float("inf"))


@triton.jit
def _store(
    partial: tl.tensor,
    partial_lse: tl.tensor,
    part: tl.tensor,
    live: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    D: tl.constexpr,
) -> None:
    """Write the results of an entry: each lane's mean of values, and the logarithm of its sum of weights."""
    safe_total = tl.where(total > 0, total, 1.0)
    place = part[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(partial + place, acc / safe_total[:, None], mask=live[:, None])
    tl.store(partial_lse + part, tl.where(total > 0, top + tl.log(safe_total), -float("inf")), mask=live)


@triton.jit
def _merge_splits(
    partial: tl.tensor,
    partial_lse: tl.tensor,
    positions: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    window: tl.tensor,
    splits: tl.tensor,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SINK: tl.constexpr,
) -> None:
    """A program merges the partial results of one query head of one row, in the order of the splits."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    d = tl.arange(0, D)
    position = tl.load(positions + row).to(tl.int32)
    first = 0
    if WINDOW:
        first = tl.maximum(0, position - window + 1) // SPLIT
    base = row.to(tl.int64) * splits
    top = -float("inf")
    total = 0.0
    if SINK:  # a key without a value
        top = tl.load(sinks + head).to(tl.float32)
        total = 1.0
    acc = tl.zeros([D], tl.float32)
    for split in range(first, position // SPLIT + 1):
        part = (base + split) * HEADS + head
        lse = tl.load(partial_lse + part)
        new_top = tl.maximum(top, lse)
        safe_top = tl.where(new_top == -float("inf"), 0.0, new_top)
        kept = tl.exp(top - safe_top)
        share = tl.exp(lse - safe_top)
        acc = acc * kept + share * tl.load(partial + part * D + d)
        total = total * kept + share
        top = new_top
    tl.store(out + (row * HEADS + head) * D + d, (acc / total).to(out.dtype.element_ty))


def is_interpreted() -> bool:
    """Return true if Triton interprets kernels on the CPU."""
    return not isinstance(_attend_to_splits, triton.JITFunction)
