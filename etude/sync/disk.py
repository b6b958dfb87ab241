"""Publishing through a directory that trainer and servers both see: slow, simple, and across any machines.

    directory/
      publish-4711-7/              a publish of process 4711, under its name once it is whole
        weights-00001.safetensors …
      .publish-4711-8.writing/     one that is being written

Files have at most a bucket each, and no more than two of those are held while they are written, one tensor after the
other. What servers have read is removed at the next publish, so at most two versions lie there. With `delta`, only the
parts of the model (a layer's attention, a layer's MLP, the embedding …) are written in which a weight differs from the
publish before, unless a replica missed that one.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from etude.errors import CheckpointError
from etude.sync.transport import Bucket, WeightReceiver
from etude.sync.weights import TensorMeta, WeightStream, dtype_name, gather_full_tensor

__all__ = ["DiskTransport", "module_of"]


class DiskTransport:
    """A `WeightTransport` to servers that see a directory."""

    def __init__(
        self, directory: Path, bucket_bytes: int, dtype: torch.dtype | None = None, *, delta: bool = False
    ) -> None:
        self._directory = directory.resolve()
        self._bucket_bytes = bucket_bytes
        self._dtype = dtype
        self._delta = delta
        self._digests: dict[str, bytes] = {}  # what the weights of a part hash to, by the first's name
        self._count = 0

    def buckets(self, weights: Iterable[tuple[str, Tensor]], whole: bool, /) -> _DiskBuckets:
        """The weights, in one directory."""
        return _DiskBuckets(self, WeightStream(weights, self._dtype), {} if whole else dict(self._digests))

    async def connect(self, server: WeightReceiver) -> None:
        """A directory needs no introduction."""

    def disconnect(self, server: WeightReceiver) -> None:
        """Nor a farewell."""

    def close(self) -> None:
        """Remove what lies there."""
        shutil.rmtree(self._directory / self._name(), ignore_errors=True)

    def write(self, stream: WeightStream, digests: dict[str, bytes]) -> tuple[Path, list[TensorMeta]]:
        """Write what differs from what is known, in files, under its name when it is whole."""
        old, self._count = self._directory / self._name(), self._count + 1
        made = self._directory / self._name()
        writing = made.with_name(f".{made.name}.writing")
        try:
            shutil.rmtree(writing, ignore_errors=True)
            shutil.rmtree(made, ignore_errors=True)
            writing.mkdir(parents=True)
            pieces = list(self._files(writing, stream, digests))
            writing.rename(made)
            shutil.rmtree(old, ignore_errors=True)
        except OSError as error:
            shutil.rmtree(writing, ignore_errors=True)
            raise CheckpointError(
                f"The weights could not be written to {made} ({error}). Make room there, or name another `directory`."
            ) from error
        return made, pieces

    def _files(self, directory: Path, stream: WeightStream, digests: dict[str, bytes]) -> Iterator[TensorMeta]:
        """Write parts as they come; one that turns out not to have changed is taken back."""
        files = _ShardWriter(directory, self._bucket_bytes)
        for _, tensors in groupby(_copy_tensors(stream, files.make_room), key=lambda named: module_of(named[0])):
            pieces, digest = list[TensorMeta](), hashlib.blake2b(digest_size=16)
            for name, tensor in tensors:
                files.pending[name] = tensor
                pieces.append(TensorMeta(name, dtype_name(tensor.dtype), tuple(tensor.shape), 0))
                if self._delta:
                    digest.update(name.encode())
                    digest.update(tensor.view(-1).view(torch.uint8).numpy().data)
            first = pieces[0].name
            if self._delta:
                self._digests[first] = digest.digest()
            if self._delta and digests.get(first) == self._digests[first]:
                files.discard()
                continue
            files.commit()
            yield from pieces
        files.write()

    def _name(self) -> str:
        return f"publish-{os.getpid()}-{self._count}"


class _DiskBuckets:
    """One parcel: a directory."""

    def __init__(self, transport: DiskTransport, stream: WeightStream, digests: dict[str, bytes]) -> None:
        self._transport = transport
        self._stream = stream
        self._digests = digests
        self._done = False

    async def next(self) -> Bucket | None:
        """The directory, once."""
        if self._done:
            return None
        self._done = True
        made, pieces = await asyncio.to_thread(self._transport.write, self._stream, self._digests)
        return Bucket("disk", tuple(pieces), {"directory": str(made)})


def module_of(name: str) -> str:
    """The part of a model that a weight belongs to, and that servers may compute as one map: the attention of a layer
    for `model.layers.0.self_attn.q_proj.weight`."""
    return ".".join(name.split(".")[:-2]) or name


def _copy_tensors(stream: WeightStream, make_room: Callable[[int], None]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of their own, in memory of the processor, in the dtype that they travel in; each once there is room."""
    while (following := stream.peek()) is not None:
        name, tensor, dtype = following
        make_room(stream.next_nbytes())
        stream.advance()
        yield name, torch.empty(tensor.shape, dtype=dtype).copy_(gather_full_tensor(tensor))


class _ShardWriter:
    """Files of at most a bucket each: what is to stay, and after it the part that is coming in."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self._directory, self._max_bytes, self._count = directory, max_bytes, 0
        self._committed: dict[str, Tensor] = {}
        self.pending: dict[str, Tensor] = {}
        """The part that is coming in, as far as no file has it."""
        self._pending_files: list[Path] = []

    def make_room(self, nbytes: int) -> None:
        """Write what is held, if so much more does not fit in beside it."""
        if self._committed and self._size() + nbytes > self._max_bytes:
            self._save(self._committed)
        if self.pending and self._size() + nbytes > self._max_bytes:
            self._pending_files.append(self._save(self.pending))

    def commit(self) -> None:
        """The part is to stay."""
        self._committed |= self.pending
        self.pending.clear()
        self._pending_files.clear()

    def discard(self) -> None:
        """The part is not to stay."""
        self.pending.clear()
        while self._pending_files:
            self._pending_files.pop().unlink()

    def write(self) -> None:
        """Write what is left of all that is to stay."""
        if self._committed:
            self._save(self._committed)

    def _size(self) -> int:
        return sum(tensor.nbytes for part in (self._committed, self.pending) for tensor in part.values())

    def _save(self, tensors: dict[str, Tensor]) -> Path:
        """Write these, and let go of them."""
        self._count += 1
        path = self._directory / f"weights-{self._count:05d}.safetensors"
        save_file(tensors, path, metadata={"format": "pt"})
        tensors.clear()
        return path
