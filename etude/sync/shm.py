"""Publishing within one machine: through two buckets of shared memory, and no byte over a socket.

    trainer ──copy──► │ slot 0 │ ──copy──► replica's own weights
                      │ slot 1 │ is filled meanwhile, and then they change places

vLLM's plug-in maps the file. SGLang takes torch's handles of it, in the pickle that its endpoint for tensors expects:
it reads only what torch itself makes of shared tensors, so the pickle is spelled out here, without a tensor in it.
"""

from __future__ import annotations

import asyncio
import io
import pickle
from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from etude.sync.plan import Piece, Stream
from etude.sync.server import Parcel, Server
from etude.sync.slots import Place, Slot, Slots

__all__ = ["ShmCarrier"]


class ShmCarrier:
    """A `Carrier` to servers of this machine."""

    def __init__(self, bucket_bytes: int, dtype: torch.dtype | None = None) -> None:
        self._slots = Slots(bucket_bytes)
        self._dtype = dtype

    @property
    def held_bytes(self) -> int:
        """What it holds between publishes, and at most in one: both slots."""
        return self._slots.capacity

    def parcels(self, weights: Iterable[tuple[str, Tensor]], _whole: bool, /) -> _Filled:
        """The weights, a slot at a time."""
        return _Filled(self._slots, Stream(weights, self._dtype))

    async def join(self, server: Server) -> None:
        """A file needs no introduction."""

    def leave(self, server: Server) -> None:
        """Nor a farewell."""

    def close(self) -> None:
        """Give the shared memory back."""
        self._slots.close()


class _Filled:
    """Slots, filled one after the other."""

    def __init__(self, slots: Slots, stream: Stream) -> None:
        self._slots = slots
        self._stream = stream

    async def next(self) -> Parcel | None:
        """The next slot that is full."""
        slot = self._slots.next()
        pieces = await asyncio.to_thread(slot.fill, self._stream)
        if not pieces:
            return None
        place = slot.place()
        where = {"path": place.path, "base": place.base, "nbytes": place.nbytes}
        return Parcel("shm", tuple(pieces), where, handed=lambda server: _handles(slot, place, pieces, server))


def _handles(slot: Slot, place: Place, pieces: Sequence[Piece], server: Server) -> str:
    """The pieces as torch hands shared tensors over, in base 64; each rank of the server will map the slot once."""
    slot.lent(server.ranks)
    storage = _Storage(place)
    told = io.BytesIO()
    _Spelled(told).dump([(piece.name, _View(storage, piece)) for piece in pieces])
    return b64encode(told.getvalue()).decode()


@dataclass(frozen=True, eq=False)
class _Storage:
    """Stands for the slot's storage."""

    place: Place


@dataclass(frozen=True, eq=False)
class _Typed:
    """Stands for the storage, read as one dtype."""

    storage: _Storage
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class _View:
    """Stands for a tensor in the storage."""

    storage: _Storage
    piece: Piece


class _Spelled(pickle.Pickler):
    """Writes, for what stands for a shared tensor, what torch writes for the tensor itself."""

    def reducer_override(self, obj: Any) -> Any:
        """How each is made again where it is read."""
        if isinstance(obj, _Storage):
            place = obj.place
            made = (torch.UntypedStorage, place.manager, place.handle, place.nbytes)
            return reductions.rebuild_storage_filename, made
        if isinstance(obj, _Typed):
            return reductions.rebuild_typed_storage, (obj.storage, obj.dtype)
        if isinstance(obj, _View):
            piece = obj.piece
            dtype: torch.dtype = getattr(torch, piece.dtype)
            strides = tuple(prod(piece.shape[at + 1 :]) for at in range(len(piece.shape)))
            laid = (piece.offset // dtype.itemsize, torch.Size(piece.shape), strides, False)
            return reductions.rebuild_tensor, (torch.Tensor, _Typed(obj.storage, dtype), laid)
        return NotImplemented
