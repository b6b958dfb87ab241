"""Read the tensors of a bucket, for each weight transport. This needs torch and nothing of vLLM."""

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
"""Name, dtype as torch names it, shape, and the offset in the bucket."""


class Fetcher:
    """Reads buckets, in one process of a server."""

    def __init__(self, device: torch.device, rank: int = 0) -> None:
        self._device = device
        self._rank = rank
        self._files: dict[str, Any] = {}  # mapped slots, the newest two
        self._group: Any = None
        self._store: Any = None
        self._timeout = timedelta(seconds=300)

    def fetch(self, kind: str, pieces: list[Piece], where: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor with its name; a shared tensor is valid until the bucket has been loaded."""
        if kind == "shm":
            return self._views(self._mapped(where), pieces, where["base"])
        if kind == "ipc":
            return self._views(self._imported(where["handle"]), pieces, 0)
        if kind == "disk":
            return self._read(Path(where["directory"]))
        if kind == "group":
            return self._received(pieces)
        raise ValueError(f"A bucket of kind '{kind}' is not known here. Install the plug-in of the trainer's Etude.")

    def join(self, group: dict[str, Any]) -> None:
        """Join the process group in which the trainer has rank 0, and leave an earlier one."""
        import torch.distributed as dist

        self.leave()
        self._timeout = timedelta(seconds=group["timeout"])
        self._store = dist.TCPStore(group["address"], group["port"], group["size"], False, self._timeout)
        store = dist.PrefixStore(f"{group['name']}/", dist.PrefixStore(group["name"], self._store))
        if group["backend"] == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            rank = self._rank + 1
            self._group = dist.ProcessGroupNCCL(dist.PrefixStore("cuda/", store), rank, group["size"], options)
        else:
            store = dist.PrefixStore("cpu/", store)
            self._group = dist.ProcessGroupGloo(store, self._rank + 1, group["size"], self._timeout)

    def leave(self) -> None:
        """Leave the process group and release mapped files."""
        self._group = self._store = None
        self._files.clear()

    def _mapped(self, where: dict[str, Any]) -> Any:
        """Return the bytes of a shared file. Its mapping is kept for the next publish, unless the file was removed."""
        path = where["path"]
        if path not in self._files:
            for gone in [other for other in self._files if not Path(other).exists()]:
                del self._files[gone]
            whole = where["base"] + where["nbytes"]
            self._files[path] = torch.UntypedStorage.from_file(path, shared=True, nbytes=whole)
        return self._files[path]

    def _imported(self, handle: list[Any]) -> Any:
        """Return a bucket of another process. It lies on this process's GPU, which the other may number differently."""
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
        """Yield each tensor as a view of the storage."""
        for name, called, shape, offset in pieces:
            dtype: torch.dtype = getattr(torch, called)
            strides = [prod(shape[at + 1 :]) for at in range(len(shape))]
            view = torch.empty(0, dtype=dtype, device=storage.device)
            yield name, view.set_(storage, (base + offset) // dtype.itemsize, shape, strides)

    def _read(self, directory: Path) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor of the files in a directory, one at a time."""
        from safetensors import safe_open

        for path in sorted(directory.glob("*.safetensors")):
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118 - it is not a mapping
                    yield name, file.get_tensor(name)

    def _received(self, pieces: list[Piece]) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor as the trainer broadcasts it."""
        import torch.distributed as dist

        if self._group is None:
            raise RuntimeError("This server has not joined the trainer's process group, or has left it.")
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        for name, called, shape, _ in pieces:
            tensor = torch.empty(shape, dtype=getattr(torch, called), device=self._device)
            self._group.broadcast([tensor], options).wait(self._timeout)
            yield name, tensor


def describe_bucket(kind: str, pieces: list[Piece]) -> str:
    """Describe a bucket of any size in an error."""
    names = [piece[0] for piece in pieces]
    return json.dumps({"kind": kind, "first": names[:1], "tensors": len(names)})
