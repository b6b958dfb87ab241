"""A set of many tokens is stored once in a journal, and a turn is read with all its sets."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from etude.errors import StoreError
from etude.records import Completion, Turn
from etude.store import AttemptStarted, Event, Journal, TurnRecorded, open_store
from etude.store.journal.blobs import pack_turn
from etude.store.journal.event_records import encode
from etude.store.journal.large_sets import move_sets_out, names_in, put_sets_back
from etude.support import EncodedSet, SetKind, Support, encode_set
from tests.store.made import group
from tests.store.servers import new_database

VOCAB = 5000
PLACES = ["memory", "sqlite", "postgres"]


def masked(first: int, count: int) -> EncodedSet:
    """Return the set of `count` ids from `first` on."""
    mask = np.zeros(VOCAB, np.bool_)
    mask[first : first + count] = True
    encoded = encode_set(mask)
    assert encoded is not None
    return encoded


SMALL = masked(0, 64)
KEPT = masked(0, 65)
BANNED = masked(100, VOCAB - 100)
BITS = masked(0, 2000)


def drawn(*sets: EncodedSet | None, index: int = 0) -> Turn:
    """Return a turn whose tokens, all 0 or 200, were drawn from these sets."""
    ids = np.array([200 if each is BANNED else 0 for each in sets], np.int32)
    completion = Completion(ids, np.zeros(len(ids)), np.zeros(len(ids), np.int32), "stop", support=Support.build(sets))
    return Turn([7], completion, index)


def started(*turns: Turn) -> list[Event]:
    return [*group(0), AttemptStarted(0, 0), *(TurnRecorded(0, 0, turn) for turn in turns)]


@pytest.fixture(params=PLACES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Journal]:
    where = {"memory": None, "sqlite": tmp_path / "journal.db"}.get(request.param, request.param)
    with closing(open_store(new_database() if where == "postgres" else where)) as journal:
        yield journal


# -- payloads ---------------------------------------------------------------------------------------------------------


def test_the_forms_of_the_examples() -> None:
    assert [kind for kind, _ in (SMALL, KEPT, BANNED, BITS)] == [0, 0, SetKind.BANNED, SetKind.BITS]


def test_sets_above_sixty_four_numbers_leave_the_payload_and_come_back() -> None:
    whole = pack_turn(drawn(SMALL, KEPT, None, BANNED, BITS, KEPT))
    payload, sets = move_sets_out(whole)
    assert [len(data) for _, data in sets] == [1 + 4 * 65, 1 + 4 * 100, 1 + 4 * 157]
    assert names_in(payload) == [name for name, _ in sets]
    assert len(whole) - len(payload) == 4 * (65 + 100 + 157) - 3 * 16
    assert put_sets_back(payload, dict(sets)) == whole


def test_a_payload_without_large_sets_stays_the_same_object() -> None:
    for turn in (drawn(None, None), drawn(SMALL, None), drawn()):
        payload = pack_turn(turn)
        kept, sets = move_sets_out(payload)
        assert kept is payload and sets == () and names_in(payload) == [] and put_sets_back(payload, {}) is payload


def test_equal_numbers_of_another_form_have_another_name() -> None:
    numbers = np.arange(100, 170, dtype=np.int32)
    kept, banned = ((kind, numbers) for kind in (SetKind.KEPT, SetKind.BANNED))
    support = Support([0, 1], [kind for kind, _ in (kept, banned)], [0, 70, 140], np.concatenate([numbers, numbers]))
    completion = Completion([100, 0], np.zeros(2), [0, 0], "stop", support=support)
    _, sets = move_sets_out(pack_turn(Turn([7], completion, 0)))
    assert len({name for name, _ in sets}) == 2


# -- journals ---------------------------------------------------------------------------------------------------------


def test_every_reader_sees_whole_turns(store: Journal) -> None:
    turns = [drawn(SMALL, KEPT, BITS), drawn(BITS, None, BANNED, index=1)]
    events = started(*turns)
    store.append(events[:-1])
    store.append(events[-1:])  # a set that is there already
    expected = [pack_turn(turn) for turn in turns]
    assert [pack_turn(turn) for turn in store.turns(0)] == expected
    assert [encode(event) for _, event in store.read()] == [encode(event) for event in events]
    (found,) = store.read_rollouts([0])
    assert [encode(event) for event in found] == [encode(event) for event in events[1:2] + events[3:]]
    assert pack_turn(store.first_turns([0])[0]) == expected[0]
    assert [shape.tokens for shape in store.turn_shapes([0])[0]] == [3, 3]
    store.verify_mark(store.flush(), 0)


def test_a_set_is_stored_once(tmp_path: Path) -> None:
    with closing(open_store(tmp_path / "journal.db")) as store:
        for step in range(20):
            store.append([*group(step, 1), AttemptStarted(step, 0), TurnRecorded(step, 0, drawn(*[BITS, KEPT] * 20))])
    with closing(sqlite3.connect(tmp_path / "journal.db")) as raw:
        assert raw.execute("SELECT count(*), sum(length(data)) FROM sets").fetchone() == (2, 2 + 4 * (65 + 157))
        (largest,) = raw.execute("SELECT max(length(payload)) FROM blobs").fetchone()
        assert largest < 40 * 17 + 200, "a token takes its columns and an index"


def test_a_batch_that_fails_leaves_no_set(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    with closing(open_store(path)) as store:
        store.append(group(0))
        with closing(sqlite3.connect(path)) as raw, raw:
            raw.execute("CREATE TRIGGER refuse BEFORE INSERT ON states BEGIN SELECT RAISE(ABORT, 'no'); END")
        with pytest.raises(StoreError, match="could not be written: no"):
            store.append(started(drawn(BITS))[3:])
        with closing(sqlite3.connect(path)) as raw, raw:
            assert raw.execute("SELECT count(*) FROM sets").fetchone() == (0,)
            raw.execute("DROP TRIGGER refuse")
        store.append(started(drawn(BITS))[3:])
        assert store.turns(0)[0].completion.support is not None


# -- damage -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A closed journal whose rollout 0 has two turns; only the second one names a set."""
    made = tmp_path / "journal.db"
    with closing(open_store(made)) as store:
        store.append(started(drawn(SMALL), drawn(BITS, index=1)))
    return made


FAULT = r"journal\.db is damaged: the set [0-9a-f]{32} that turn 1 of rollout 0 names is not in it, or is not what was"


@pytest.mark.parametrize(
    "change",
    [
        "DELETE FROM sets",
        "UPDATE sets SET digest = x'00'",
        "UPDATE sets SET data = substr(data, 1, 100)",
        "UPDATE sets SET data = CAST(x'00' || substr(data, 2) AS BLOB)",
        "UPDATE sets SET data = x''",
    ],
)
def test_a_set_that_is_missing_or_changed_is_named(path: Path, change: str) -> None:
    with closing(sqlite3.connect(path)) as raw, raw:
        assert raw.execute(change).rowcount == 1
    with closing(open_store(path)) as store:
        for read in (
            lambda: store.turns(0),
            lambda: list(store.read()),
            lambda: list(store.read_rollouts([0])),
            lambda: store.verify_mark(store.flush(), 0),
        ):
            with pytest.raises(StoreError, match=FAULT):
                read()
        assert store.rollout(0).id == 0 and store.append(group(1)) == 9, "the rest of the journal can be used"


def test_a_flipped_bit_of_a_set_is_never_trained_on(path: Path) -> None:
    """Whichever bit of the file: the row of the set, its index, or its overflow pages."""
    whole = path.read_bytes()
    with closing(sqlite3.connect(path)) as raw:
        ((digest, data),) = raw.execute("SELECT digest, data FROM sets").fetchall()
    starts = [whole.index(data), *(at for at in range(len(whole)) if whole.startswith(digest, at))]
    places = [at + offset for at in starts for offset in range(-6, 16, 3)] + [starts[0] + len(data) - 1]
    results = set()
    for place in places:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        try:
            with closing(open_store(path)) as store:
                (turn,) = store.turns(0)[1:]
            assert pack_turn(turn) == pack_turn(drawn(BITS, index=1))
            results.add("whole")
        except StoreError as error:
            results.add("named" if "names is not in it" in str(error) else "refused")
    assert "named" in results


def test_a_turn_without_large_sets_does_not_need_the_table(path: Path) -> None:
    with closing(sqlite3.connect(path)) as raw, raw:
        raw.execute("DELETE FROM sets")
    with closing(open_store(path)) as store:
        assert pack_turn(store.first_turns([0])[0]) == pack_turn(drawn(SMALL))
