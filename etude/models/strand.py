"""Ranks that compute one pack together: what they tell each other, and how gradients come back.

The tokens of a pack are cut into strands, end to end, one for each rank. Whatever is done token by token (embedding,
norms, sums, logits) each rank does for its own strand alone. Attention is what tokens know of each other: there ranks
trade tokens for heads, so that each of them sees every token with some of the heads, and trade back.

    [n, H, D] every rank: its strand, all heads  ──dealt──►  [N, H/ranks, D] all tokens, its heads
                                                 ◄─collected──

Every exchange is a function with a gradient, and its backward pass is the opposite exchange. A weight is whole on every
rank and gets, from each, the gradient of what that rank did with it: the sum over ranks is the gradient, and nothing is
counted twice.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from etude.batch import Pack
from etude.models.attention import PackedAttention

__all__ = ["Side", "StrandAttention", "added", "gathered", "own", "told"]


class Side:
    """The ranks along one side of a mesh, as one of them sees them. All of them make the same calls in one order."""

    def __init__(self, group: Any = None, rank: int = 0, count: int = 1) -> None:
        """`group`: the process group of exactly these ranks; a rank that is alone needs none."""
        self.group, self.rank, self.count = group, rank, count
        self._seconds = 0.0

    def gather(self, mine: Tensor) -> Tensor:
        """[n, …] of each → [count · n, …], in rank order."""
        whole = mine.new_empty((self.count * len(mine), *mine.shape[1:]))
        if whole.numel():
            began = time.perf_counter()
            dist.all_gather(list(whole.chunk(self.count)), mine.contiguous(), group=self.group)
            self._seconds += time.perf_counter() - began
        return whole

    def swap(self, sent: Tensor) -> Tensor:
        """[count, …] → [count, …]: entry r goes to rank r, and what came from rank r is entry r."""
        sent = sent.contiguous()
        came = torch.empty_like(sent)
        if sent.numel():
            began = time.perf_counter()
            dist.all_to_all_single(came.view(-1), sent.view(-1), group=self.group)
            self._seconds += time.perf_counter() - began
        return came

    def waited(self) -> float:
        """Seconds that exchanges took since this was last asked."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def gathered(x: Tensor, side: Side) -> Tensor:
    """[n, …] of each rank → [count · n, …], the same on all of them. Each may do something else with it."""
    if side.count == 1:
        return x
    out: Tensor = _Gathered.apply(x, side)  # type: ignore[no-untyped-call]
    return out


def added(x: Tensor, side: Side) -> Tensor:
    """[count · n, …] of each rank → [n, …]: the sum over ranks, in their order, of this rank's own stretch."""
    if side.count == 1:
        return x
    out: Tensor = _Added.apply(x, side)  # type: ignore[no-untyped-call]
    return out


def own(rows: int, side: Side) -> slice:
    """Which of so many rows are this rank's; the last ranks may have fewer, or none."""
    each = -(-rows // side.count)
    return slice(min(side.rank * each, rows), min((side.rank + 1) * each, rows))


def told(x: Tensor, rows: int, side: Side) -> Tensor:
    """[own rows, …] of each rank → [rows, …], the same on all of them, which then do the same with it: a rank's own
    rows have their gradient there already."""
    if side.count == 1:
        return x
    out: Tensor = _Told.apply(x, rows, side)  # type: ignore[no-untyped-call]
    return out


class StrandAttention:
    """An `AttentionFn` for a strand of a pack: it trades tokens for heads, attends over the whole pack, and trades
    back.

    A key head that several ranks' queries read goes to each of them.
    """

    def __init__(self, pack: Pack, side: Side, tokens: int) -> None:
        """`tokens`: of the strands together, the pack's and what fills the last of them up."""
        self._attend, self._side = PackedAttention(pack), side
        self._tokens, self._short = len(pack.ids), tokens - len(pack.ids)

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """See `AttentionFn`."""
        if self._side.count > 1:
            q, k, v = self._dealt(q, k, v)
        real = slice(0, self._tokens)
        seen = self._attend(layer, q[real], k[real], v[real], scale=scale, window=window, softcap=softcap)
        seen = pad(seen, (0, 0, 0, 0, 0, self._short)) if self._short else seen
        if self._side.count == 1:
            return seen
        back: Tensor = _Collected.apply(seen, self._side)  # type: ignore[no-untyped-call]
        return back

    def _dealt(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """[n, H, D] of all heads → [N, H/count, D], in one exchange."""
        count = self._side.count
        copies = count // math.gcd(k.shape[1], count)
        if copies > 1:
            k, v = k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1)
        hands = [_hands(x, count) for x in (q, k, v)]
        dealt: Tensor = _Dealt.apply(torch.cat(hands, 2), self._side)  # type: ignore[no-untyped-call]
        return torch.split(dealt, [hand.shape[2] for hand in hands], 1)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, side: Side) -> Tensor:
        ctx.side = side
        return side.gather(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _sum(grads[0], ctx.side), None


class _Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, side: Side) -> Tensor:
        ctx.side = side
        return _sum(x, side)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.side.gather(grads[0]), None


class _Told(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int, side: Side) -> Tensor:
        ctx.own = own(rows, side)
        full = x.new_zeros((-(-rows // side.count), *x.shape[1:]))
        full[: len(x)] = x
        return side.gather(full)[:rows]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0][ctx.own], None, None


class _Dealt(torch.autograd.Function):
    """[n, count, h, D] → [count · n, h, D]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, side: Side) -> Tensor:
        ctx.side = side
        return side.swap(x.transpose(0, 1)).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _back(grads[0], ctx.side), None


class _Collected(torch.autograd.Function):
    """[count · n, h, D] → [n, count · h, D]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, side: Side) -> Tensor:
        ctx.side = side
        return _back(x, side).flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hands = _hands(grads[0], ctx.side.count)
        return ctx.side.swap(hands.transpose(0, 1)).flatten(0, 1), None


def _back(x: Tensor, side: Side) -> Tensor:
    """[count · n, h, D], all tokens with this rank's heads → [n, count, h, D], its tokens with all heads."""
    return side.swap(_strands(x, side.count)).transpose(0, 1)


def _sum(x: Tensor, side: Side) -> Tensor:
    """[count · n, …] of each → [n, …]; in half precision the sum is rounded once."""
    came = side.swap(_strands(x, side.count))
    return came.sum(0, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)


def _hands(x: Tensor, count: int) -> Tensor:
    """[n, H, D] → [n, count, H/count, D]."""
    return x.reshape(len(x), count, x.shape[1] // count, x.shape[2])


def _strands(x: Tensor, count: int) -> Tensor:
    """[count · n, …] → [count, n, …]."""
    return x.reshape(count, len(x) // count, *x.shape[1:])
