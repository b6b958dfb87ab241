"""Publishing through a directory that trainer and servers share: slow, simple, and across any machines.

    directory/
      publish-4711-7/              a publish of process 4711, renamed to this once it is complete
        weights-00001.safetensors …
      .publish-4711-8.writing/     a publish that is being written

A file holds at most one bucket. At most two buckets are in memory while files are written, one tensor after another.
The next publish removes the directory that servers have read, so at most two versions exist.
With `delta`, a publish writes only parts of the model (a layer's attention, a layer's MLP, the embedding …) that differ
from the previous publish. If a replica missed the previous publish, everything is written.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from etude.errors import CheckpointError
from etude.sync.transport import Bucket, WeightTransport
from etude.sync.weights import TensorMeta, WeightStream, dtype_name, gather_full_tensor


class DiskTransport(WeightTransport):
    """The transport to servers that read a shared directory."""

    def __init__(
        self, directory: Path, bucket_bytes: int, dtype: torch.dtype | None = None, *, delta: bool = False
    ) -> None:
        self._directory = directory.resolve()
        self._bucket_bytes = bucket_bytes
        self._dtype = dtype
        self._delta = delta
        self._digests: dict[str, bytes] = {}  # the hash of a part's weights, by the name of its first weight
        self._count = 0

    async def buckets(self, weights: Iterable[tuple[str, Tensor]], whole: bool, /) -> AsyncGenerator[Bucket, None]:
        """Yield the weights as one bucket, a directory."""
        digests = {} if whole else dict(self._digests)
        made, pieces = await asyncio.to_thread(self.write, WeightStream(weights, self._dtype), digests)
        yield Bucket("disk", tuple(pieces), {"directory": str(made)})

    def close(self) -> None:
        shutil.rmtree(self._directory / self._name(), ignore_errors=True)

    def write(self, stream: WeightStream, digests: dict[str, bytes]) -> tuple[Path, list[TensorMeta]]:
        """Write the parts whose digest is not in `digests`; return the completed directory and its tensors."""
        old = self._directory / self._name()
        self._count = self._count + 1
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
        """Write parts as they arrive; discard a part that turns out unchanged."""
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


def module_of(name: str) -> str:
    """Return the part of a model that a weight belongs to; servers may fuse the weights of a part.

    For `model.layers.0.self_attn.q_proj.weight` it is the layer's attention, `model.layers.0.self_attn`.
    """
    return ".".join(name.split(".")[:-2]) or name


def _copy_tensors(stream: WeightStream, make_room: Callable[[int], None]) -> Iterator[tuple[str, Tensor]]:
    """Yield copies in CPU memory, in the published dtype; make room for each before it is copied."""
    while (following := stream.peek()) is not None:
        name, tensor, dtype = following
        make_room(stream.next_nbytes())
        stream.advance()
        yield name, torch.empty(tensor.shape, dtype=dtype).copy_(gather_full_tensor(tensor))


class _ShardWriter:
    """A writer of files of at most one bucket each: committed tensors, then the pending part."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._count = 0
        self._committed: dict[str, Tensor] = {}
        self.pending: dict[str, Tensor] = {}
        """The tensors of the current part that are not in a file yet."""
        self._pending_files: list[Path] = []

    def make_room(self, nbytes: int) -> None:
        """Write the tensors in memory if `nbytes` more do not fit beside them."""
        if self._committed and self._size() + nbytes > self._max_bytes:
            self._save(self._committed)
        if self.pending and self._size() + nbytes > self._max_bytes:
            self._pending_files.append(self._save(self.pending))

    def commit(self) -> None:
        """Keep the pending part."""
        self._committed |= self.pending
        self.pending.clear()
        self._pending_files.clear()

    def discard(self) -> None:
        """Drop the pending part, and remove its files."""
        self.pending.clear()
        while self._pending_files:
            self._pending_files.pop().unlink()

    def write(self) -> None:
        """Write the committed tensors that are still in memory."""
        if self._committed:
            self._save(self._committed)

    def _size(self) -> int:
        return sum(tensor.nbytes for part in (self._committed, self.pending) for tensor in part.values())

    def _save(self, tensors: dict[str, Tensor]) -> Path:
        """Write these tensors to the next file, and release them."""
        self._count += 1
        path = self._directory / f"weights-{self._count:05d}.safetensors"
        save_file(tensors, path, metadata={"format": "pt"})
        tensors.clear()
        return path
