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
from etude.sync.plan import Piece, Stream, dtype_name, gathered
from etude.sync.server import Parcel, Server

__all__ = ["DiskCarrier", "part_of"]


class DiskCarrier:
    """A `Carrier` to servers that see a directory."""

    def __init__(
        self, directory: Path, bucket_bytes: int, dtype: torch.dtype | None = None, *, delta: bool = False
    ) -> None:
        self._directory = directory.resolve()
        self._bucket_bytes = bucket_bytes
        self._dtype = dtype
        self._delta = delta
        self._known: dict[str, bytes] = {}  # what the weights of a part hash to, by the first's name
        self._count = 0

    def parcels(self, weights: Iterable[tuple[str, Tensor]], whole: bool, /) -> _Written:
        """The weights, in one directory."""
        return _Written(self, Stream(weights, self._dtype), {} if whole else dict(self._known))

    async def join(self, server: Server) -> None:
        """A directory needs no introduction."""

    def leave(self, server: Server) -> None:
        """Nor a farewell."""

    def close(self) -> None:
        """Remove what lies there."""
        shutil.rmtree(self._directory / self._name(), ignore_errors=True)

    def write(self, stream: Stream, known: dict[str, bytes]) -> tuple[Path, list[Piece]]:
        """Write what differs from what is known, in files, under its name when it is whole."""
        old, self._count = self._directory / self._name(), self._count + 1
        made = self._directory / self._name()
        writing = made.with_name(f".{made.name}.writing")
        try:
            shutil.rmtree(writing, ignore_errors=True)
            shutil.rmtree(made, ignore_errors=True)
            writing.mkdir(parents=True)
            pieces = list(self._files(writing, stream, known))
            writing.rename(made)
            shutil.rmtree(old, ignore_errors=True)
        except OSError as error:
            shutil.rmtree(writing, ignore_errors=True)
            raise CheckpointError(
                f"The weights could not be written to {made} ({error}). Make room there, or name another `directory`."
            ) from error
        return made, pieces

    def _files(self, directory: Path, stream: Stream, known: dict[str, bytes]) -> Iterator[Piece]:
        """Write parts as they come; one that turns out not to have changed is taken back."""
        files = _Files(directory, self._bucket_bytes)
        for _, tensors in groupby(_each(stream, files.make_room), key=lambda named: part_of(named[0])):
            pieces, told = list[Piece](), hashlib.blake2b(digest_size=16)
            for name, tensor in tensors:
                files.held[name] = tensor
                pieces.append(Piece(name, dtype_name(tensor.dtype), tuple(tensor.shape), 0))
                if self._delta:
                    told.update(name.encode())
                    told.update(tensor.view(-1).view(torch.uint8).numpy().data)
            first = pieces[0].name
            if self._delta:
                self._known[first] = told.digest()
            if self._delta and known.get(first) == self._known[first]:
                files.take_back()
                continue
            files.keep()
            yield from pieces
        files.write()

    def _name(self) -> str:
        return f"publish-{os.getpid()}-{self._count}"


class _Written:
    """One parcel: a directory."""

    def __init__(self, carrier: DiskCarrier, stream: Stream, known: dict[str, bytes]) -> None:
        self._carrier = carrier
        self._stream = stream
        self._known = known
        self._done = False

    async def next(self) -> Parcel | None:
        """The directory, once."""
        if self._done:
            return None
        self._done = True
        made, pieces = await asyncio.to_thread(self._carrier.write, self._stream, self._known)
        return Parcel("disk", tuple(pieces), {"directory": str(made)})


def part_of(name: str) -> str:
    """The part of a model that a weight belongs to, and that servers may compute as one map: the attention of a layer
    for `model.layers.0.self_attn.q_proj.weight`."""
    return ".".join(name.split(".")[:-2]) or name


def _each(stream: Stream, make_room: Callable[[int], None]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of their own, in memory of the processor, in the dtype that they travel in; each once there is room."""
    while (found := stream.peek()) is not None:
        name, tensor, dtype = found
        make_room(stream.nbytes())
        stream.take()
        yield name, torch.empty(tensor.shape, dtype=dtype).copy_(gathered(tensor))


class _Files:
    """Files of at most a bucket each: what is to stay, and after it the part that is coming in."""

    def __init__(self, directory: Path, most: int) -> None:
        self._directory, self._most, self._count = directory, most, 0
        self._kept: dict[str, Tensor] = {}
        self.held: dict[str, Tensor] = {}
        """The part that is coming in, as far as no file has it."""
        self._drafts: list[Path] = []

    def make_room(self, nbytes: int) -> None:
        """Write what is held, if so much more does not fit in beside it."""
        if self._kept and self._size() + nbytes > self._most:
            self._save(self._kept)
        if self.held and self._size() + nbytes > self._most:
            self._drafts.append(self._save(self.held))

    def keep(self) -> None:
        """The part is to stay."""
        self._kept |= self.held
        self.held.clear()
        self._drafts.clear()

    def take_back(self) -> None:
        """The part is not to stay."""
        self.held.clear()
        while self._drafts:
            self._drafts.pop().unlink()

    def write(self) -> None:
        """Write what is left of all that is to stay."""
        if self._kept:
            self._save(self._kept)

    def _size(self) -> int:
        return sum(tensor.nbytes for each in (self._kept, self.held) for tensor in each.values())

    def _save(self, tensors: dict[str, Tensor]) -> Path:
        """Write these, and let go of them."""
        self._count += 1
        path = self._directory / f"weights-{self._count:05d}.safetensors"
        save_file(tensors, path, metadata={"format": "pt"})
        tensors.clear()
        return path
