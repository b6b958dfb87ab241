"""The payload of a turn: its token arrays as raw bytes.

It is a header of lengths, then the arrays end to end. They are little-endian and in this order. An array that a
completion lacks takes no bytes:

    prompt int32 [P] · ids int32 [T] · logp float32 [T] · version int32 [T]
    · raw_logp float32 [T] · top_ids int32 [T, k] · top_logp float32 [T, k]
    · support · alternatives · routes

The sets of tokens that could be drawn (`etude.support`) are S and N, then the arrays of their table:

    index int32 [T] · kind int8 [S] · length int32 [S] · data int32 [N]

A journal stores large sets once, apart from the payloads (`large_sets`).

The alternatives to a token are their number K, then alternative_ids int32 [T, K] · alternative_logp float32 [T, K].

The routes of tokens (`etude.token_routes`) are their start, N, L, k and the bytes b of a choice, then experts uint8 or
int16 [N, L, k].
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from etude.errors import StoreError
from etude.records import Turn
from etude.support import Support
from etude.token_routes import TokenRoutes

_HEADER = struct.Struct("<QQQB")
"""P, T, k, and the optional arrays present, as the sum of `_OPTIONAL`'s bits."""
_OPTIONAL = {"raw_logp": 1, "top_ids": 2, "top_logp": 4}
_SUPPORT = 16
"""The bit of the flags that says that a support follows."""
_ALTERNATIVES = 32
"""The bit of the flags that says that alternatives follow."""
_ROUTES = 64
"""The bit of the flags that says that routes follow."""
_ROUTES_HEADER = struct.Struct("<QQQQB")
"""The start, N, L, k and b."""
_ROUTE_DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("<i2")}
_ALTERNATIVES_HEADER = struct.Struct("<Q")
"""K."""
_SUPPORT_HEADER = struct.Struct("<QQ")
"""S and N."""
_INT = np.dtype("<i4")
_FLOAT = np.dtype("<f4")
_BYTE = np.dtype("i1")


@dataclass(frozen=True, slots=True, eq=False)
class PackedSupport:
    """A support in a payload: the arrays of its table, and the bytes that they take."""

    index: NDArray[np.int32]  # [T]
    kind: NDArray[np.int8]  # [S]
    lengths: NDArray[np.int32]  # [S]
    data: NDArray[np.int32]  # [N]
    begin: int
    end: int


ReadSlice: TypeAlias = Callable[[int, int], bytes]
"""Returns the bytes of a payload from an offset, and at most a number of them."""


class TurnShape(NamedTuple):
    """The lengths of a turn, and the policy version that began it."""

    prompt: int
    tokens: int
    """Sampled tokens."""
    first_version: int | None
    """The version that sampled the first token; None without a token. Versions do not fall within a turn."""


def pack_turn(turn: Turn) -> bytes:
    """Pack the arrays of a turn into bytes."""
    completion = turn.completion
    optional = {name: getattr(completion, name) for name in _OPTIONAL}
    flags = sum(bit for name, bit in _OPTIONAL.items() if optional[name] is not None)
    widths = {values.shape[1] for name, values in optional.items() if name != "raw_logp" and values is not None}
    assert len(widths) < 2, f"top_ids and top_logp have different widths: {sorted(widths)}"
    support = completion.support
    flags += 0 if support is None else _SUPPORT
    flags += 0 if completion.alternative_ids is None else _ALTERNATIVES
    flags += 0 if completion.routes is None else _ROUTES
    header = _HEADER.pack(len(turn.prompt), len(completion.ids), max(widths, default=0), flags)
    columns = (turn.prompt, completion.ids, completion.logp, completion.version, *optional.values())
    parts = [header, *(_bytes(column) for column in columns if column is not None)]
    if support is not None:
        lengths = np.diff(support.offsets).astype(np.int32)
        parts.append(_pack_support(support.index, support.kind, lengths, support.data))
    if completion.alternative_ids is not None and completion.alternative_logp is not None:
        parts.append(_ALTERNATIVES_HEADER.pack(completion.alternative_ids.shape[1]))
        parts += [_bytes(completion.alternative_ids), _bytes(completion.alternative_logp)]
    if completion.routes is not None:
        experts = completion.routes.experts
        parts.append(_ROUTES_HEADER.pack(completion.routes.start, *experts.shape, experts.itemsize))
        parts.append(_bytes(experts))
    return b"".join(parts)


def find_support(payload: bytes) -> PackedSupport | None:
    """Return the support of a turn as its payload holds it, or None if there is none."""
    if len(payload) < _HEADER.size or not payload[_HEADER.size - 1] & _SUPPORT:
        return None
    prompt, tokens, width, flags = _HEADER.unpack_from(payload)
    numbers = prompt + 3 * tokens
    for name, bit in _OPTIONAL.items():
        if flags & bit:
            numbers += tokens if name == "raw_logp" else tokens * width
    return _read_support(payload, _HEADER.size + _INT.itemsize * numbers, tokens)


def replace_sets(
    payload: bytes,
    packed: PackedSupport,
    kind: NDArray[np.int8],
    sets: Sequence[NDArray[np.int32]],
) -> bytes:
    """Return the payload with other sets in the table of its support, `packed`."""
    lengths = np.array([len(each) for each in sets], np.int32)
    support = _pack_support(packed.index, kind, lengths, np.concatenate(sets))
    return b"".join((payload[: packed.begin], support, payload[packed.end :]))


def _pack_support(
    index: NDArray[np.int32],
    kind: NDArray[np.int8],
    lengths: NDArray[np.int32],
    data: NDArray[np.int32],
) -> bytes:
    header = _SUPPORT_HEADER.pack(len(kind), len(data))
    return b"".join((header, *(_bytes(column) for column in (index, kind, lengths, data))))


def unpack_turn(payload: bytes) -> tuple[NDArray[np.int32], dict[str, Any]]:
    """Return the prompt, and the columns of the completion by name: arrays as views of the payload."""
    if len(payload) < _HEADER.size:
        raise StoreError(f"The payload of a turn has {len(payload)} bytes, too few for its header: it is truncated.")
    prompt, tokens, width, flags = _HEADER.unpack_from(payload)
    shapes: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {
        "prompt": (_INT, (prompt,)),
        "ids": (_INT, (tokens,)),
        "logp": (_FLOAT, (tokens,)),
        "version": (_INT, (tokens,)),
        "raw_logp": (_FLOAT, (tokens,)),
        "top_ids": (_INT, (tokens, width)),
        "top_logp": (_FLOAT, (tokens, width)),
    }
    columns: dict[str, Any] = {}
    at = _HEADER.size
    for name, (dtype, shape) in shapes.items():
        if name in _OPTIONAL and not flags & _OPTIONAL[name]:
            continue
        columns[name] = _read_array(payload, at, name, dtype, int(np.prod(shape))).reshape(shape)
        at += columns[name].nbytes
    if flags & _SUPPORT:
        packed = _read_support(payload, at, tokens)
        offsets = np.cumsum([0, *packed.lengths], dtype=np.int64)
        columns["support"] = Support(packed.index, packed.kind, offsets, packed.data)
        at = packed.end
    if flags & _ALTERNATIVES:
        alternatives, at = _unpack_alternatives(payload, at, tokens)
        columns |= alternatives
    if flags & _ROUTES:
        columns["routes"] = _unpack_routes(payload, at)
    return columns.pop("prompt"), columns


def _unpack_alternatives(payload: bytes, at: int, tokens: int) -> tuple[dict[str, NDArray[Any]], int]:
    """Return the columns of alternatives that begin at this byte, and the byte at which they end."""
    if at + _ALTERNATIVES_HEADER.size > len(payload):
        raise StoreError("The payload of a turn ends before its alternatives: it is truncated or overwritten.")
    (width,) = _ALTERNATIVES_HEADER.unpack_from(payload, at)
    at += _ALTERNATIVES_HEADER.size
    ids = _read_array(payload, at, "alternative_ids", _INT, tokens * width).reshape(tokens, width)
    logp = _read_array(payload, at + ids.nbytes, "alternative_logp", _FLOAT, tokens * width).reshape(tokens, width)
    return {"alternative_ids": ids, "alternative_logp": logp}, at + ids.nbytes + logp.nbytes


def _unpack_routes(payload: bytes, at: int) -> TokenRoutes:
    """Return the routes that begin at this byte."""
    if at + _ROUTES_HEADER.size > len(payload):
        raise StoreError("The payload of a turn ends before its routes: it is truncated or overwritten.")
    start, tokens, mixtures, per_token, size = _ROUTES_HEADER.unpack_from(payload, at)
    if size not in _ROUTE_DTYPES:
        raise StoreError(f"The routes of a turn have choices of {size} bytes, not 1 or 2: its payload is overwritten.")
    shape = (tokens, mixtures, per_token)
    experts = _read_array(payload, at + _ROUTES_HEADER.size, "routes", _ROUTE_DTYPES[size], int(np.prod(shape)))
    return TokenRoutes(experts.reshape(shape), start)


def _read_support(payload: bytes, begin: int, tokens: int) -> PackedSupport:
    """Return the support that begins at this byte."""
    at = begin
    if at + _SUPPORT_HEADER.size > len(payload):
        raise StoreError("The payload of a turn ends inside its column 'support': it is truncated or overwritten.")
    sets, numbers = _SUPPORT_HEADER.unpack_from(payload, at)
    at += _SUPPORT_HEADER.size
    arrays = []
    for dtype, count in ((_INT, tokens), (_BYTE, sets), (_INT, sets), (_INT, numbers)):
        arrays.append(_read_array(payload, at, "support", dtype, count))
        at += arrays[-1].nbytes
    index, kind, lengths, data = arrays
    return PackedSupport(index, kind, lengths, data, begin, at)


def _read_array(payload: bytes, at: int, name: str, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    """Return the array of a column that begins at this byte."""
    if at + count * dtype.itemsize > len(payload):
        raise StoreError(f"The payload of a turn ends inside its column '{name}': it is truncated or overwritten.")
    return np.frombuffer(payload, dtype, count, at)


def read_turn_shape(read: ReadSlice) -> TurnShape:
    """Return the shape of a turn from a few bytes of its payload."""
    header = read(0, _HEADER.size)
    if len(header) < _HEADER.size:
        raise StoreError(f"The payload of a turn has {len(header)} bytes, too few for its header: it is truncated.")
    prompt, tokens, _, _ = _HEADER.unpack(header)
    if not tokens:
        return TurnShape(prompt, 0, None)
    versions = _HEADER.size + _INT.itemsize * prompt + (_INT.itemsize + _FLOAT.itemsize) * tokens
    first = read(versions, _INT.itemsize)
    if len(first) < _INT.itemsize:
        raise StoreError("The payload of a turn ends before its column 'version': it is truncated or overwritten.")
    return TurnShape(prompt, tokens, int(np.frombuffer(first, _INT)[0]))


def _bytes(column: NDArray[Any]) -> bytes:
    """Return the entries, little-endian, row after row."""
    return column.astype(column.dtype.newbyteorder("<"), copy=False).tobytes()
