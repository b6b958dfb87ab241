"""Publishing within one machine: through two buckets of shared memory, with no weights over a socket.

    trainer ──copy──► │ bucket 0 │ ──copy──► replica's own weights
                      │ bucket 1 │ is filled meanwhile, and then they swap

vLLM's plug-in maps the file. SGLang takes torch's handles, in the pickle that its endpoint for tensors expects.
That endpoint accepts only torch's own form of shared tensors, so this module writes that form without real tensors.
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


class ShmTransport:
    """A `WeightTransport` to servers on this machine."""

    def __init__(self, bucket_bytes: int, dtype: torch.dtype | None = None) -> None:
        self._slots = DoubleBuffer(bucket_bytes)
        self._dtype = dtype

    @property
    def held_bytes(self) -> int:
        """The bytes that it holds, between publishes and during one: both buckets."""
        return self._slots.capacity

    def buckets(self, weights: Iterable[tuple[str, Tensor]], _whole: bool, /) -> _ShmBuckets:
        """Return the weights as a stream of buckets."""
        return _ShmBuckets(self._slots, WeightStream(weights, self._dtype))

    async def connect(self, server: WeightReceiver) -> None:
        """Do nothing: servers need no connection."""

    def disconnect(self, server: WeightReceiver) -> None:
        """Do nothing: servers have no connection."""

    def close(self) -> None:
        """Free the shared memory."""
        self._slots.close()


class _ShmBuckets:
    """A stream of buckets, filled alternately."""

    def __init__(self, slots: DoubleBuffer, stream: WeightStream) -> None:
        self._slots = slots
        self._stream = stream

    async def next(self) -> Bucket | None:
        """Fill the next bucket and return it; None at the end."""
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
    """Pickle the pieces as torch passes shared tensors, in base 64; each rank of the server maps the bucket once."""
    slot.add_readers(server.ranks)
    storage = _StorageStub(handle)
    pickled = io.BytesIO()
    _SharedTensorPickler(pickled).dump([(piece.name, _TensorStub(storage, piece)) for piece in pieces])
    return b64encode(pickled.getvalue()).decode()


@dataclass(frozen=True, eq=False)
class _StorageStub:
    """A stub for the bucket's storage."""

    handle: SharedMemoryHandle


@dataclass(frozen=True, eq=False)
class _TypedStorageStub:
    """A stub for the storage, read as one dtype."""

    storage: _StorageStub
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class _TensorStub:
    """A stub for a tensor in the storage."""

    storage: _StorageStub
    piece: TensorMeta


class _SharedTensorPickler(pickle.Pickler):
    """A pickler that writes each stub as torch writes the shared tensor or storage itself."""

    def reducer_override(self, obj: Any) -> Any:
        """Return the function and the arguments that rebuild the object where it is read."""
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
