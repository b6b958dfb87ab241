"""SQLite as the database of a journal: every failure of the file is a sentence, and loses nothing."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from etude.errors import StoreError
from etude.store import (
    Event,
    Journal,
    JournalMark,
    Phase,
    RolloutQueued,
    RolloutsAdmitted,
    RolloutState,
    TaskDropped,
    TurnRecorded,
    TurnRewarded,
    open_store,
)
from etude.store.journal import sql, sqlite
from etude.store.journal.event_records import encode
from etude.store.journal.tables import SCHEMA
from tests.store.made import group, tried

ROOT = Path(__file__).parents[3]
BEGUN: list[Event] = [*group(0), *tried(0), *tried(1)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A closed journal with content."""
    made = tmp_path / "journal.db"
    with closing(open_store(made)) as store:
        store.append(BEGUN)
    return made


def log_of(store: Journal) -> list[object]:
    """Return all written events, in their written form."""
    return [encode(event) for _, event in store.read()]


def assert_whole(path: Path) -> None:
    """Assert that the journal holds the written events and can be written."""
    with closing(open_store(path)) as store:
        assert log_of(store)[: len(BEGUN)] == [encode(event) for event in BEGUN]
        store.append(group(7))


# -- opening ----------------------------------------------------------------------------------------------------------


def test_a_closed_journal_is_one_file_and_a_lock(path: Path) -> None:
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["journal.db", "journal.db-lock"]
    assert path.with_name("journal.db-lock").stat().st_size == 0


def test_a_reopened_journal_continues_at_its_end(path: Path) -> None:
    with closing(open_store(path)) as store:
        assert store.position == len(BEGUN) and [state.id for state in store.rollouts(Phase.FINISHED)] == [0, 1]
        assert store.append(group(1)) == len(BEGUN) + 3


def test_file_names_may_have_odd_characters(tmp_path: Path) -> None:
    for name in ("a b?mode=memory.db", "ü#1.db", "100%.db"):
        with closing(open_store(tmp_path / name)) as store:
            store.append(group(0))
        assert (tmp_path / name).stat().st_size > 0


def test_one_process_writes_at_a_time(path: Path) -> None:
    with closing(open_store(path)), pytest.raises(StoreError) as refused:
        open_store(path)
    assert re.search(rf"journal\.db is being written by process {os.getpid()} on .*, and one", str(refused.value))
    assert_whole(path)


def test_the_right_to_write_ends_with_the_process_that_has_it(path: Path) -> None:
    """Even if a child that it forked lives on with its open files."""
    code = (
        "import os, sys, time; from pathlib import Path; from etude.store import open_store\n"
        f"store = open_store(Path({str(path)!r})); child = os.fork()\n"
        "if child == 0: time.sleep(60)\n"
        "print(child, flush=True); time.sleep(60)"
    )
    writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert writer.stdout is not None
    with writer.stdout:
        child = int(writer.stdout.readline())
        try:
            with pytest.raises(StoreError, match=f"is being written by process {writer.pid} on"):
                open_store(path)
            writer.kill()
            writer.wait()
            assert_whole(path)
        finally:
            os.kill(child, signal.SIGKILL)


def test_other_processes_may_read_during_writes(path: Path) -> None:
    with closing(open_store(path)) as writer, closing(open_store(path, read_only=True)) as reader:
        writer.append(group(1))
        assert reader.position == writer.position and log_of(reader) == log_of(writer)
        with pytest.raises(StoreError, match="was opened read-only and cannot be written"):
            reader.append(group(2))
        assert writer.append(group(2)) == reader.position


def test_a_reader_leaves_the_files_of_a_killed_run_as_they_are(path: Path, tmp_path: Path) -> None:
    """The newest events stay in the log, also when the reader is the last to close the journal."""
    copy = tmp_path / "copy"
    copy.mkdir()
    with closing(open_store(path)) as writer:
        writer.append(group(1))
        files = [Path(shutil.copy(f"{path}{ending}", copy)) for ending in ("", "-wal")]
        expected = log_of(writer)
    before = [(file.read_bytes(), file.stat().st_mtime_ns) for file in files]
    with closing(open_store(files[0], read_only=True)) as reader:
        assert log_of(reader) == expected
    assert [(file.read_bytes(), file.stat().st_mtime_ns) for file in files] == before


@pytest.mark.parametrize("read_only", [True, False])
def test_a_directory_is_not_a_journal(tmp_path: Path, read_only: bool) -> None:
    with pytest.raises(StoreError, match=r"a directory is there\. Give the path of its file"):
        open_store(tmp_path, read_only=read_only)


def test_only_a_writer_creates_a_journal(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="nothing is there"):
        open_store(tmp_path / "no.db", read_only=True)
    with pytest.raises(StoreError, match=r"could not be opened: its directory is missing or not accessible"):
        open_store(tmp_path / "no" / "no.db")
    assert list(tmp_path.iterdir()) == []


def test_a_closed_journal_refuses_calls(path: Path) -> None:
    store = open_store(path)
    store.close()
    store.close()
    for ask in (lambda: store.append(group(1)), lambda: store.rollout(0), lambda: list(store.read())):
        with pytest.raises(StoreError, match=r"journal\.db could not be (read|written): it is closed\."):
            ask()


def test_a_journal_of_another_schema_is_left_alone(path: Path) -> None:
    with closing(sqlite3.connect(path)) as raw, raw:
        raw.execute("UPDATE facts SET value = '99' WHERE name = 'schema'")
    before = path.read_bytes()
    for read_only in (False, True):
        with pytest.raises(StoreError, match=rf"it needs schema {SCHEMA} and found schema 99\. Nothing was changed"):
            open_store(path, read_only=read_only)
    assert path.read_bytes() == before


def test_another_programs_database_is_left_alone(tmp_path: Path) -> None:
    other = tmp_path / "photos.db"
    with closing(sqlite3.connect(other)) as raw, raw:
        raw.execute("CREATE TABLE photos (name TEXT)")
    before = other.read_bytes()
    with pytest.raises(StoreError, match=r"found the tables photos\. Nothing was changed"):
        open_store(other)
    assert other.read_bytes() == before


def test_states_of_another_version_are_derived_again(path: Path) -> None:
    with closing(open_store(path)) as store:
        expected = store.rollouts()
    with closing(sqlite3.connect(path)) as raw, raw:
        raw.execute("UPDATE facts SET value = '0' WHERE name = 'derivation'")
        raw.execute("DELETE FROM states WHERE id = 0")
        raw.execute("UPDATE states SET phase = 'dropped'")
    with closing(open_store(path)) as store:
        assert store.rollouts() == expected == store.rollouts(Phase.FINISHED) and len(store.tasks(Phase.OPEN)) == 1
        store.append(group(1))


# -- faults -----------------------------------------------------------------------------------------------------------


def test_a_locked_database_is_waited_for_and_then_reported(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "WAIT_S", 0.2)
    with closing(open_store(path)) as store:
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreError, match="could not be written: another process has held it"):
                store.append(group(1))
            assert store.position == len(BEGUN)
        assert store.append(group(1)) == len(BEGUN) + 3
    assert_whole(path)


def test_a_full_disk_is_reported_and_writing_can_continue(path: Path) -> None:
    with closing(open_store(path)) as store:
        assert isinstance(store, sql.SqlJournal)
        pages = store._connection.exec_driver_sql("PRAGMA page_count").scalar()
        store._connection.exec_driver_sql(f"PRAGMA max_page_count={pages}")  # SQLite then meets its own full disk
        with pytest.raises(StoreError, match="could not be written: the disk is full: free some space and try again"):
            for task in range(1, 100):
                written = store.position
                store.append([*group(task), *tried(task * 2), *tried(task * 2 + 1)])
        assert store.position == written and len(log_of(store)) == written
        store._connection.exec_driver_sql("PRAGMA max_page_count=1000000")
        assert store.append([*group(task), *tried(task * 2)]) == written + 7
    assert_whole(path)


def test_a_file_size_limit_is_reported_and_writing_can_continue(path: Path) -> None:
    """The operating system refuses to let a file grow, and allows it later."""
    code = (
        "import resource, sys; from pathlib import Path; from etude.errors import StoreError\n"
        "from etude.store import open_store; from tests.store.made import group\n"
        f"store = open_store(Path({str(path)!r})); start = store.position\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))\n"
        "task = 0\n"
        "try:\n"
        "    while True: task += 1; store.append(group(task))\n"
        "except StoreError as error: print(error)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
        "assert store.position == start + 3 * (task - 1), (store.position, start, task)\n"
        "assert store.append(group(task)) == start + 3 * task\n"
        "print(store.position)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    sentence, position = done.stdout.splitlines()
    assert re.search(r"could not be written: (the operating system failed to|the disk is full)", sentence), sentence
    with closing(open_store(path)) as store:
        assert store.position == int(position) == len(log_of(store))
    assert_whole(path)


def test_a_batch_that_fails_in_the_middle_of_writing_leaves_nothing(path: Path) -> None:
    with closing(sqlite3.connect(path)) as raw, raw:
        raw.execute(
            "CREATE TRIGGER refuse BEFORE INSERT ON states WHEN NEW.id = 9 BEGIN SELECT RAISE(ABORT, 'not nine'); END"
        )
    with closing(open_store(path)) as store:
        before = log_of(store), store.rollouts(), store.tasks()
        with pytest.raises(StoreError, match=r"journal\.db could not be written: not nine\."):
            store.append([*group(1), *tried(2), *group(9)])
        assert (log_of(store), store.rollouts(), store.tasks()) == before
        assert store.append(group(1)) == len(BEGUN) + 3


def test_a_file_that_is_no_database_is_left_alone(tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("to do\n" * 2000)
    with pytest.raises(
        StoreError,
        match=r"notes\.txt could not be opened: it is not a database, or was overwritten, and nothing was chang",
    ):
        open_store(notes)
    assert notes.read_text() == "to do\n" * 2000


def test_a_truncated_file_is_reported(path: Path) -> None:
    with closing(open_store(path)) as store:
        store.append([event for task in range(1, 100) for event in group(task)])
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with (
        pytest.raises(StoreError, match=r"could not be (opened|read): its contents are damaged, and nothing was"),
        closing(open_store(path)) as store,
    ):
        log_of(store)
    assert path.read_bytes()[: len(whole) // 2] == whole[: len(whole) // 2]


@pytest.mark.parametrize(("table", "column"), [("blobs", "payload"), ("events", "body")])
def test_a_flipped_bit_is_never_trained_on(path: Path, table: str, column: str) -> None:
    with closing(sqlite3.connect(path)) as raw, raw:
        position, value = raw.execute(
            f"SELECT b.position, CAST(t.{column} AS BLOB) FROM blobs b JOIN {table} t USING (position)"
        ).fetchone()
        damaged = value[:-3] + bytes([value[-3] ^ 1]) + value[-2:]
        damaged = damaged if table == "blobs" else damaged.decode()
        raw.execute(f"UPDATE {table} SET {column} = ? WHERE position = ?", (damaged, position))
    with (
        closing(open_store(path)) as store,
        pytest.raises(
            StoreError, match=f"journal .* is damaged: its event at position {position} does not match its checksum"
        ),
    ):
        store.turns(0)


STATE = ("kind", "id", "phase", "body", "digest")


@pytest.mark.parametrize("column", STATE)
def test_a_state_that_was_changed_is_never_trained_on(path: Path, column: str) -> None:
    """A state with a reward of 1 in place of 0 is as valid as the derived one."""
    values = {"kind": "'task'", "id": "7", "phase": "'admitted'", "digest": "digest + 1"}
    changed = values.get(column, """replace(body, '"reward":1.0', '"reward":0.5')""")
    with closing(sqlite3.connect(path)) as raw, raw:
        assert raw.execute(f"UPDATE states SET {column} = {changed} WHERE kind = 'rollout' AND id = 1").rowcount == 1
    with (
        closing(open_store(path)) as store,
        pytest.raises(StoreError, match=r"damaged: its state of (rollout|task) (1|7) does not match its checksum"),
    ):
        store.rollouts()
        store.tasks()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("DELETE FROM events WHERE position = 5", "event at position 5 is missing"),
        ("UPDATE events SET position = -5 WHERE position = 5", "event at position 5 is missing"),
        ("UPDATE events SET position = 99 WHERE position = 5", "it ends at event 99, which is not the last"),
        ("DELETE FROM events WHERE position = (SELECT max(position) FROM events)", "which is not the last one"),
        (
            "UPDATE events SET chain = chain + 1 WHERE position = 5",
            "event at position 5 does not follow the one before",
        ),
        (
            "UPDATE events SET kind = 'note_recorded' WHERE position = 5",
            "event at position 5 does not match its checksum",
        ),
        ("UPDATE events SET rollout = 7 WHERE position = 5", "event at position 5 does not match its checksum"),
        ("UPDATE events SET size = 3 WHERE position = 2", None),
        ("UPDATE events SET digest = 'x' WHERE position = 5", "a value in it was changed after it was written"),
        ("UPDATE events SET body = x'ff' WHERE position = 5", "a value in it was changed after it was written"),
        ("UPDATE facts SET value = 'x' WHERE name = 'end'", "which is not the last one written"),
        ("UPDATE facts SET name = 'enD' WHERE name = 'end'", "which is not the last one written"),
    ],
)
def test_a_missing_or_changed_event_is_noticed(path: Path, change: str, complaint: str | None) -> None:
    with closing(sqlite3.connect(path)) as raw, raw:
        assert raw.execute(change).rowcount == 1
    if complaint is None:  # the size only says which payload to read
        with closing(open_store(path)) as store:
            assert log_of(store) == [encode(event) for event in BEGUN]
        return
    with pytest.raises(StoreError, match=rf"journal\.db is damaged: .*{complaint}"), closing(open_store(path)) as store:
        store.verify_mark(JournalMark(0, 0))


def paid(path: Path) -> None:
    """Write two turns; the second has two rewards, one of them negative."""
    payments = [TurnRewarded(2, 0, 1, 0.5), TurnRewarded(2, 0, 1, 0.25), TurnRewarded(2, 0, 0, -0.5)]
    with closing(open_store(path)) as store:
        store.append([*group(1), *tried(2, turns=2), *payments, *group(3)])
        assert [turn.reward for turn in store.turns(2)] == [-0.5, 0.75]


PAYMENTS = ["body LIKE '%0.25%'", "body LIKE '%-0.5%'", "body LIKE '%0.5%'"]


@pytest.mark.parametrize("which", PAYMENTS)
def test_a_missing_event_before_a_checkpoint_is_noticed(path: Path, which: str) -> None:
    """A reward is missing, or two that cancel each other: the remaining turns are as written."""
    paid(path)
    with closing(sqlite3.connect(path)) as raw, raw:
        assert raw.execute(f"DELETE FROM events WHERE kind = 'turn_rewarded' AND {which}").rowcount > 0
    with pytest.raises(StoreError, match=r"journal\.db is damaged: its event at position \d+ is missing"):
        open_store(path)


@pytest.mark.parametrize("which", PAYMENTS[:2])
def test_turns_without_their_rewards_are_not_read(path: Path, which: str) -> None:
    paid(path)
    with closing(sqlite3.connect(path)) as raw, raw:
        assert raw.execute(f"DELETE FROM events WHERE kind = 'turn_rewarded' AND {which}").rowcount == 1
    with (
        closing(open_store(path, read_only=True)) as store,
        pytest.raises(StoreError, match=r"but 2 turns with rewards of 0\.25"),
    ):
        store.turns(2)


def test_an_index_from_which_an_entry_is_missing_is_noticed(path: Path) -> None:
    """A replay would leave out the rollouts that the index does not find."""
    with closing(open_store(path)) as store:
        store.append([RolloutsAdmitted(1, (0, 1), end=0, version=0)])
    with closing(sqlite3.connect(path)) as raw, raw:
        raw.execute("PRAGMA writable_schema = ON")
        raw.execute("UPDATE sqlite_schema SET sql = sql || ' WHERE position < 9' WHERE name = 'events_of_kind'")
    with closing(sqlite3.connect(path)) as raw, raw:
        raw.execute("REINDEX events_of_kind")
        raw.execute("PRAGMA writable_schema = ON")
        raw.execute("UPDATE sqlite_schema SET sql = replace(sql, ' WHERE position < 9', '')")
    with pytest.raises(StoreError, match=r"journal\.db is damaged: its database has faults \(.*events_of_kind"):
        open_store(path)


def test_a_mark_distinguishes_its_journal_from_another(path: Path, tmp_path: Path) -> None:
    with closing(open_store(path)) as store:
        mark = store.flush()
        assert mark == store.end_mark and mark.position == len(BEGUN)
        store.append(group(1))
        store.verify_mark(mark)
    with closing(open_store(tmp_path / "other.db")) as other:
        other.append([*group(0), *tried(0), *tried(1, reward=0.0)])
        with pytest.raises(StoreError, match=r"other\.db does not belong to the checkpoint"):
            other.verify_mark(mark)
    with (
        closing(open_store(tmp_path / "shorter.db")) as other,
        pytest.raises(StoreError, match=rf"shorter\.db has 0 events, and had {mark.position} when"),
    ):
        other.verify_mark(mark)


def test_events_before_a_mark_are_checked_where_they_are_needed(path: Path) -> None:
    with closing(sqlite3.connect(path)) as raw, raw:
        assert raw.execute("UPDATE events SET kind = 'note_recorded' WHERE position = 5").rowcount == 1
    with closing(open_store(path)) as store:
        mark = store.flush()
        store.verify_mark(mark)
        store.verify_mark(mark, 5)
        with pytest.raises(StoreError, match="event at position 5 does not match its checksum"):
            store.verify_mark(mark, 4)


def test_a_missing_payload_is_noticed(path: Path) -> None:
    with closing(sqlite3.connect(path)) as raw, raw:
        raw.execute("DELETE FROM blobs")
    with closing(open_store(path)) as store, pytest.raises(StoreError, match="does not match its checksum"):
        store.turns(0)


# -- layout -----------------------------------------------------------------------------------------------------------


def test_the_log_is_written_ahead(path: Path) -> None:
    with closing(sqlite3.connect(path)) as raw:
        assert raw.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_flush_syncs_the_log_and_records_the_position(path: Path) -> None:
    with closing(open_store(path)) as store:
        store.append(group(1))
        store.flush()
        assert store.append(group(2)) == len(BEGUN) + 6
    with closing(sqlite3.connect(path)) as raw:
        assert raw.execute("SELECT value FROM facts WHERE name = 'flushed'").fetchone() == (str(len(BEGUN) + 3),)


def test_every_query_uses_an_index(path: Path) -> None:
    """The cost of an answer then depends on its size, and not on the length of the journal."""
    queries: list[str] = []
    with closing(open_store(path)) as store:
        assert isinstance(store, sql.SqlJournal)
        raw: Any = store._connection.connection.driver_connection
        raw.set_trace_callback(queries.append)
        store.append(
            [*group(1), *tried(2), *tried(3), RolloutsAdmitted(1, (2, 3), end=0, version=0), TaskDropped(0, 1, "flat")]
        )
        for answer in (
            store.read(),
            store.read(3),
            store.read(3, kinds=(RolloutQueued, TurnRecorded)),
            store.read(rollout=2),
        ):
            assert len(list(answer)) > 0
        assert len(list(store.read_rollouts([2, 3]))) == 2
        assert len(store.turn_shapes([2, 3])) == len(store.turn_bodies([2, 3])) == 2
        assert store.turns(2) and store.admitted(1) and store.rollouts(Phase.ADMITTED) and store.task(0)
        assert (
            len(list(store.iter_states(RolloutState)))
            == 4
            == len(list(store.iter_states(RolloutState, backwards=True)))
        )
        raw.set_trace_callback(None)
    with closing(sqlite3.connect(path)) as raw:
        questions = [question for question in queries if question.startswith("SELECT")]
        plans = {row[3] for question in questions for row in raw.execute(f"EXPLAIN QUERY PLAN {question}")}
    assert plans == {
        "SEARCH events USING INTEGER PRIMARY KEY (rowid=?)",  # the one before
        "SEARCH events USING INTEGER PRIMARY KEY (rowid>? AND rowid<?)",
        "SEARCH events USING INDEX events_of_kind (kind=? AND position>? AND position<?)",
        "SEARCH events USING INDEX events_of_rollout (rollout=? AND position>? AND position<?)",
        "SEARCH events USING INDEX events_of_rollout (rollout=?)",
        "SEARCH blobs USING INTEGER PRIMARY KEY (rowid=?)",
        "SEARCH blobs USING INTEGER PRIMARY KEY (rowid=?) LEFT-JOIN",
        "SEARCH sets USING INDEX sqlite_autoindex_sets_1 (digest=?)",
        "SEARCH states USING INDEX sqlite_autoindex_states_1 (kind=? AND id=?)",
        "SEARCH states USING INDEX sqlite_autoindex_states_1 (kind=? AND id<?)",  # the greatest
        "SEARCH states USING INDEX sqlite_autoindex_states_1 (kind=? AND id>?)",
        "SEARCH states USING INDEX states_in_phase (kind=? AND phase=?)",
    }


# -- large journals ---------------------------------------------------------------------------------------------------


@pytest.mark.soak
def test_a_hundred_thousand_rollouts_are_written_at_constant_cost(tmp_path: Path) -> None:
    """Written and read back completely; the last ones cost as much as the first ones."""
    size, steps = 64, 1563
    spent: list[float] = []
    with closing(open_store(tmp_path / "long.db")) as store:
        for step in range(steps):
            ids = range(step * size, (step + 1) * size)
            events = [*group(step, size), *(event for id in ids for event in tried(id))]
            started = time.thread_time()
            store.append(events)
            assert len(store.rollouts(Phase.FINISHED)) == size
            for id in ids[::8]:
                assert len(store.turns(id)) == 1
            spent.append(time.thread_time() - started)
            store.append([RolloutsAdmitted(step, tuple(ids), end=0, version=0)])
    early, late = sorted(spent[10:110])[50], sorted(spent[-100:])[50]
    assert late < 1.3 * early, f"a step cost {1e3 * early:.1f} ms at the beginning and {1e3 * late:.1f} ms at the end"
    with closing(open_store(tmp_path / "long.db")) as store:
        assert store.position == steps * (1 + size * 5 + 1)
        assert sum(1 for _ in store.read()) == store.position
        assert store.rollouts(Phase.QUEUED, Phase.RUNNING, Phase.FINISHED) == []
        assert [len(rollouts) for rollouts in store.admitted().values()] == [size] * steps


@pytest.mark.parametrize("log", [[], ["journal.sqlite-wal"]])
def test_a_journal_in_a_directory_that_cannot_be_written_is_read(
    path: Path, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = path.parent / "a run #1 100%?"
    place.mkdir()
    with closing(open_store(place / "journal.sqlite")) as store:
        store.append([*group(7), *tried(14)])
    for name in log:  # empty, as a reader leaves it
        (place / name).touch()
    before = {file.name for file in place.iterdir()}
    monkeypatch.setattr("etude.store.journal.sqlite.os.access", lambda *_: False)
    with closing(open_store(place / "journal.sqlite", read_only=True)) as store:
        assert store.rollout(14).last is not None and len(list(store.read())) > 3
        assert {file.name for file in place.iterdir()} == before, "reading created no file"
