"""Where a parcel's tensors lie, for each kind of parcel. This needs torch and nothing of vLLM."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterator
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Piece = tuple[str, str, list[int], int]
"""Name, dtype as torch names it, shape, and where it begins in a bucket."""


class Fetcher:
    """Knows where to look, for one process of a server."""

    def __init__(self, device: torch.device, rank: int = 0) -> None:
        self._device = device
        self._rank = rank
        self._files: dict[str, Any] = {}  # mapped slots, the newest two
        self._group: Any = None
        self._store: Any = None
        self._timeout = timedelta(seconds=300)

    def fetch(self, kind: str, pieces: list[Piece], where: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """Each tensor by its name; what is shared is good until the parcel is done with."""
        if kind == "shm":
            return self._views(self._mapped(where), pieces, where["base"])
        if kind == "ipc":
            return self._views(self._imported(where["handle"]), pieces, 0)
        if kind == "disk":
            return self._read(Path(where["directory"]))
        if kind == "group":
            return self._received(pieces)
        raise ValueError(f"A parcel of kind '{kind}' is not known here. Install the plug-in of the trainer's Etude.")

    def join(self, told: dict[str, Any]) -> None:
        """Join the process group that the trainer is the first of; another than before, if there was one."""
        import torch.distributed as dist

        self.leave()
        self._timeout = timedelta(seconds=told["timeout"])
        self._store = dist.TCPStore(told["address"], told["port"], told["size"], False, self._timeout)
        store = dist.PrefixStore(f"{told['name']}/", dist.PrefixStore(told["name"], self._store))
        if told["backend"] == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            rank = self._rank + 1
            self._group = dist.ProcessGroupNCCL(dist.PrefixStore("cuda/", store), rank, told["size"], options)
        else:
            store = dist.PrefixStore("cpu/", store)
            self._group = dist.ProcessGroupGloo(store, self._rank + 1, told["size"], self._timeout)

    def leave(self) -> None:
        """Let go of the group and of what is mapped."""
        self._group = self._store = None
        self._files.clear()

    def _mapped(self, where: dict[str, Any]) -> Any:
        """The bytes of a slot's file. A mapping is kept for the next publish; that of a file that went is let go."""
        path = where["path"]
        if path not in self._files:
            for gone in [other for other in self._files if not Path(other).exists()]:
                del self._files[gone]
            whole = where["base"] + where["nbytes"]
            self._files[path] = torch.UntypedStorage.from_file(path, shared=True, nbytes=whole)
        return self._files[path]

    def _imported(self, handle: list[Any]) -> Any:
        """The bucket of another process on this one's GPU, which has another number there where this sees it alone."""
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        _, size, shared, offset, counter, counter_offset, event, synced = (
            b64decode(part["bytes"]) if isinstance(part, dict) else part for part in handle
        )
        bucket = rebuild_cuda_tensor(
            *(
                torch.Tensor,
                torch.Size([size]),
                (1,),
                0,
                torch.storage.TypedStorage,
                torch.uint8,
                self._device.index or 0,
            ),
            *(shared, size, offset, False, counter, counter_offset, event, synced),
        )
        return bucket.untyped_storage()

    def _views(self, storage: Any, pieces: list[Piece], base: int) -> Iterator[tuple[str, Tensor]]:
        """Each tensor where it lies."""
        for name, called, shape, offset in pieces:
            dtype: torch.dtype = getattr(torch, called)
            strides = [prod(shape[at + 1 :]) for at in range(len(shape))]
            view = torch.empty(0, dtype=dtype, device=storage.device)
            yield name, view.set_(storage, (base + offset) // dtype.itemsize, shape, strides)

    def _read(self, directory: Path) -> Iterator[tuple[str, Tensor]]:
        """Each tensor of the files in a directory, one at a time."""
        from safetensors import safe_open

        for path in sorted(directory.glob("*.safetensors")):
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118 - it is not a mapping
                    yield name, file.get_tensor(name)

    def _received(self, pieces: list[Piece]) -> Iterator[tuple[str, Tensor]]:
        """Each tensor as the trainer broadcasts it."""
        import torch.distributed as dist

        if self._group is None:
            raise RuntimeError("This server has not joined the trainer's process group, or has left it.")
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        for name, called, shape, _ in pieces:
            tensor = torch.empty(shape, dtype=getattr(torch, called), device=self._device)
            self._group.broadcast([tensor], options).wait(self._timeout)
            yield name, tensor


def described(told: dict[str, Any]) -> str:
    """A parcel, short enough for an error."""
    names = [piece[0] for piece in told.get("pieces", [])]
    return json.dumps({"kind": told.get("kind"), "first": names[:1], "tensors": len(names)})
