"""Sets of tokens are kept in their shortest form, once each, and come back as the masks that they were."""

from __future__ import annotations

import copy
import pickle
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.records import Completion
from etude.support import WHOLE, SetKind, Support, decode_set, encode_ids, encode_set

VOCAB = 70
masks = st.lists(st.integers(0, VOCAB - 1), min_size=1, unique=True).map(
    lambda ids: np.isin(np.arange(VOCAB), np.array(ids))
)
many_masks = st.lists(masks | st.just(np.ones(VOCAB, np.bool_)), max_size=6)


def build(sets: list[np.ndarray]) -> Support:
    return Support.build([encode_set(mask) for mask in sets]) or Support.whole(len(sets))


def make(index: list[int], kind: list[int], offsets: list[int], data: list[int]) -> Support:
    return Support(np.array(index), np.array(kind), np.array(offsets), np.array(data))  # type: ignore[arg-type]


def read(support: Support) -> list[list[bool]]:
    return [support.mask(token, VOCAB).tolist() for token in range(len(support))]


@given(masks)
def test_a_set_has_the_shortest_form_and_comes_back(mask: np.ndarray) -> None:
    encoded = encode_set(mask)
    assert (encoded is None) == mask.all()
    if encoded is not None:
        kind, data = encoded
        assert len(data) == min(mask.sum(), VOCAB - mask.sum(), 3)
        np.testing.assert_array_equal(decode_set(encoded, VOCAB), mask)
        again = encode_ids(np.flatnonzero(mask)[::-1], VOCAB)
        assert again is not None and (again[0], again[1].tobytes()) == (kind, data.tobytes()), "equal sets, equal bytes"


@given(many_masks)
def test_what_is_asked_of_sets_is_what_their_masks_say(sets: list[np.ndarray]) -> None:
    support = build(sets)
    assert read(support) == [mask.tolist() for mask in sets]
    assert support.sizes(VOCAB).tolist() == [int(mask.sum()) for mask in sets]
    banned = [encoded is not None and encoded[0] is SetKind.BANNED for encoded in map(encode_set, sets)]
    signed = [int(mask.sum()) - (VOCAB if out or mask.all() else 0) for mask, out in zip(sets, banned, strict=True)]
    assert support.signed_sizes().tolist() == signed
    for id in (0, 31, 32, VOCAB - 1):
        inside = support.contains(np.full(len(sets), id, np.int32))
        assert inside.tolist() == [bool(mask[id]) for mask in sets]


@given(many_masks, many_masks, st.randoms(use_true_random=False))
def test_sets_are_selected_and_joined_like_their_masks(
    one: list[np.ndarray], other: list[np.ndarray], random: Random
) -> None:
    joined = Support.concat([build(one), 2, build(other)])
    assert joined is not None
    assert Support.concat([2, 3]) is None
    whole = np.ones(VOCAB, np.bool_)
    expected = [mask.tolist() for mask in (*one, whole, whole, *other)]
    assert read(joined) == expected
    assert len(joined.kind) == len({tuple(mask) for mask in expected} - {tuple(whole.tolist())}), "each set once"
    places = random.sample(range(len(expected)), random.randrange(len(expected) + 1))
    selected = joined.select(np.array(places, np.int64))
    assert read(selected) == [expected[place] for place in places]
    assert sorted({*selected.index.tolist()} - {WHOLE}) == list(range(len(selected.kind))), "no set without a token"


def complete(ids: list[int], support: Support) -> Completion:
    zeros = np.zeros(len(ids))
    return Completion(np.array(ids), zeros.astype(np.float32), zeros.astype(np.int32), "stop", support=support)  # type: ignore[arg-type]


def test_a_drawn_token_outside_of_its_set_is_refused() -> None:
    support = make([0, -1, 1], [SetKind.KEPT, SetKind.BANNED], [0, 2, 3], [4, 9, 5])
    assert complete([9, 3, 6], support).support is support
    with pytest.raises(ValueError, match=r"Token 0 of an answer is 5, which is not in .* \(2 ids\)"):
        complete([5, 3, 6], support)
    with pytest.raises(ValueError, match=r"Token 2 of an answer is 5, .* \(all but 1 ids\)"):
        complete([4, 3, 5], support)
    with pytest.raises(ValueError, match="support 3"):
        complete([4], support)


@pytest.mark.parametrize(
    ("index", "kind", "offsets", "data", "message"),
    [
        ([0], [3], [0, 1], [4], "forms are 0 to 2"),
        ([1], [0], [0, 1], [4], "from -1 to 0"),
        ([0], [0], [0, 2], [4], "rise from 0 to the 1 numbers"),
        ([0], [0, 0], [0, 1], [4], "rise from 0"),
        ([0], [0, 0], [0, 2, 1], [4], "rise from 0"),
    ],
)
def test_a_damaged_table_is_refused(
    index: list[int], kind: list[int], offsets: list[int], data: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(index, kind, offsets, data)


def test_copies_are_read_only_too() -> None:
    support = make([0], [0], [0, 1], [4])
    for copied in (pickle.loads(pickle.dumps(support)), copy.deepcopy(support)):
        assert read(copied) == read(support)
        with pytest.raises(ValueError, match="read-only"):
            copied.data[0] = 3
