"""Which rows of each weight a rank answers for, and how ranks exchange gradients and weights, bucket by bucket.

Every rank computes with whole weights, which its engine samples from too; or with those of one layer after the other:
see `Sections`. What is large and not needed whole is kept in shards, as FSDP2 cuts them, along the first dimension:
float32 weights, their gradient, and AdamW's two moments.

    backward ──► a leaf's gradient ──► bucket ──all to all──► sum, in the order of ranks ──► the owner's rows
                                                                                                │ AdamW
    every rank's leaf  ◄──────────────── bucket ◄──broadcast── the owner's rows ◄───────────────┘

A bucket holds the same stretch of every rank's shard, so that one exchange serves all of them, and a weight that is
larger than a bucket goes through in several. Buckets go in a fixed order, each as soon as its gradients are there, and
those that a micro-batch gave no gradient for go with zeros: whatever each rank computes, all of them exchange alike.
Where weights are brought between gradients, the buckets of a section go when that is over, and not before.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils import get_total_norm

from etude.train.ranks import DistributedRanks

__all__ = ["BUCKET", "Shards", "kept"]

BUCKET = 32 * 2**20
"""Bytes of a bucket: an exchange takes two of them beside what is kept."""


@dataclass(frozen=True)
class _Piece:
    """Rows of every rank's shard of one leaf, and where they stand in that rank's part of a bucket."""

    name: str
    first: int
    last: int
    at: int
    row: int
    """Entries of a row."""


@dataclass
class _Bucket:
    """The same stretch of every rank's shard."""

    dtype: torch.dtype
    pieces: list[_Piece]
    size: int
    """Entries of each rank's part."""


class Shards:
    """The rows of each leaf that this rank owns. All ranks are given the same leaves in the same order."""

    def __init__(
        self,
        leaves: Mapping[str, Tensor],
        ranks: DistributedRanks,
        *,
        widen: bool,
        bucket: int = BUCKET,
        sections: Sequence[Sequence[str]] = (),
    ) -> None:
        """`widen`: whether owners keep their rows in float32, whatever the leaves are in. `sections`: leaves whose
        gradients go when `send` is called for them, in the order in which a backward pass reaches them; without any,
        those of all leaves go by themselves."""
        self._leaves, self._ranks = leaves, ranks
        self._rows = {name: _rows(leaf, ranks.count) for name, leaf in leaves.items()}
        parts = [{name: leaves[name] for name in names} for names in sections or [list(leaves)]]
        cut = [_buckets(part, ranks.count, widen, bucket) for part in parts]
        self._buckets = [each for buckets in cut for each in buckets]
        self._ends = list(accumulate(map(len, cut)))
        self._asked = bool(sections)
        self._last_of = {piece.name: index for index, each in enumerate(self._buckets) for piece in each.pieces}
        self._owned: dict[str, Tensor] = {}
        self._ready: set[str] = set()
        self._moved: set[str] = set()
        self._next = 0
        self._under_way: tuple[Any, _Bucket, Tensor, Tensor] | None = None
        self._meshes: dict[str, DeviceMesh] = {}
        self._seconds = 0.0

    def part(self, name: str, whole: Tensor) -> Tensor:
        """The rows of a leaf, or of a tensor like it, that this rank owns: a view of it."""
        return _lines(whole)[self._rows[name][self._ranks.rank]]

    def owned(self, tensors: Mapping[str, Tensor]) -> None:
        """These are the rows that this rank owns, as they are stepped on."""
        self._owned = dict(tensors)

    def norm(self, gradients: Mapping[str, Tensor]) -> float:
        """The norm of the whole gradient, of which each rank has its rows. A single number is every rank's; it counts
        once."""
        mine = [g for name, g in gradients.items() if self._leaves[name].ndim or self._ranks.rank == 0]
        square = float(get_total_norm(mine)) ** 2
        return math.sqrt(float(self._sum(torch.tensor(square, dtype=torch.float64))))

    def anywhere(self, names: set[str]) -> set[str]:
        """Those that any rank names."""
        every = list(self._leaves)
        told = self._sum(torch.tensor([name in names for name in every], dtype=torch.int64))
        return {name for name, count in zip(every, told.tolist(), strict=True) if count}

    def named(self, name: str, part: Tensor) -> Tensor:
        """Rows as what they are rows of, for a checkpoint that any number of ranks may read: where they lie, which is
        elsewhere than the leaf while an optimizer rests."""
        leaf = self._leaves[name]
        if not leaf.ndim:
            return part.view(())
        place = part.device.type
        if place not in self._meshes:
            self._meshes[place] = init_device_mesh(place, (self._ranks.count,))
        stride = torch.empty(leaf.shape, device="meta").stride()
        return DTensor.from_local(
            part, self._meshes[place], [Shard(0)], run_check=False, shape=leaf.shape, stride=stride
        )

    def waited(self) -> float:
        """Seconds that exchanges were waited for since this was last asked."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    # -- gradients ------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Forget what an update left that was not finished."""
        self._moved.clear()
        self._under_way = None
        self._turn()

    def hook(self, name: str) -> Callable[[Tensor], None]:
        """What a leaf calls when it has its gradient of a micro-batch."""

        def ready(_leaf: Tensor) -> None:
            self._ready.add(name)
            self._moved.add(name)
            if self._asked:
                assert self._last_of[name] >= self._next, "a gradient came after those of its section had gone"
                return
            while self._next < len(self._buckets):
                if any(piece.name not in self._ready for piece in self._buckets[self._next].pieces):
                    return
                self._send()

        return ready

    def send(self, section: int) -> None:
        """The gradients of a section are there: have them go, and those of sections before it."""
        while self._next < self._ends[section]:
            self._send()

    def finish(self) -> None:
        """End a micro-batch: what was not exchanged yet is now. Every rank has as many of them."""
        while self._next < len(self._buckets):
            self._send()
        self._settle()
        self._turn()

    def leave_unmoved(self) -> None:
        """End an update: what got a gradient on no rank has none, and is not stepped on."""
        moved = self.anywhere(self._moved)
        for name, owned in self._owned.items():
            if name not in moved:
                owned.grad = None

    def _turn(self) -> None:
        """The next micro-batch begins."""
        self._ready.clear()
        self._next = 0

    def _send(self) -> None:
        """Have the next bucket's gradients go to their owners, while the backward pass goes on."""
        self._settle()
        bucket, count = self._buckets[self._next], self._ranks.count
        device = self._leaves[bucket.pieces[0].name].device
        sent = torch.zeros(count, bucket.size, dtype=bucket.dtype, device=device)
        for piece in bucket.pieces:
            gradient = self._leaves[piece.name].grad
            if gradient is not None:
                for rank in range(count):
                    rows = _lines(gradient)[_stretch(self._rows[piece.name][rank], piece)]
                    _place(sent[rank], piece, rows).copy_(rows)
            if self._last_of[piece.name] == self._next:
                self._leaves[piece.name].grad = None
        came = torch.empty_like(sent)
        work = dist.all_to_all_single(came.view(-1), sent.view(-1), async_op=True)
        self._under_way = work, bucket, sent, came
        self._next += 1

    def _settle(self) -> None:
        """Add up what came of the bucket that is under way."""
        if self._under_way is None:
            return
        began = time.perf_counter()
        (work, bucket, sent, came), self._under_way = self._under_way, None
        work.wait()
        del work, sent  # whose memory may be what its owner's gradient takes
        self._seconds += time.perf_counter() - began
        total = came[0]
        for other in came[1:]:
            total += other
        for piece in bucket.pieces:
            owned = self._owned[piece.name]
            if owned.grad is None:
                owned.grad = torch.zeros_like(owned)
            rows = owned.grad[_stretch(slice(0, len(owned)), piece)]
            rows += _place(total, piece, rows)

    # -- weights --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def publish(self) -> None:
        """Bring every rank's leaves to the owners' rows, in place."""
        began = time.perf_counter()
        ranks, mine = range(self._ranks.count), self._ranks.rank
        for bucket in self._buckets:
            leaf = self._leaves[bucket.pieces[0].name]
            lines = torch.empty(len(ranks), bucket.size, dtype=leaf.dtype, device=leaf.device)
            for piece in bucket.pieces:
                owned = self._owned[piece.name]
                rows = owned[_stretch(slice(0, len(owned)), piece)]
                _place(lines[mine], piece, rows).copy_(rows)
            for work in [dist.broadcast(lines[rank], src=rank, async_op=True) for rank in ranks]:
                work.wait()
            for piece in bucket.pieces:
                whole = _lines(self._leaves[piece.name])
                for rank in ranks:
                    rows = whole[_stretch(self._rows[piece.name][rank], piece)]
                    rows.copy_(_place(lines[rank], piece, rows))
        self._seconds += time.perf_counter() - began

    @torch.no_grad()
    def bring(self, names: Sequence[str]) -> None:
        """Fill these leaves from the owners' rows, where they lie. What a backward pass kept of them stays good: they
        are what they were."""
        self._wait([work for name in names for work in self._told(name, self._leaves[name].data)])

    @torch.no_grad()
    def gathered(self, name: str) -> Tensor:
        """A leaf as it is now, in memory of its own."""
        whole = torch.empty_like(self._leaves[name], device=self._leaves[name].device, requires_grad=False)
        self._wait(self._told(name, whole))
        return whole

    def _told(self, name: str, whole: Tensor) -> list[Any]:
        """Have every owner tell its rows of a leaf to all: exchanges that are under way."""
        lines, rows = _lines(whole), self._rows[name]
        lines[rows[self._ranks.rank]].copy_(self._owned[name])
        if not whole.ndim:
            return []
        each = ((rank, lines[of]) for rank, of in enumerate(rows))
        return [dist.broadcast(part, src=rank, async_op=True) for rank, part in each if part.numel()]

    def _wait(self, works: Sequence[Any]) -> None:
        began = time.perf_counter()
        for work in works:
            work.wait()
        self._seconds += time.perf_counter() - began

    def _sum(self, values: Tensor) -> Tensor:
        began = time.perf_counter()
        try:
            return self._ranks.all_reduce(values)
        finally:
            self._seconds += time.perf_counter() - began


def kept(tensor: Tensor) -> Tensor:
    """What this rank keeps of a tensor of a checkpoint: of `named` ones its rows, of any other all."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _lines(whole: Tensor) -> Tensor:
    """A tensor as rows; a single number is one row, which every rank has."""
    return whole if whole.ndim else whole.view(1)


def _rows(leaf: Tensor, ranks: int) -> list[slice]:
    """The rows of each rank: as `torch.chunk` and FSDP2 cut them, the last ranks with fewer or none."""
    if not leaf.ndim:
        return [slice(0, 1)] * ranks
    each = -(-len(leaf) // ranks)
    return [slice(min(rank * each, len(leaf)), min((rank + 1) * each, len(leaf))) for rank in range(ranks)]


def _buckets(leaves: Mapping[str, Tensor], ranks: int, widen: bool, size: int) -> list[_Bucket]:
    """The shards of all leaves cut into buckets, in the order in which a backward pass is likely to reach them."""
    made: list[_Bucket] = []
    dtypes: tuple[Any, ...] = ()
    for name, leaf in reversed(list(leaves.items())):
        kept = torch.float32 if widen else leaf.dtype
        row = leaf.numel() // max(len(_lines(leaf)), 1)
        most = max(size // kept.itemsize // ranks, row)
        longest, done = max((rows.stop - rows.start for rows in _rows(leaf, ranks)), default=0), 0
        while done < longest:
            if not made or dtypes != (kept, leaf.dtype, leaf.device) or made[-1].size + row > most:
                made.append(_Bucket(kept, [], 0))
                dtypes = (kept, leaf.dtype, leaf.device)
            bucket = made[-1]
            taken = min(longest - done, (most - bucket.size) // row) if row else longest - done
            bucket.pieces.append(_Piece(name, done, done + taken, bucket.size, row))
            bucket.size += taken * row
            done += taken
    return made


def _stretch(rows: slice, piece: _Piece) -> slice:
    """The rows of a rank that a piece speaks of; the last ranks may have fewer of them than it says."""
    return slice(min(rows.start + piece.first, rows.stop), min(rows.start + piece.last, rows.stop))


def _place(line: Tensor, piece: _Piece, rows: Tensor) -> Tensor:
    """Where these rows of a piece stand in a rank's part of a bucket."""
    return line[piece.at : piece.at + rows.numel()].view(rows.shape)
