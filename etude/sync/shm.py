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

from etude.sync.shared_buckets import DoubleBuffer, SharedBucket, SharedMemoryHandle
from etude.sync.transport import Bucket, WeightReceiver
from etude.sync.weights import TensorMeta, WeightStream

__all__ = ["ShmTransport"]


class ShmTransport:
    """A `WeightTransport` to servers of this machine."""

    def __init__(self, bucket_bytes: int, dtype: torch.dtype | None = None) -> None:
        self._slots = DoubleBuffer(bucket_bytes)
        self._dtype = dtype

    @property
    def held_bytes(self) -> int:
        """What it holds between publishes, and at most in one: both slots."""
        return self._slots.capacity

    def buckets(self, weights: Iterable[tuple[str, Tensor]], _whole: bool, /) -> _ShmBuckets:
        """The weights, a slot at a time."""
        return _ShmBuckets(self._slots, WeightStream(weights, self._dtype))

    async def connect(self, server: WeightReceiver) -> None:
        """A file needs no introduction."""

    def disconnect(self, server: WeightReceiver) -> None:
        """Nor a farewell."""

    def close(self) -> None:
        """Give the shared memory back."""
        self._slots.close()


class _ShmBuckets:
    """Slots, filled one after the other."""

    def __init__(self, slots: DoubleBuffer, stream: WeightStream) -> None:
        self._slots = slots
        self._stream = stream

    async def next(self) -> Bucket | None:
        """The next slot that is full."""
        slot = self._slots.next()
        pieces = await asyncio.to_thread(slot.fill, self._stream)
        if not pieces:
            return None
        place = slot.get_handle()
        where = {"path": place.path, "base": place.base, "nbytes": place.nbytes}
        return Bucket(
            "shm", tuple(pieces), where, tensor_handles=lambda server: _pickle_handles(slot, place, pieces, server)
        )


def _pickle_handles(
    slot: SharedBucket, handle: SharedMemoryHandle, pieces: Sequence[TensorMeta], server: WeightReceiver
) -> str:
    """The pieces as torch hands shared tensors over, in base 64; each rank of the server will map the slot once."""
    slot.add_readers(server.ranks)
    storage = _StorageStub(handle)
    pickled = io.BytesIO()
    _SharedTensorPickler(pickled).dump([(piece.name, _TensorStub(storage, piece)) for piece in pieces])
    return b64encode(pickled.getvalue()).decode()


@dataclass(frozen=True, eq=False)
class _StorageStub:
    """Stands for the slot's storage."""

    handle: SharedMemoryHandle


@dataclass(frozen=True, eq=False)
class _TypedStorageStub:
    """Stands for the storage, read as one dtype."""

    storage: _StorageStub
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class _TensorStub:
    """Stands for a tensor in the storage."""

    storage: _StorageStub
    piece: TensorMeta


class _SharedTensorPickler(pickle.Pickler):
    """Writes, for what stands for a shared tensor, what torch writes for the tensor itself."""

    def reducer_override(self, obj: Any) -> Any:
        """How each is made again where it is read."""
        if isinstance(obj, _StorageStub):
            place = obj.handle
            made = (torch.UntypedStorage, place.manager, place.handle, place.nbytes)
            return reductions.rebuild_storage_filename, made
        if isinstance(obj, _TypedStorageStub):
            return reductions.rebuild_typed_storage, (obj.storage, obj.dtype)
        if isinstance(obj, _TensorStub):
            piece = obj.piece
            dtype: torch.dtype = getattr(torch, piece.dtype)
            strides = tuple(prod(piece.shape[at + 1 :]) for at in range(len(piece.shape)))
            laid = (piece.offset // dtype.itemsize, torch.Size(piece.shape), strides, False)
            return reductions.rebuild_tensor, (torch.Tensor, _TypedStorageStub(obj.storage, dtype), laid)
        return NotImplemented
