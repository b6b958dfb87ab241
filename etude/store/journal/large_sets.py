"""The large sets of tokens that turns were drawn from, which a journal stores once each.

A grammar's set of 19 kB can be the same at thousands of tokens of a run. So the payload of a stored turn does not hold
a set of more than `INLINE_NUMBERS` numbers. It names the set by a hash of its content, and the journal stores the set
under this name, in the transaction of the event. In the table of the payload such a set has the kind `APART`, and its
numbers are the four words of its name.

The checksums of an event cover its payload with the names in it, so they cover the sets too: a reader compares each
set with its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from etude.store.journal.blobs import PackedSupport, find_support, replace_sets

INLINE_NUMBERS = 64
"""The most numbers of a set that the payload of its turn holds."""
APART = -1
"""The kind of a set that a payload only names."""
NAME_BYTES = 16
_NUMBER = np.dtype("<i4")

NamedSet: TypeAlias = tuple[bytes, bytes]
"""The name of a set, and its bytes: one for its kind, and its numbers."""


def set_name(stored: bytes) -> bytes:
    """Return the name of a set with these bytes."""
    return blake2b(stored, digest_size=NAME_BYTES).digest()


def move_sets_out(payload: bytes) -> tuple[bytes, tuple[NamedSet, ...]]:
    """Return the payload with names in place of its large sets, and these sets."""
    packed = find_support(payload)
    if packed is None:
        return payload, ()
    large = np.flatnonzero(packed.lengths > INLINE_NUMBERS)
    if not len(large):
        return payload, ()
    kind = packed.kind.copy()
    sets = _split(packed)
    moved = []
    for place in large.tolist():
        stored = bytes([kind[place]]) + sets[place].tobytes()
        name = set_name(stored)
        moved.append((name, stored))
        kind[place] = APART
        sets[place] = np.frombuffer(name, _NUMBER)
    return replace_sets(payload, packed, kind, sets), tuple(moved)


def names_in(payload: bytes) -> list[bytes]:
    """Return the names of the sets that a payload does not hold."""
    packed = find_support(payload)
    if packed is None or not np.any(packed.kind == APART):
        return []
    sets = _split(packed)
    return [sets[place].tobytes() for place in np.flatnonzero(packed.kind == APART).tolist()]


def put_sets_back(payload: bytes, named: Mapping[bytes, bytes]) -> bytes:
    """Return the payload with the sets that it names in their places."""
    packed = find_support(payload) if named else None
    if packed is None:
        return payload
    kind = packed.kind.copy()
    sets = _split(packed)
    for place in np.flatnonzero(kind == APART).tolist():
        stored = named[sets[place].tobytes()]
        kind[place] = stored[0]
        sets[place] = np.frombuffer(stored, _NUMBER, offset=1)
    return replace_sets(payload, packed, kind, sets)


def _split(packed: PackedSupport) -> list[NDArray[np.int32]]:
    """Return the numbers of each set of the table."""
    return np.split(packed.data, np.cumsum(packed.lengths)[:-1])
