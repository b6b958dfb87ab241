"""Publishing between processes that share a GPU: through two buckets opened by CUDA IPC handles.

No weight leaves the device: the trainer fills a bucket by copies on the GPU, and the server copies from it on the GPU.
Only the bucket's handle, a few hundred bytes, is sent.

    waits for      the trainer's own copies, before a bucket's handle is sent
    unblocked by   the device
"""

from __future__ import annotations

import asyncio
import io
from base64 import b64encode
from collections.abc import AsyncGenerator, Iterable, Sequence
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from etude.errors import ConfigError, EngineError
from etude.sync.transport import Bucket, WeightReceiver, WeightTransport
from etude.sync.weights import TensorMeta, WeightStream, fill_bucket

HANDLE_TYPES = (int, bytes, int, int, bool, bytes, int, bytes, bool)
"""The types of torch's arguments that open a tensor of a GPU elsewhere, after its shape, dtype and strides.

They are device, memory's handle, size, offset, whether it requires a gradient, the counter's handle and offset, the
event's handle, and whether to wait for it."""


class IpcTransport(WeightTransport):
    """The transport to servers on the trainer's GPU."""

    def __init__(
        self, bucket_bytes: int, dtype: torch.dtype | None = None, *, device: torch.device | None = None
    ) -> None:
        """device: the GPU of the weights; by default the caller's, because threads may differ in theirs."""
        if not torch.cuda.is_available():
            raise ConfigError(
                "`weight_transport=ipc` shares memory of an NVIDIA GPU, and torch sees none here. On one machine "
                "without a GPU set `weight_transport=shm`."
            )
        self._bucket_bytes = bucket_bytes
        self._dtype = dtype
        self._device = device or torch.device("cuda", torch.cuda.current_device())
        self._buckets: list[Tensor | None] = [None, None]
        self._turn = 0

    async def buckets(self, weights: Iterable[tuple[str, Tensor]], _whole: bool, /) -> AsyncGenerator[Bucket, None]:
        """Yield the weights as buckets, which are filled alternately."""
        stream = WeightStream(weights, self._dtype)
        while (filled := await asyncio.to_thread(self._fill, stream)) is not None:
            bucket, pieces = filled
            handle = [_to_json(part) for part in _handle(bucket)]
            pickled = partial(_pickle_handles, bucket, pieces)
            yield Bucket("ipc", tuple(pieces), {"handle": handle}, tensor_handles=pickled)

    def close(self) -> None:
        """Free the device's memory once the other processes have closed their handles."""
        self._buckets = [None, None]
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]

    def _fill(self, stream: WeightStream) -> tuple[Tensor, list[TensorMeta]] | None:
        """Fill the bucket whose turn it is; None at the end."""
        if not stream.next_nbytes():
            return None
        bucket = self._next_bucket(stream.next_nbytes())
        pieces = fill_bucket(bucket, stream)
        torch.cuda.synchronize(bucket.device)
        return bucket, pieces

    def _next_bucket(self, nbytes: int) -> Tensor:
        """Return the bucket whose turn it is, with room for a tensor of this size."""
        self._turn = 1 - self._turn
        held = self._buckets[self._turn]
        if held is None or held.nbytes < nbytes:
            self._buckets[self._turn] = None
            held = torch.empty(max(nbytes, self._bucket_bytes), dtype=torch.uint8, device=self._device)
            self._buckets[self._turn] = held
        return held


def _handle(bucket: Tensor) -> Sequence[Any]:
    """Return torch's arguments to open the bucket: device, sizes, CUDA's handles and torch's reference counter."""
    _, arguments = reduce_tensor(bucket)  # type: ignore[no-untyped-call]
    found = tuple(map(type, arguments[6:]))
    if found != HANDLE_TYPES:
        names = ", ".join(kind.__name__ for kind in found)
        raise EngineError(
            f"torch {torch.__version__} describes a tensor that another process opens in a form that Etude does not "
            f"know ({names}). Set `weight_transport=shm`."
        )
    device, shared, size, offset, _, counter, counter_offset, event, synced = arguments[6:]
    return device, size, shared, offset, counter, counter_offset, event, synced


def _to_json(part: Any) -> Any:
    """Return the value as JSON; bytes become base 64."""
    return {"bytes": b64encode(part).decode()} if isinstance(part, bytes) else part


def _pickle_handles(bucket: Tensor, pieces: Sequence[TensorMeta], _server: WeightReceiver) -> str:
    """Pickle the pieces as torch passes GPU tensors to another process, in base 64."""
    pickled = io.BytesIO()
    _GpuTensorPickler(pickled).dump([(piece.name, piece.view_in(bucket)) for piece in pieces])
    return b64encode(pickled.getvalue()).decode()


class _GpuTensorPickler(ForkingPickler):
    """A pickler that names a tensor's GPU by its UUID, as SGLang does: the server may number the GPUs differently."""

    def reducer_override(self, obj: Any) -> Any:
        """Return the function and the arguments that rebuild the object where it is read."""
        if not isinstance(obj, Tensor):
            return NotImplemented
        rebuild, arguments = reduce_tensor(obj)  # type: ignore[no-untyped-call]
        uuid = str(torch.cuda.get_device_properties(obj.device).uuid)
        return rebuild, (*arguments[:6], uuid, *arguments[7:])
