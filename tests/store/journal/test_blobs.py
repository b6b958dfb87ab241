"""The arrays of a turn are bytes of a known layout, and come back exactly."""

from __future__ import annotations

import json
import sqlite3
import struct
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import StoreError
from etude.records import Completion, Outcome, Turn
from etude.store import AttemptEnded, AttemptStarted, TurnRecorded, TurnShape, open_store
from etude.store.journal.blobs import pack_turn, unpack_turn
from etude.support import SetKind, Support
from etude.token_routes import TokenRoutes
from tests.store.made import group, turn

numbers = st.integers(-(2**31), 2**31 - 1)
floats = st.floats(width=32, allow_nan=True, allow_infinity=True)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    """Draw turns of any length, with any of the optional columns, and any float."""
    length, width = draw(st.integers(0, 5)), draw(st.integers(0, 3))

    def column(values: st.SearchStrategy[float], *shape: int) -> np.ndarray:
        count = int(np.prod(shape))
        kind = np.float32 if values is floats else np.int32
        return np.array(draw(st.lists(values, min_size=count, max_size=count)), dtype=kind).reshape(shape)

    ids = column(numbers, length)
    completion = Completion(
        ids,
        column(floats, length),
        column(numbers, length),
        "stop",
        raw_logp=column(floats, length) if draw(st.booleans()) else None,
        top_ids=column(numbers, length, width) if draw(st.booleans()) else None,
        top_logp=column(floats, length, width) if draw(st.booleans()) else None,
        support=_sets_of(ids) if draw(st.booleans()) else None,
        alternative_ids=(alternatives := column(numbers, length, width) if draw(st.booleans()) else None),
        alternative_logp=None if alternatives is None else column(floats, length, width),
    )
    prompt = column(numbers, draw(st.integers(0, 4)))
    if draw(st.booleans()):
        completion = replace(completion, routes=draw(routes(max(len(prompt) + length - 1, 0))))
    return Turn(prompt, completion, 0)


@st.composite
def routes(draw: st.DrawFn, computed: int) -> TokenRoutes:
    """Draw the experts of the last of so many tokens, of few experts or of many."""
    start = draw(st.integers(0, computed))
    shape = (computed - start, draw(st.integers(1, 3)), draw(st.integers(1, 2)))
    most, dtype = draw(st.sampled_from([(255, np.uint8), (2**15 - 1, np.int16)]))
    count = int(np.prod(shape))
    experts = draw(st.lists(st.integers(0, most), min_size=count, max_size=count))
    return TokenRoutes(np.array(experts, dtype).reshape(shape), start)


def _sets_of(ids: np.ndarray) -> Support:
    """Return a set of each form, one for each token in turn: it alone, all but another, and the whole vocabulary."""
    table = [[id] if place % 3 == 0 else [id - 1 if id > 0 else id + 1] for place, id in enumerate(ids.tolist())]
    index = [-1 if place % 3 == 2 else place for place in range(len(ids))]
    kind = [SetKind.BANNED if place % 3 else SetKind.KEPT for place in range(len(ids))]
    return Support(index, kind, np.arange(len(ids) + 1), np.array(table, np.int32).reshape(-1))


@given(turns())
def test_arrays_come_back_to_the_last_bit(turn: Turn) -> None:
    prompt, columns = unpack_turn(pack_turn(turn))
    assert prompt.tobytes() == turn.prompt.tobytes()
    for name in ("ids", "logp", "version", "raw_logp", "top_ids", "top_logp"):
        original = getattr(turn.completion, name)
        assert (original is None) == (name not in columns)
        if original is not None:
            read = columns[name]
            assert (read.tobytes(), read.shape, read.dtype) == (original.tobytes(), original.shape, original.dtype)
    assert (turn.completion.support is None) == ("support" not in columns)
    if turn.completion.support is not None:
        for name in ("index", "kind", "offsets", "data"):
            np.testing.assert_array_equal(getattr(columns["support"], name), getattr(turn.completion.support, name))
    original, read = turn.completion.routes, columns.get("routes")
    assert (original is None) == (read is None)
    if original is not None and read is not None:
        assert read.start == original.start and read.experts.dtype == original.experts.dtype
        np.testing.assert_array_equal(read.experts, original.experts)


def test_the_layout_is_a_header_and_little_endian_columns() -> None:
    completion = Completion([1, 258], [-0.5, -1.0], [7, 7], "stop")
    payload = pack_turn(Turn([3], completion, 0))
    lengths = struct.pack("<QQQB", 1, 2, 0, 0)
    assert payload == lengths + struct.pack("<i", 3) + struct.pack("<2i2f2i", 1, 258, -0.5, -1.0, 7, 7)


def test_sixty_four_tokens_take_little_more_than_their_bytes() -> None:
    completion = Completion(np.arange(64), np.zeros(64), np.zeros(64, int), "stop")
    assert len(pack_turn(Turn(np.arange(64), completion, 0))) == 25 + 4 * 64 * 4


@pytest.mark.parametrize("length", [0, 10, 24, 25, 40, -1])
def test_a_payload_that_was_cut_short_is_refused(length: int) -> None:
    with pytest.raises(StoreError, match="truncated"):
        unpack_turn(pack_turn(turn())[:length])


@pytest.mark.parametrize("where", [None, "journal.sqlite"])
def test_the_shape_of_a_turn_is_read_from_the_last_attempt(where: str | None, tmp_path: Path) -> None:
    versions = np.array([3, 3, 5])
    drawn = replace(turn(0, seed=1).completion, version=versions)
    with closing(open_store(None if where is None else tmp_path / where)) as store:
        store.append([*group(0, size=3), AttemptStarted(0, 0), TurnRecorded(0, 0, turn(0, tokens=7))])
        store.append([AttemptEnded(0, 0, Outcome.FAILED, "it broke", retry=True), AttemptStarted(0, 1)])
        store.append([TurnRecorded(0, 1, replace(turn(0), completion=drawn)), TurnRecorded(0, 1, turn(1, tokens=0))])
        assert store.turn_shapes([2, 0, 1]) == {2: [], 0: [TurnShape(4, 3, 3), TurnShape(4, 0, None)], 1: []}
        assert store.turn_shapes([]) == {}
        texts = {id: [json.loads(body)["attempt"] for body in found] for id, found in store.turn_bodies([2, 0]).items()}
        assert texts == {2: [], 0: [0, 1, 1]}


def test_a_payload_that_is_missing_or_cut_has_no_shape(tmp_path: Path) -> None:
    with closing(open_store(tmp_path / "journal.sqlite")) as store:
        store.append([*group(0, size=1), AttemptStarted(0, 0), TurnRecorded(0, 0, turn())])
        for change, fault in (
            ("UPDATE blobs SET payload = substr(payload, 1, 40)", "ends before its column 'version'"),
            ("DELETE FROM blobs", "too few for its header"),
        ):
            with closing(sqlite3.connect(tmp_path / "journal.sqlite")) as raw, raw:
                raw.execute(change)
            with pytest.raises(StoreError, match=fault):
                store.turn_shapes([0])
