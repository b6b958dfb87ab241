"""PostgreSQL as the database of a journal: every failure of the server is a sentence, and loses nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from etude.errors import StoreError
from etude.store import Phase, TurnShape, open_store
from etude.store.journal.event_records import encode
from etude.store.journal.tables import SCHEMA
from tests.components import require
from tests.store.made import group, tried
from tests.store.servers import made_database, new_database, server

ROOT = Path(__file__).parents[3]


def test_a_reopened_journal_continues_at_its_end() -> None:
    where = new_database()
    with closing(open_store(where)) as store:
        store.append([*group(0), *tried(0), *tried(1)])
        store.flush()
    with closing(open_store(where)) as store:
        assert store.position == 11 and [state.id for state in store.rollouts(Phase.FINISHED)] == [0, 1]
        assert len(store.turns(0)) == 1 and store.append(group(1)) == 14
        assert store.turn_shapes([1, 2]) == {1: [TurnShape(4, 3, 1)], 2: []}
        assert [len(bodies) for bodies in store.turn_bodies([1, 2]).values()] == [1, 0]


def test_one_process_writes_at_a_time_and_others_may_read() -> None:
    where = new_database()
    with closing(open_store(where)) as writer:
        with pytest.raises(StoreError) as refused:
            open_store(where)
        assert re.search(rf"is being written by process {os.getpid()} on .*, and one", str(refused.value))
        writer.append(group(0))
        with closing(open_store(where, read_only=True)) as reader:
            writer.append(group(1))
            assert [encode(event) for _, event in reader.read()] == [encode(event) for _, event in writer.read()]
            with pytest.raises(StoreError, match="was opened read-only and cannot be written"):
                reader.append(group(2))


def test_the_right_to_write_ends_with_the_process_that_has_it() -> None:
    where = new_database()
    code = (
        "import sys, time; from etude.store import open_store; from tests.store.made import group\n"
        f"store = open_store({where!r}); print(store.append(group(0)), flush=True); time.sleep(60)"
    )
    writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert writer.stdout is not None
    with writer.stdout:
        assert writer.stdout.readline() == "3\n"
        with pytest.raises(StoreError, match=f"is being written by process {writer.pid} on"):
            open_store(where)
        writer.kill()
        writer.wait()
    for _ in range(200):  # the server notices a moment later
        try:
            store = open_store(where)
        except StoreError:
            continue
        break
    with closing(store):
        assert store.position == 3 and store.append(group(1)) == 6


def test_only_a_writer_creates_a_journal_and_other_tables_are_left_alone() -> None:
    where = new_database()
    with pytest.raises(StoreError, match=rf"it needs schema {SCHEMA} and found the tables \(none\)"):
        open_store(where, read_only=True)
    psycopg = pytest.importorskip("psycopg")
    with closing(psycopg.connect(where, autocommit=True)) as raw:
        raw.execute("CREATE TABLE photos (name TEXT)")
    with pytest.raises(StoreError, match=r"found the tables photos\. Nothing was changed"):
        open_store(where)


def test_a_damaged_payload_is_noticed() -> None:
    where = new_database()
    with closing(open_store(where)) as store:
        store.append([*group(0), *tried(0)])
    psycopg = pytest.importorskip("psycopg")
    with closing(psycopg.connect(where, autocommit=True)) as raw:
        raw.execute("UPDATE blobs SET payload = set_byte(payload, 30, 7)")
    with closing(open_store(where)) as store, pytest.raises(StoreError, match="does not match its checksum"):
        store.turns(0)


def test_a_missing_or_lost_server_is_reported_in_a_sentence() -> None:
    require("postgres")
    with server() as host:
        where = made_database(host, "run")
        with pytest.raises(StoreError, match=r"nobody on .* could not be opened: .*\"nobody\" does not exist"):
            open_store(where.replace("/run", "/nobody"))
        store = open_store(where)
        store.append(group(0))
    for ask in (lambda: store.append(group(1)), lambda: store.rollout(0), lambda: store.append(group(1))):
        with pytest.raises(StoreError, match=r"run on .* could not be (read|written): .* the journal again"):
            ask()
    store.close()
    with pytest.raises(StoreError, match=r"could not be opened: .* Check that the server runs"):
        open_store(where)


def test_an_invalid_address_is_refused_without_showing_the_password() -> None:
    with pytest.raises(StoreError, match=r"cannot be opened at mysql://…. Give the path of a file, or the address of"):
        open_store("mysql://me:secret@host/runs")
    require("postgres")
    with pytest.raises(StoreError, match=r"runs on 127\.0\.0\.1 could not be opened") as refused:
        open_store("postgresql://me:secret@127.0.0.1:1/runs")
    assert "secret" not in str(refused.value)
