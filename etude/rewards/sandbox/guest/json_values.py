"""The JSON encoding of plain values: all messages between a program under test and the test runner use it.

None, booleans, numbers, text, bytes, dates and times, lists, tuples, deques, sets, mappings, ranges and slices are
copied. A subclass becomes its base type, so that values compare by Python's rules and not by a program's. Any other
value stays in its process, and messages hold a reference to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

MAX_DEPTH = 64
FIRST_INEXACT_INT = 1 << 53
ReferenceHook = Callable[[Any], Any]


class NotEncodableError(Exception):
    """A value that cannot be encoded, or a message that is not a value."""


def encode(value: Any, encode_reference: ReferenceHook, depth: int = 0) -> Any:
    """Encode a value for JSON. `encode_reference` returns the mapping that refers to a value that is not plain."""
    if depth > MAX_DEPTH:
        raise NotEncodableError(f"a value is nested more than {MAX_DEPTH} deep")
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value) if abs(value) < FIRST_INEXACT_INT else {"int": hex(value)}
    if isinstance(value, float):
        return float(value)
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, bytes | bytearray):
        return {"bytearray" if isinstance(value, bytearray) else "bytes": value.hex()}
    if type(value) in _ENCODERS:
        name, encoder = _ENCODERS[type(value)]
        return {name: encoder(value)}
    if isinstance(value, deque):
        return {"deque": [[encode(item, encode_reference, depth + 1) for item in value], value.maxlen]}
    if isinstance(value, range | slice):
        ends = [encode(item, encode_reference, depth + 1) for item in (value.start, value.stop, value.step)]
        return {type(value).__name__: ends}
    if isinstance(value, dict):
        return {"dict": [[encode(item, encode_reference, depth + 1) for item in pair] for pair in value.items()]}
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            items = [encode(item, encode_reference, depth + 1) for item in value]
            return items if kind is list else {kind.__name__: items}
    return encode_reference(value)


def decode(message: Any, decode_reference: ReferenceHook, depth: int = 0) -> Any:
    """Decode a value of `encode`. `decode_reference` receives the mappings that are references."""
    if message is None or isinstance(message, bool | str | int | float):
        return message
    if depth > 2 * MAX_DEPTH:
        raise NotEncodableError("a message is nested too deeply")
    if isinstance(message, list):
        return [decode(item, decode_reference, depth + 1) for item in message]
    if not isinstance(message, dict) or len(message) != 1:
        raise NotEncodableError("a message is not a value")
    ((kind, content),) = message.items()
    if kind not in _DECODERS:
        return decode_reference(message)
    try:
        return _DECODERS[kind](decode(content, decode_reference, depth + 1))
    except (TypeError, ValueError, ArithmeticError) as error:
        raise NotEncodableError(f"not a {kind}: {error}") from error


_ENCODERS: dict[type, tuple[str, Callable[[Any], Any]]] = {
    datetime: ("datetime", datetime.isoformat),
    date: ("date", date.isoformat),
    time: ("time", time.isoformat),
    timedelta: ("timedelta", lambda value: [value.days, value.seconds, value.microseconds]),
    Decimal: ("decimal", str),
    Fraction: ("fraction", lambda value: [{"int": hex(value.numerator)}, {"int": hex(value.denominator)}]),
}
_DECODERS: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "complex": lambda parts: complex(*parts),
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "range": lambda parts: range(*parts),
    "slice": lambda parts: slice(*parts),
    "dict": dict,
    "tuple": tuple,
    "deque": lambda held: deque(*held),
    "datetime": datetime.fromisoformat,
    "date": date.fromisoformat,
    "time": time.fromisoformat,
    "timedelta": lambda parts: timedelta(*parts),
    "decimal": Decimal,
    "fraction": lambda parts: Fraction(*parts),
    "set": set,
    "frozenset": frozenset,
}
