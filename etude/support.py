"""The sets of tokens that a sampler could draw from, one set for each token of an answer.

A sampler may cut rare tokens off (top-p, top-k, min-p), obey a grammar, or ban tokens. The policy that acted is then
the model's distribution over the set S of tokens that were left: π(a) / π(S). Its log-prob can only be computed again
with S, so the engine reports S and the trainer uses it. A trainer that looked for S by itself would find another one
wherever its logits differ in the last digits.

Equal sets are stored once, in the shortest of three forms. These are the ids that were kept, the ids that were left
out, or one bit for each token of the vocabulary. All are int32 numbers. Equal sets have equal bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from etude.frozen_arrays import FrozenRecord, read_only_array

WHOLE = -1
"""The index of a token that was drawn from the whole vocabulary."""
_WORD_BITS = 32
_ID_BITS = 32


class SetKind(IntEnum):
    """The form of a set."""

    KEPT = 0
    """The ids in the set, ascending."""
    BANNED = 1
    """The ids of the vocabulary that are not in the set, ascending."""
    BITS = 2
    """One bit for each token of the vocabulary, little-endian, in words of 32."""


EncodedSet: TypeAlias = tuple[SetKind, NDArray[np.int32]]


@dataclass(frozen=True, slots=True, eq=False)
class Support(FrozenRecord):
    """The sets of T tokens: a table of S different sets, and the place of each token's set in it."""

    index: NDArray[np.int32]  # [T], `WHOLE` for the whole vocabulary
    kind: NDArray[np.int8]  # [S]
    offsets: NDArray[np.int64]  # [S + 1]: set s is data[offsets[s] : offsets[s + 1]]
    data: NDArray[np.int32]  # [N]

    def __post_init__(self) -> None:
        for name, dtype in _COLUMNS.items():
            object.__setattr__(self, name, read_only_array(getattr(self, name), dtype, f"Support.{name}"))
        sets, ends = len(self.kind), self.offsets
        if len(ends) != sets + 1 or ends[0] != 0 or ends[-1] != len(self.data) or bool(np.any(ends[1:] < ends[:-1])):
            raise ValueError(
                f"Support.offsets must rise from 0 to the {len(self.data)} numbers of {sets} sets; it has {len(ends)} "
                "entries that do not."
            )
        unknown = self.kind[(self.kind < 0) | (self.kind > max(SetKind))]
        if len(unknown):
            raise ValueError(f"Support.kind has the form {unknown[0]}; the forms are 0 to {int(max(SetKind))}.")
        if len(self.index) and not (int(self.index.min()) >= WHOLE and int(self.index.max()) < sets):
            raise ValueError(f"Support.index must be from -1 to {sets - 1}, since there are {sets} sets.")

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.index)

    @classmethod
    def build(cls, sets: Sequence[EncodedSet | None]) -> Support | None:
        """Return the sets of tokens, one for each. None is the whole vocabulary; if all are, there is no support."""
        if all(encoded is None for encoded in sets):
            return None
        table = _SetTable()
        return table.build(np.array([WHOLE if encoded is None else table.add(encoded) for encoded in sets], np.int32))

    @classmethod
    def whole(cls, tokens: int) -> Support:
        """Return the sets of tokens that were all drawn from the whole vocabulary."""
        return cls(np.full(tokens, WHOLE, np.int32), np.empty(0, np.int8), np.zeros(1, np.int64), _NO_IDS)

    @classmethod
    def concat(cls, parts: Sequence[Support | int]) -> Support | None:
        """Join sets end to end. A number stands for that many tokens without a set; if all are, there is no support.

        Equal sets become one.
        """
        if all(isinstance(part, int) for part in parts):
            return None
        tables = [cls.whole(part) if isinstance(part, int) else part for part in parts]
        table = _SetTable()
        moved = [table.add_all(part) for part in tables]
        return table.build(np.concatenate([np.empty(0, np.int32), *moved]))

    def select(self, tokens: slice | NDArray[Any]) -> Support:
        """Return the sets of some tokens, with the sets that they use alone."""
        index = self.index[tokens]
        used = np.unique(index[index != WHOLE])
        place = np.full(len(self.kind) + 1, WHOLE, np.int32)  # its last entry is that of WHOLE
        place[used] = np.arange(len(used))
        sizes = np.diff(self.offsets)[used]
        data = [self.data[self.offsets[each] : self.offsets[each + 1]] for each in used]
        return Support(place[index], self.kind[used], np.cumsum([0, *sizes]), np.concatenate([_NO_IDS, *data]))

    def get_set(self, place: int) -> EncodedSet:
        """Return a set of the table in its stored form."""
        return SetKind(int(self.kind[place])), self.data[self.offsets[place] : self.offsets[place + 1]]

    def sizes(self, vocab_size: int) -> NDArray[np.int32]:
        """[T]: return how many tokens could be drawn at each token."""
        counts = self._counts()
        of_set = np.where(self.kind == SetKind.BANNED, vocab_size - counts, counts)
        return np.append(of_set, vocab_size)[self.index].astype(np.int32)

    def signed_sizes(self) -> NDArray[np.int32]:
        """[T]: return how many tokens could be drawn at each token. −n is all but n, and 0 the whole vocabulary."""
        counts = self._counts()
        of_set = np.where(self.kind == SetKind.BANNED, -counts, counts)
        return np.append(of_set, 0)[self.index].astype(np.int32)

    def _counts(self) -> NDArray[np.int64]:
        """[S]: return how many tokens each set lists: those that are in it, or of a BANNED one those that are not."""
        counts = np.diff(self.offsets)
        for place in np.flatnonzero(self.kind == SetKind.BITS).tolist():
            counts[place] = int(np.bitwise_count(self.get_set(place)[1].view(np.uint32)).sum())
        return counts

    def mask(self, token: int, vocab_size: int) -> NDArray[np.bool_]:
        """[V]: return which tokens could be drawn at a token."""
        place = int(self.index[token])
        return np.ones(vocab_size, np.bool_) if place == WHOLE else decode_set(self.get_set(place), vocab_size)

    def contains(self, ids: NDArray[np.int32]) -> NDArray[np.bool_]:
        """[T] → [T]: return whether each id is in the set of its token."""
        inside = np.ones(len(ids), np.bool_)
        kinds = np.append(self.kind, WHOLE)[self.index]
        set_of_number = np.repeat(np.arange(len(self.kind), dtype=np.int64), np.diff(self.offsets))
        for kind in (SetKind.KEPT, SetKind.BANNED):
            at = np.flatnonzero(kinds == kind)
            if len(at):
                listed = self.kind[set_of_number] == kind
                known = (set_of_number[listed] << _ID_BITS) + self.data[listed]  # rising, since sets and ids are
                wanted = (self.index[at].astype(np.int64) << _ID_BITS) + ids[at]
                found = np.searchsorted(known, wanted)
                hit = np.append(known, -1)[found] == wanted
                inside[at] = hit if kind is SetKind.KEPT else ~hit
        for token in np.flatnonzero(kinds == SetKind.BITS):
            words, id = self.get_set(int(self.index[token]))[1], int(ids[token])
            word = id // _WORD_BITS
            inside[token] = word < len(words) and bool(int(words[word]) >> (id % _WORD_BITS) & 1)
        return inside


_NO_IDS: NDArray[np.int32] = np.empty(0, np.int32)
_COLUMNS: dict[str, type[np.generic]] = {"index": np.int32, "kind": np.int8, "offsets": np.int64, "data": np.int32}


def encode_set(mask: NDArray[np.bool_]) -> EncodedSet | None:
    """[V] → the shortest form of a set, among equally short ones the first of `SetKind`. None: the whole vocabulary."""
    kept = np.flatnonzero(mask)
    if len(kept) == len(mask):
        return None
    words = -(-len(mask) // _WORD_BITS)
    shortest = min(len(kept), len(mask) - len(kept), words)
    if len(kept) == shortest:
        return SetKind.KEPT, kept.astype(np.int32)
    if len(mask) - len(kept) == shortest:
        return SetKind.BANNED, np.flatnonzero(~mask).astype(np.int32)
    padded = np.zeros(words * _WORD_BITS, np.bool_)
    padded[: len(mask)] = mask
    return SetKind.BITS, np.packbits(padded, bitorder="little").view("<i4").astype(np.int32)


def encode_ids(ids: ArrayLike, vocab_size: int) -> EncodedSet | None:
    """Return the shortest form of the set of these ids. None: they are the whole vocabulary."""
    mask = np.zeros(vocab_size, np.bool_)
    mask[np.asarray(ids, np.int64)] = True
    return encode_set(mask)


def decode_set(encoded: EncodedSet, vocab_size: int) -> NDArray[np.bool_]:
    """Return a set as a mask [V]."""
    kind, data = encoded
    if kind is SetKind.BITS:
        raw = data.astype("<i4").view(np.uint8)
        return np.unpackbits(raw, bitorder="little", count=vocab_size).astype(np.bool_)
    mask = np.full(vocab_size, kind is SetKind.BANNED)
    mask[data] = kind is SetKind.KEPT
    return mask


class _SetTable:
    """Different sets, each once, in the order in which they came."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, bytes], int] = {}
        self._sets: list[EncodedSet] = []

    def add(self, encoded: EncodedSet) -> int:
        kind, data = encoded
        place = self._places.setdefault((int(kind), data.tobytes()), len(self._sets))
        if place == len(self._sets):
            self._sets.append(encoded)
        return place

    def add_all(self, support: Support) -> NDArray[np.int32]:
        """Add all sets; return the places of the tokens' sets here."""
        places = [self.add(support.get_set(place)) for place in range(len(support.kind))]
        return np.array([*places, WHOLE], np.int32)[support.index]

    def build(self, index: NDArray[np.int32]) -> Support:
        """Return the table with the places of some tokens' sets."""
        offsets = np.cumsum([0, *(len(data) for _, data in self._sets)])
        data = np.concatenate([_NO_IDS, *(data for _, data in self._sets)])
        return Support(index, np.array([kind for kind, _ in self._sets], np.int8), offsets, data)
