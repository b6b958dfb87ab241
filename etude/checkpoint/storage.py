"""The file format of tensors for torch's distributed checkpoint: the tensors' bytes end to end, and a JSON table of
their locations. Neither is pickled, so that reading a checkpoint runs no code.

    rank-0.tensors       the bytes of rank 0's pieces, each in its dtype's memory layout, row after row
    tensors.json         name -> dtype, shape, and the pieces: offset and shape in the tensor, file, position, length
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from etude.errors import CheckpointError
from etude.integrity import add_path_to_errors, read_json, sync_file, write_json

TENSOR_INDEX = "tensors.json"
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}
"""The supported dtypes by name."""


@dataclass(frozen=True)
class ChunkLocation:
    """The location of the bytes of one piece."""

    file: str
    offset: int
    length: int


class CheckpointWriter(StorageWriter):
    """The pieces of one file for each rank, and on rank 0 the table of all locations.

    torch's `save` collects them. Nothing is written before `write` and `write_index`, which no other rank takes part
    in. So another thread may call them, if the pieces are copies.
    """

    def __init__(self, directory: Path, *, copy: bool = False) -> None:
        """copy: copy the pieces to CPU memory, so that the tensors may change before they are written."""
        self._directory = directory
        self._copy = copy
        self._path = directory
        self._pieces: deque[Tensor] = deque()
        self._index: dict[str, Any] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: there is no state between saves."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the coordinator writes like any other rank."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Create the directory."""
        self._directory.mkdir(parents=True, exist_ok=True)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Name the file of each rank."""
        return [replace(plan, storage_data=f"rank-{rank}.tensors") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Collect this rank's pieces, and return the locations that they will have."""
        located: list[WriteResult] = []
        self._path = self._directory / plan.storage_data
        offset = 0
        on_gpu = False
        for item in plan.items:
            assert item.type is not WriteItemType.BYTE_IO, f"{item.index.fqn} is no tensor"
            piece = planner.resolve_data(item)
            assert isinstance(piece, Tensor), f"{item.index.fqn} is no tensor"
            assert _dtype_name(piece.dtype) in DTYPES, f"{item.index.fqn} is {piece.dtype}, which is not written"
            on_gpu, length = on_gpu or piece.device.type == "cuda", piece.nbytes
            self._pieces.append(_copy_to_cpu(piece) if self._copy else piece.detach())
            located.append(WriteResult(item.index, length, ChunkLocation(plan.storage_data, offset, length)))
            offset += length
        if self._copy and on_gpu:
            torch.cuda.synchronize()  # the copies are whole now
        return _completed_future(located)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make the table of locations. Called on rank 0 only."""
        locations = {result.index: result.storage_data for rank_results in results for result in rank_results}
        tensors = {
            name: _describe_tensor(name, stored, locations)
            for name, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }
        self._index = {"tensors": tensors}

    def write(self) -> None:
        """Write this rank's file, wait until it is on the disk, and drop the pieces."""
        with add_path_to_errors(self._path), self._path.open("wb") as file:
            while self._pieces:
                file.write(_tensor_bytes(self._pieces.popleft()))
            sync_file(file)

    def write_index(self) -> None:
        """Write the table of locations, on rank 0."""
        write_json(self._directory / TENSOR_INDEX, self._index)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Return True for a path, the only kind of id in use."""
        return isinstance(checkpoint_id, Path)


class CheckpointReader(StorageReader):
    """Reads the pieces that a rank needs from the files of all ranks."""

    def __init__(self, directory: Path, table: Metadata) -> None:
        self._directory = directory
        self._table = table

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: there is no state between loads."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        """Return the table of locations."""
        return self._table

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the coordinator reads like any other rank."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the planned pieces into the tensors of the plan."""
        tensor_metadata = self._table.state_dict_metadata
        for item in plan.items:
            stored = tensor_metadata[item.storage_index.fqn]
            assert isinstance(stored, TensorStorageMetadata), f"{item.storage_index.fqn} is no tensor"
            shape = next(chunk.sizes for chunk in stored.chunks if chunk.offsets == item.storage_index.offset)
            piece = self._read_chunk(self._table.storage_data[item.storage_index], stored.properties.dtype, shape)
            for dimension, (first, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                piece = piece.narrow(dimension, first, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(piece)
            planner.commit_tensor(item, target)
        return _completed_future(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Return True for a path, the only kind of id in use."""
        return isinstance(checkpoint_id, Path)

    def _read_chunk(self, location: ChunkLocation, dtype: torch.dtype, shape: torch.Size) -> Tensor:
        data = bytearray(location.length)
        path = self._directory / location.file
        with add_path_to_errors(path), path.open("rb") as file:
            file.seek(location.offset)
            num_read = file.readinto(data)
        if num_read != location.length or location.length != shape.numel() * dtype.itemsize:
            raise CheckpointError(f"{path} ends inside a tensor")
        return torch.frombuffer(data, dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)


def read_tensor_index(directory: Path) -> Metadata:
    """Read the table of a checkpoint's tensors as torch's metadata."""
    tensors = read_json(directory / TENSOR_INDEX)["tensors"]
    stored: dict[str, Any] = {}
    locations: dict[MetadataIndex, ChunkLocation] = {}
    for name, row in tensors.items():
        chunks = [ChunkStorageMetadata(torch.Size(p["offset"]), torch.Size(p["shape"])) for p in row["pieces"]]
        stored[name] = TensorStorageMetadata(TensorProperties(DTYPES[row["dtype"]]), torch.Size(row["shape"]), chunks)
        for piece in row["pieces"]:
            locations[MetadataIndex(name, piece["offset"])] = ChunkLocation(piece["file"], piece["at"], piece["length"])
    return Metadata(stored, planner_data={name: (name,) for name in stored}, storage_data=locations)


def _describe_tensor(
    name: str, stored: TensorStorageMetadata, locations: Mapping[MetadataIndex, ChunkLocation]
) -> dict[str, Any]:
    pieces = []
    for chunk in stored.chunks:
        location = locations[MetadataIndex(name, chunk.offsets)]
        piece = {"offset": list(chunk.offsets), "shape": list(chunk.sizes)}
        pieces.append(piece | {"file": location.file, "at": location.offset, "length": location.length})
    return {"dtype": _dtype_name(stored.properties.dtype), "shape": list(stored.size), "pieces": pieces}


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _copy_to_cpu(piece: Tensor) -> Tensor:
    """Return a copy in CPU memory, which a GPU may still be writing."""
    on_gpu = piece.device.type == "cuda"
    copy = torch.empty(piece.shape, dtype=piece.dtype, pin_memory=on_gpu)
    return copy.copy_(piece.detach(), non_blocking=on_gpu)


def _tensor_bytes(piece: Tensor) -> memoryview:
    flat = piece.detach().cpu().contiguous().reshape(-1)
    data: Any = flat.view(torch.uint8).numpy()
    return memoryview(data)


def _completed_future(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future
