"""The text of a grammar is stored once in a journal, and a turn is read with it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from etude.errors import StoreError
from etude.records import Turn
from etude.store import AttemptStarted, Event, Journal, TurnRecorded, open_store
from etude.store.journal.event_records import encode
from tests.store.made import group, turn
from tests.store.servers import new_database

FORM = '%llguidance {}\nstart: "é" | "' + "x" * 5000 + '"\n'
OTHER = "%llguidance {}\nstart: /\ud800/\n"
DECOY = '"grammar":{"name":"00000000000000000000000000000000"}'
"""A text that looks like the name of a grammar."""
TURNS = [
    replace(turn(2, 3), index=index, grammar=grammar, model=DECOY)
    for index, grammar in enumerate([FORM, None, FORM, OTHER])
]


def started(*turns: Turn) -> list[Event]:
    return [*group(0), AttemptStarted(0, 0), *(TurnRecorded(0, 0, each) for each in turns)]


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Journal]:
    where = {"memory": None, "sqlite": tmp_path / "journal.db"}.get(request.param, request.param)
    with closing(open_store(new_database() if where == "postgres" else where)) as journal:
        yield journal


def test_every_reader_sees_the_grammars_of_turns(store: Journal) -> None:
    events = started(*TURNS)
    store.append(events[:-2])
    store.append(events[-2:])  # the first grammar is there already
    wanted = [each.grammar for each in TURNS]
    assert [each.grammar for each in store.turns(0)] == wanted
    assert [encode(event) for _, event in store.read()] == [encode(event) for event in events]
    (found,) = store.read_rollouts([0])
    assert [event.turn.grammar for event in found if isinstance(event, TurnRecorded)] == wanted
    assert store.first_turns([0])[0].grammar == FORM
    store.verify_mark(store.flush(), 0)


def test_a_grammar_is_stored_once_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    with closing(open_store(path)) as store:
        store.append(started(*TURNS))
    with closing(sqlite3.connect(path)) as raw, raw:
        stored = sorted(size for (size,) in raw.execute("SELECT length(data) FROM sets"))
        assert stored == [1 + len(text.encode("utf-8", "surrogatepass")) for text in (OTHER, FORM)]
        (largest,) = raw.execute("SELECT max(length(body)) FROM events").fetchone()
        assert largest < 1000
        raw.execute("UPDATE sets SET data = CAST(data || x'20' AS BLOB) WHERE length(data) > 1000")
    with closing(open_store(path)) as store:
        for read in (lambda: store.turns(0), lambda: list(store.read())):
            with pytest.raises(StoreError, match=r"the grammar [0-9a-f]{32} that turn 0 of rollout 0 names"):
                read()
