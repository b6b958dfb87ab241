"""A batch as one buffer of bytes: a JSON header, then each column's raw numbers, aligned. No pickle.

The same bytes serve a pipe, a file and shared memory: `memory.buf[: len(wire)] = wire` on one side, and on the other
`from_bytes(memory.buf)`, which copies nothing: the columns look into the buffer.
"""

from __future__ import annotations

import json
import struct
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from etude.batch.batch import COLUMNS, Batch
from etude.batch.columns import Column, Kind
from etude.errors import BatchError

__all__ = ["from_bytes", "to_bytes"]

_MAGIC = b"ETUDEBATCH1\n"
_PREFIX = len(_MAGIC) + 8
_ALIGN = 64
_LAYOUT = ("offsets", "unit", "group")
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


def to_bytes(batch: Batch) -> bytearray:
    """The batch, whole, as one buffer; `from_bytes` inverts it."""
    tensors = {"offsets": batch.offsets, "unit": batch.unit, "group": batch.group}
    kinds: dict[str, str] = {}
    for name, column in batch.columns():
        kinds[name] = column.kind.value
        if isinstance(column.values, tuple):
            tensors[f"{name}/lengths"] = torch.tensor([len(blob) for blob in column.values], dtype=torch.int64)
            joined = b"".join(column.values)
            tensors[name] = torch.frombuffer(bytearray(joined), dtype=torch.uint8) if joined else torch.empty(0).byte()
        else:
            tensors[name] = column.values
        if column.offsets is not None:
            tensors[f"{name}/offsets"] = column.offsets

    layout, buffers, end = [], [], 0
    for name, tensor in tensors.items():
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        dtype = str(tensor.dtype).removeprefix("torch.")
        layout.append({"name": name, "dtype": dtype, "shape": list(tensor.shape), "at": end})
        buffers.append(raw)
        end += _aligned(raw.size)
    head = json.dumps({"model": batch.model, "part_names": batch.part_names, "kinds": kinds, "layout": layout}).encode()
    start = _aligned(_PREFIX + len(head))
    wire = bytearray(start + end)
    wire[: _PREFIX + len(head)] = _MAGIC + struct.pack("<Q", len(head)) + head
    target = np.frombuffer(wire, dtype=np.uint8)
    for entry, raw in zip(layout, buffers, strict=True):
        at = start + int(str(entry["at"]))
        target[at : at + raw.size] = raw
    return wire


def from_bytes(wire: bytearray | memoryview) -> Batch:
    """The batch in a writable buffer. Its columns look into the buffer, which must outlive them."""
    view = memoryview(wire)
    if bytes(view[: len(_MAGIC)]) != _MAGIC:
        raise BatchError("This buffer does not hold a batch: it does not begin as `to_bytes` writes it.")
    (length,) = struct.unpack_from("<Q", view, len(_MAGIC))
    head = json.loads(bytes(view[_PREFIX : _PREFIX + length]))
    start = _aligned(_PREFIX + length)
    found = {entry["name"]: _tensor(view, start, entry) for entry in head["layout"]}
    values: dict[str, Any] = {name: found[name] for name in _LAYOUT}
    extra: dict[str, Column] = {}
    for name, kind in head["kinds"].items():
        if name in COLUMNS:
            values[name] = found[name]
        elif Kind(kind) is Kind.BLOB:
            ends = [0, *found[f"{name}/lengths"].cumsum(0).tolist()]
            raw = bytes(found[name].numpy())
            extra[name] = Column(Kind.BLOB, tuple(raw[a:b] for a, b in pairwise(ends)))
        else:
            extra[name] = Column(Kind(kind), found[name], found.get(f"{name}/offsets"))
    return Batch(model=head["model"], part_names=tuple(head["part_names"]), extra=extra, **values)


def _tensor(view: memoryview, start: int, entry: dict[str, Any]) -> Tensor:
    dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
    count = int(np.prod(shape))
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(view, dtype=dtype, count=count, offset=start + entry["at"]).reshape(shape)


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
