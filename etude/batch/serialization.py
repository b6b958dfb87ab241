"""A batch as one buffer of bytes: a JSON header, then each column's raw numbers, aligned. No pickle.

The same bytes serve a pipe, a file and shared memory. The sender writes `memory.buf[: len(data)] = data`. The receiver
calls `from_bytes(memory.buf)`, which copies nothing: the columns are views of the buffer.
Numbers are in the machine's byte order, which the header names. A truncated or inconsistent buffer is refused.
"""

from __future__ import annotations

import ctypes
import json
import math
import struct
import sys
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.batch.batch import COLUMNS, Batch
from etude.batch.columns import Column, ColumnKind
from etude.batch.images import ImageContent
from etude.batch.support_sets import SupportSets
from etude.errors import BatchError

_MAGIC = b"ETUDEBATCH1\n"
_PREFIX = len(_MAGIC) + 8
_ALIGN = 64
_LAYOUT = ("offsets", "unit", "group")
_SETS = {"support_sets.kind": "kind", "support_sets.offsets": "offsets", "support_sets.data": "data"}
_IMAGE = "images."
"""The beginning of the names of images, each of which ends with its digest."""
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}


def to_bytes(batch: Batch, *, contents: bool = True) -> bytearray:
    """Serialize the whole batch into one buffer; `from_bytes` inverts it. Images that are elsewhere are read.

    contents: False leaves the images out, for `from_bytes` to be given them again.
    """
    columns = dict(batch.columns())
    tensors = {name: getattr(batch, name) for name in _LAYOUT} | {name: c.tensor for name, c in columns.items()}
    if batch.support_sets is not None:
        tensors |= {name: getattr(batch.support_sets, key) for name, key in _SETS.items()}
    tensors |= {f"{_IMAGE}{image.digest}": _as_tensor(image.read()) for image in batch.images if contents}
    kinds = {name: column.kind.value for name, column in columns.items()}
    layout = []
    buffers = []
    end = 0
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in _DTYPES:
            raise BatchError(f"The column `{name}` is {dtype}, which cannot be serialized; use {', '.join(_DTYPES)}.")
        raw = _as_bytes(tensor)
        layout.append({"name": name, "dtype": dtype, "shape": list(tensor.shape), "at": end})
        buffers.append(raw)
        end += _aligned(raw.size)
    names = {"part_names": batch.part_names, "source_names": batch.source_names}
    metadata = {"model": batch.model, **names, "kinds": kinds, "layout": layout}
    head = json.dumps({"order": sys.byteorder, "size": end, **metadata}).encode()
    at = _aligned(_PREFIX + len(head))
    buffer = bytearray(at + end)
    buffer[: _PREFIX + len(head)] = _MAGIC + struct.pack("<Q", len(head)) + head
    target = np.frombuffer(buffer, dtype=np.uint8)
    for raw in buffers:
        target[at : at + raw.size] = raw
        at += _aligned(raw.size)
    return buffer


def from_bytes(buffer: bytearray | memoryview, images: tuple[ImageContent, ...] = (), *, shared: bool = False) -> Batch:
    """Return the batch in a writable buffer. Its columns are views of the buffer, which must outlive them.

    images: those of the batch, if they are not in the buffer.
    shared: other readers use the same buffer, which may then be read-only. Do not write to the columns of such a batch:
    where the system protects the buffer, a write ends the process.
    """
    view = memoryview(buffer)
    if view.readonly and not shared:
        raise BatchError("This buffer is read-only, and a batch can be written to. Copy it first: `bytearray(buffer)`.")
    view = _writable_view(view) if view.readonly else view
    if bytes(view[: len(_MAGIC)]) != _MAGIC:
        raise BatchError("This buffer does not hold a batch: it does not begin as `to_bytes` writes it.")
    try:
        (length,) = struct.unpack_from("<Q", view, len(_MAGIC))
        head = json.loads(bytes(view[_PREFIX : _PREFIX + length]))
        start = _aligned(_PREFIX + length)
        end = start + head["size"]
        if head["order"] != sys.byteorder or end > len(view):
            raise ValueError(f"{end} bytes in {head['order']} order expected, {len(view)} in {sys.byteorder} received")
        return _decode_batch(head, view[start:end], images)
    except (struct.error, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise BatchError(
            f"This buffer was damaged on its way: its header and its columns do not add up ({error}). Send it again."
        ) from error


def _decode_batch(head: dict[str, Any], columns: memoryview, images: tuple[ImageContent, ...]) -> Batch:
    tensors: dict[str, Tensor] = {}
    end = 0
    for entry in head["layout"]:
        if entry["at"] != end:
            raise ValueError(f"the column {entry['name']} is at {entry['at']} instead of {end}")
        tensors[entry["name"]] = _decode_tensor(columns, entry)
        end += _aligned(tensors[entry["name"]].nbytes)
    values: dict[str, Any] = {name: tensors[name] for name in _LAYOUT}
    extra: dict[str, Column] = {}
    for name, kind in head["kinds"].items():
        if name in COLUMNS:
            values[name] = tensors[name]
        else:
            extra[name] = Column(ColumnKind(kind), tensors[name])
    if all(name in tensors for name in _SETS):
        values["support_sets"] = SupportSets(**{key: tensors[name] for name, key in _SETS.items()})
    digests = [name.removeprefix(_IMAGE) for name in tensors if name.startswith(_IMAGE)]
    read = [ImageContent(digest, tensors[f"{_IMAGE}{digest}"].numpy().tobytes()) for digest in digests]
    values["images"] = images or tuple(read)
    values |= {name: tuple(head[name]) for name in ("part_names", "source_names")}
    return Batch(model=head["model"], extra=extra, **values)


def _writable_view(view: memoryview) -> memoryview:
    """Return the same memory as a writable view, because torch has no read-only tensors."""
    raw = np.frombuffer(view, np.uint8)
    block = (ctypes.c_uint8 * raw.size).from_address(raw.ctypes.data)
    block.owner = raw  # type: ignore[attr-defined]  # keeps the memory alive as long as the block
    return memoryview(block).cast("B")


def _as_bytes(tensor: Tensor) -> NDArray[np.uint8]:
    if tensor.numel() == 0:
        return np.empty(0, np.uint8)
    raw: NDArray[np.uint8] = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return raw


def _as_tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def _decode_tensor(columns: memoryview, entry: dict[str, Any]) -> Tensor:
    dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(columns, dtype=dtype, count=count, offset=entry["at"]).reshape(shape)


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
