"""Attention over a pack on a GPU: one call of a variable-length kernel for each level of its tree, without padding.

    level 0    each segment attends to itself, causally             rows are segments: the pack as it is
    level j    segments attend to all tokens of their j-th ancestor    rows are ancestors, and all their descendants

The levels are merged by their log-sum-exps. Each query and each ancestor is in one row of a level. In a pack that is
breadth first, the rows of level 1 are consecutive tokens, so nothing is gathered there.

All is planned on the CPU and sent in one copy: the device is never read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.batch import Pack
from etude.models.blocks import Block, Pair, Plan, ancestors_by_level, group_by_ancestor

Span = tuple[int, int]
"""The first packed token of a segment, and the one after its last."""


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Rows of packed tokens, end to end."""

    tokens: slice | Tensor  # consecutive tokens, or their indices [R] int64
    ends: Tensor  # [B + 1] int32: row b is ends[b] to ends[b + 1] of these tokens
    longest: int
    """The tokens of the longest row."""

    def read(self, x: Tensor) -> Tensor:
        """[P, …] → [R, …]: a view if the tokens are consecutive."""
        return x[self.tokens] if isinstance(self.tokens, slice) else x.index_select(0, self.tokens)

    def write(self, x: Tensor, into: Tensor) -> None:
        """Write [R, …] to the packed tokens of [P, …]."""
        if isinstance(self.tokens, slice):
            into[self.tokens] = x
        else:
            into.index_copy_(0, self.tokens, x)

    def add(self, x: Tensor, into: Tensor) -> None:
        """Add [R, …] to the packed tokens of [P, …]."""
        if isinstance(self.tokens, slice):
            into[self.tokens] += x
        else:
            into.index_add_(0, self.tokens, x)


@dataclass(frozen=True, eq=False)
class LevelCall:
    """One call of a variable-length kernel: the queries of row b see keys of row b."""

    level: int
    query: PackedRows
    key: PackedRows
    window: int | None
    """At level 0, the tokens that a query sees at most, itself included."""

    @property
    def causal(self) -> bool:
        """True if query i of a row sees its keys 0 to i, or those of them in the window; otherwise it sees all."""
        return self.level == 0


class VarlenKernel(Protocol):
    """A kernel that attends within rows of any lengths."""

    def supports(self, q: Tensor, softcap: float | None) -> bool:
        """Return true if the kernel computes attention of such queries [P, Hq, D], with keys and values as wide."""
        ...

    def forward(self, call: LevelCall, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """[R, Hq, D], 2 · [K, Hk, D] → [R, Hq, D], [R, Hq]: the outputs and log-sum-exps of a call's rows."""
        ...

    def backward(
        self, call: LevelCall, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v, given the output and log-sum-exp of the whole softmax."""
        ...


class FlashKernel(VarlenKernel):
    """FlashAttention 2, as torch brings it."""

    def supports(self, q: Tensor, softcap: float | None) -> bool:
        """See `VarlenKernel`. All other attention on a GPU uses the matrix products of `attention_kernels`."""
        is_half = q.dtype in (torch.float16, torch.bfloat16)
        width = q.shape[2]
        return q.device.type == "cuda" and is_half and width % 8 == 0 and width <= 256 and softcap is None

    def forward(self, call: LevelCall, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """See `VarlenKernel`."""
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q,
            k,
            v,
            call.query.ends,
            call.key.ends,
            call.query.longest,
            call.key.longest,
            0.0,
            call.causal and call.window is None,
            False,
            scale=scale,
            window_size_left=_tokens_before(call),
            window_size_right=_tokens_after(call),
        )
        return out, lse.T

    def backward(
        self, call: LevelCall, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `VarlenKernel`."""
        of_q, of_k, of_v = torch.ops.aten._flash_attention_backward(
            grad,
            q,
            k,
            v,
            out,
            lse.T.contiguous(),
            call.query.ends,
            call.key.ends,
            call.query.longest,
            call.key.longest,
            0.0,
            call.causal and call.window is None,
            torch.zeros(2, dtype=torch.uint64, device=q.device),  # the random state of a dropout that never acts
            torch.zeros((), dtype=torch.uint64, device=q.device),
            scale=scale,
            window_size_left=_tokens_before(call),
            window_size_right=_tokens_after(call),
        )
        return of_q, of_k, of_v


FLASH = FlashKernel()


def _tokens_before(call: LevelCall) -> int:
    """Return how many tokens before itself a query sees; −1 for all."""
    return -1 if call.window is None else call.window - 1


def _tokens_after(call: LevelCall) -> int:
    """Return how many tokens after itself a query sees; −1 for all."""
    return 0 if call.causal else -1


class LevelPlan:
    """The calls of a pack, level by level."""

    def __init__(self, pack: Pack) -> None:
        self._pack = pack
        self._spans: list[Span] = list(pairwise(pack.offsets.tolist()))
        self._lengths = [stop - start for start, stop in self._spans]
        self._parents: list[int] = pack.parent.tolist()
        self._levels = ancestors_by_level(self._parents, self._lengths)
        self._planned: dict[int | None, tuple[LevelCall | Block, ...]] = {}

    def calls(self, window: int | None) -> tuple[LevelCall | Block, ...]:
        """Return the calls of all levels, the one of level 0 first.

        With a window, a segment of which some queries see a part of an ancestor is in a masked block.
        """
        if window not in self._planned:
            self._planned[window] = self._plan(window)
        return self._planned[window]

    def _plan(self, window: int | None) -> tuple[LevelCall | Block, ...]:
        if not any(self._lengths):
            return ()
        own = _HostRows.of([[span] for span in self._spans if span[1] > span[0]])
        levels = [0]
        rows = [own, own]
        blocks: list[Block] = []
        for level, pairs in enumerate(self._levels, start=1):
            whole, in_part = (pairs, []) if window is None else self._divide(pairs, window)
            if whole:
                below = group_by_ancestor(whole)
                levels.append(level)
                rows.append(_HostRows.of([[self._spans[segment] for segment in members] for members in below.values()]))
                rows.append(_HostRows.of([[self._spans[ancestor]] for ancestor in below]))
            if in_part:
                blocks += self._masked.across(level, in_part, window)
        on_device = iter(_send(rows, self._pack.ids.device))
        longest = max(self._lengths)
        calls = []
        for level in levels:
            bound = window if level == 0 and window is not None and window < longest else None
            calls.append(LevelCall(level, next(on_device), next(on_device), bound))
        return (*calls, *blocks)

    @cached_property
    def _masked(self) -> Plan:
        """The plan of blocks with masks, which only a window needs."""
        return Plan(self._pack)

    def _divide(self, pairs: Sequence[Pair], window: int) -> tuple[list[Pair], list[Pair]]:
        """Return the pairs (segment, ancestor) that are within the window as a whole, and those that are in part."""
        begins: list[int] = []
        for parent in self._parents:
            begins.append(begins[parent] + self._lengths[parent] if parent >= 0 else 0)
        whole: list[Pair] = []
        in_part: list[Pair] = []
        for segment, ancestor in pairs:
            nearest = begins[segment] - (begins[ancestor] + self._lengths[ancestor] - 1)
            farthest = begins[segment] + self._lengths[segment] - 1 - begins[ancestor]
            if farthest < window:
                whole.append((segment, ancestor))
            elif nearest < window:
                in_part.append((segment, ancestor))
        return whole, in_part


@dataclass(frozen=True, eq=False)
class _HostRows:
    """`PackedRows` before they are on the device."""

    tokens: slice | NDArray[np.int32]
    ends: NDArray[np.int32]

    @classmethod
    def of(cls, rows: Sequence[Sequence[Span]]) -> _HostRows:
        """Build rows that each have the tokens of some segments."""
        spans = [span for row in rows for span in row]
        lengths = [sum(stop - start for start, stop in row) for row in rows]
        ends = np.cumsum([0, *lengths], dtype=np.int32)
        if all(before[1] == after[0] for before, after in pairwise(spans)):
            return cls(slice(spans[0][0], spans[-1][1]), ends)
        return cls(np.concatenate([np.arange(start, stop, dtype=np.int32) for start, stop in spans]), ends)


def _send(rows: Sequence[_HostRows], device: torch.device) -> list[PackedRows]:
    """Copy rows to the device, all in one small copy, which waits for no computation there."""
    arrays = [array for each in rows for array in (each.tokens, each.ends) if not isinstance(array, slice)]
    flat = torch.from_numpy(np.concatenate(arrays))
    parts = iter(torch.split(flat.to(device, non_blocking=True), [len(array) for array in arrays]))
    sent: list[PackedRows] = []
    for each in rows:
        tokens = each.tokens if isinstance(each.tokens, slice) else next(parts).long()
        sent.append(PackedRows(tokens, next(parts), int(np.diff(each.ends).max())))
    return sent
