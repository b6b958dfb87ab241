"""Picking a few tokens of a rollout batch: the same ones for any split of the batch over ranks.

A random pick orders the tokens by a hash of (seed, step, rollout, position). The hash depends on a token's identity and
not on its index, so order, packing and ranks cannot change the pick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from etude.algorithms.view import Ranks, View
from etude.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

# The constants of splitmix64, as signed 64-bit integers: torch has no unsigned ones that multiply.
STEP, FIRST, SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


def splitmix64(x: Tensor) -> Tensor:
    """Apply splitmix64 to each entry: a bijection of 64-bit integers with outputs that look random."""
    x = x + STEP
    x = (x ^ _logical_shift_right(x, 30)) * FIRST
    x = (x ^ _logical_shift_right(x, 27)) * SECOND
    return x ^ _logical_shift_right(x, 31)


def _logical_shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift right with zeros from the left, as on unsigned integers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def token_hashes(view: View, where: Tensor, *, seed: int, step: int) -> Tensor:
    """[n]: a random number for each of these action tokens (indices in [A]), independent of the index itself."""
    offsets = view.rollouts.offsets
    rollout = torch.searchsorted(offsets, where, right=True) - 1
    key = splitmix64(splitmix64(torch.tensor(seed, device=where.device)) ^ step)
    key = splitmix64(key ^ view.batch.require("rollout_id", needed_by="A random choice").long()[rollout])
    return splitmix64(key ^ (where - offsets[rollout]))


def select_lowest(keys: Tensor, count: int, ranks: Ranks) -> Tensor:
    """[n] bool: the keys that are among the `count` lowest over all ranks."""
    best = ranks.all_gather(keys.topk(min(count, len(keys)), largest=False).values)
    if len(best) < count:
        return torch.ones_like(keys, dtype=torch.bool)
    return keys <= best.kthvalue(count).values


def select_highest(view: View, values: Tensor, count: int, *, seed: int, step: int) -> Tensor:
    """[A] bool: the `count` highest values over all ranks; of equal values at the threshold, the lowest hashes."""
    best = view.ranks.all_gather(values.topk(min(count, len(values))).values)
    if len(best) < count:
        return torch.ones_like(values, dtype=torch.bool)
    edge = best.topk(count).values[-1]
    picked = values > edge
    left = count - int(view.ranks.all_reduce(picked.sum()))
    tied = (values == edge).nonzero()[:, 0]
    picked[tied] = select_lowest(token_hashes(view, tied, seed=seed, step=step), left, view.ranks)
    return picked
