"""The journal in a database: SQLite, a file in the run directory. The only file that speaks SQL.

Durability: write-ahead log with `synchronous=NORMAL`. When `append` returns, a commit has handed its pages to the
operating system, so that what is acknowledged survives the death of the process, by `kill -9` too, and no disk is
waited for. A loss of power may take the last moments, in whole batches, and never corrupts; `flush` closes that gap.

One process writes at a time: it holds an exclusive lock on a file beside the journal, which the operating system frees
however the process ends. Others may read meanwhile.

Every event carries a checksum over its body and payload, which SQLite does not have: a damaged one is refused.
"""

from __future__ import annotations

import os
import socket
import sqlite3
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import (
    URL,
    BigInteger,
    Column,
    Connection,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    NullPool,
    Row,
    String,
    Table,
    Text,
    bindparam,
    create_engine,
    delete,
    func,
    inspect,
    select,
)
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.exc import DBAPIError, ResourceClosedError

from etude.errors import StoreError
from etude.store.events import Record
from etude.store.journal import Journal, Written, written
from etude.store.shield import undisturbed

__all__ = ["SqlJournal"]

SCHEMA = "1"
"""The layout of the tables below. A journal of another layout is refused."""
DERIVATION = "2"
"""What `transitions` makes of events. States made by another version are made anew when a writer opens the journal."""
WAIT_S = 30.0
"""How long a statement waits for another process that holds the database."""
LAST_ID = 2**63 - 1
"""No id is beyond it."""
MANY = 10_000
"""Values in one statement, of which SQLite takes 32,766."""

_NUMBER = BigInteger().with_variant(Integer, "sqlite")  # SQLite numbers its rows by a column of exactly this type

TABLES = MetaData()
FACTS = Table("facts", TABLES, Column("name", String, primary_key=True), Column("value", String, nullable=False))
"""schema and derivation; writer: who opened it last; flushed: the last position that `flush` made safe."""
EVENTS = Table(
    "events",
    TABLES,
    Column("position", _NUMBER, primary_key=True, autoincrement=False),
    Column("kind", String, nullable=False),
    Column("rollout", BigInteger),
    Column("body", Text, nullable=False),
    Column("size", BigInteger, nullable=False),  # bytes of its payload
    Column("crc", BigInteger, nullable=False),  # of body and payload
    Index("events_of_kind", "kind", "position"),
    Index("events_of_rollout", "rollout", "position"),
)
BLOBS = Table(
    "blobs",
    TABLES,
    Column("position", _NUMBER, primary_key=True, autoincrement=False),
    Column("payload", LargeBinary, nullable=False),
)
STATES = Table(
    "states",
    TABLES,
    Column("kind", String, primary_key=True),
    Column("id", BigInteger, primary_key=True),
    Column("phase", String, nullable=False),
    Column("body", Text, nullable=False),
    Index("states_in_phase", "kind", "phase", "id"),
)

_STATE, _FACT = insert(STATES), insert(FACTS)
KEEP_STATE = _STATE.on_conflict_do_update(
    index_elements=["kind", "id"], set_={"phase": _STATE.excluded.phase, "body": _STATE.excluded.body}
)
KEEP_FACT = _FACT.on_conflict_do_update(index_elements=["name"], set_={"value": _FACT.excluded.value})

# Statements are built once: to build one costs more than to run it.
FIND_EVENTS = (
    select(EVENTS)
    .where(EVENTS.c.position > bindparam("after"), EVENTS.c.position <= bindparam("until"))
    .order_by(EVENTS.c.position)
    .limit(bindparam("limit"))
)
FIND_OF_KIND = FIND_EVENTS.where(EVENTS.c.kind == bindparam("kind"))
FIND_OF_ROLLOUT = FIND_EVENTS.where(EVENTS.c.rollout == bindparam("rollout"))
FIND_PAYLOADS = select(BLOBS).where(BLOBS.c.position.in_(bindparam("positions", expanding=True)))
FIND_STATES = select(STATES.c.id, STATES.c.body).where(
    STATES.c.kind == bindparam("kind"), STATES.c.id.in_(bindparam("ids", expanding=True))
)
FIND_PHASES = select(STATES.c.id, STATES.c.body).where(  # not ordered, for which SQLite would go through all
    STATES.c.kind == bindparam("kind"), STATES.c.phase.in_(bindparam("phases", expanding=True))
)
FIND_LISTED = (
    select(STATES.c.body)
    .where(STATES.c.kind == bindparam("kind"), STATES.c.id > bindparam("after"))
    .order_by(STATES.c.id)
    .limit(bindparam("limit"))
)
FIND_LISTED_BACKWARDS = (
    select(STATES.c.body)
    .where(STATES.c.kind == bindparam("kind"), STATES.c.id < bindparam("after"))
    .order_by(STATES.c.id.desc())
    .limit(bindparam("limit"))
)
FIND_NEWEST = select(func.max(EVENTS.c.position))
KEEP_EVENT, KEEP_PAYLOAD = insert(EVENTS), insert(BLOBS)

FAILURES: dict[int, str] = {
    sqlite3.SQLITE_BUSY: f"another process has held it for {WAIT_S:g} seconds: end that process and go on",
    sqlite3.SQLITE_FULL: "the disk is full: free some space and go on; what was written before is safe",
    sqlite3.SQLITE_IOERR: "the operating system failed to read or write it: look at the disk, its space and its quota; "
    "what was written before is safe",
    sqlite3.SQLITE_CORRUPT: "its contents are damaged, and nothing was changed: keep the file, and go on from a copy "
    "made by the `.recover` command of sqlite3",
    sqlite3.SQLITE_NOTADB: "it is not a database, and nothing was changed: give the path of a journal or a new file",
    sqlite3.SQLITE_READONLY: "it may not be written here: look at the permissions of the file and its directory",
    sqlite3.SQLITE_CANTOPEN: "its directory is missing or closed to us: look at the path and the permissions",
}
"""What SQLite's errors mean and what to do, by their primary code."""


class SqlBlobs:
    """Payloads in a table beside the events, written in their transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def put(self, payloads: Mapping[int, bytes]) -> None:
        """Keep these."""
        if payloads:
            rows = [{"position": position, "payload": payload} for position, payload in payloads.items()]
            self._connection.execute(KEEP_PAYLOAD, rows)

    def get(self, positions: Sequence[int]) -> dict[int, bytes]:
        """The payloads of these positions, those that are there."""
        found = {}
        for some in _parts(positions):
            rows = self._connection.execute(FIND_PAYLOADS, {"positions": some})
            found.update({row.position: row.payload for row in rows})
        return found


class SqlJournal(Journal):
    """A journal in a file. With `read_only` another process may be writing it, and nothing can be appended here."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        super().__init__()
        self._path, self._read_only = path, read_only
        if path.is_dir() or (read_only and not path.exists()):
            found = "a directory" if path.is_dir() else "nothing"
            raise StoreError(f"A journal was to be opened at {path}, and {found} is there. Give the path of its file.")
        options = {"check_same_thread": False, "timeout": WAIT_S}
        url = URL.create("sqlite", database=str(path))
        engine = create_engine(url, isolation_level="AUTOCOMMIT", poolclass=NullPool, connect_args=options)
        with ExitStack() as opened, self._speaking("opened"):
            if not read_only:
                opened.enter_context(closing(_held(path)))
            self._connection = opened.enter_context(engine.connect())
            self.blobs = SqlBlobs(self._connection)
            self._prepare()
            self._opened = opened.pop_all()

    def flush(self) -> None:
        """Make all that is written survive the loss of power too."""
        with self._lock, self._speaking("flushed"):
            ask = self._connection.exec_driver_sql
            ask("PRAGMA synchronous=FULL")  # the next commit syncs the log, and with it every commit before
            try:
                with self._transaction():
                    self._note(flushed=str(self.position))
            finally:
                ask("PRAGMA synchronous=NORMAL")

    def close(self) -> None:
        """Let go of the file, and of the right to write it."""
        with self._lock, self._speaking("closed"):
            self._opened.close()

    @property
    def position(self) -> int:
        """The position of the newest event; 0 where there is none."""
        with self._lock, self._speaking("read"):
            return int(self._connection.execute(FIND_NEWEST).scalar() or 0)

    # -- opening ------------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """See that the tables of an old journal are what this version reads, and make those of a new one."""
        tables = inspect(self._connection).get_table_names()
        facts = self._facts() if FACTS.name in tables else {}
        if (tables or self._read_only) and facts.get("schema") != SCHEMA:
            found = f"schema {facts['schema']}" if "schema" in facts else f"the tables {', '.join(tables) or '(none)'}"
            raise StoreError(
                f"The file {self._path} is not a journal that this version of Etude reads: it wants schema {SCHEMA} "
                f"and found {found}. Nothing was changed: open it with the version that wrote it, or give another path."
            )
        if self._read_only:
            self._connection.exec_driver_sql("PRAGMA query_only=ON")
            return
        self._connection.exec_driver_sql("PRAGMA journal_mode=WAL")
        self._connection.exec_driver_sql("PRAGMA synchronous=NORMAL")
        with self._transaction():
            if not tables:
                TABLES.create_all(self._connection)
            elif facts["derivation"] != DERIVATION:
                self._connection.execute(delete(STATES))
                self._write({}, [written(state) for state in self.replay().values()])
            me = f"process {os.getpid()} on {socket.gethostname()}"
            self._note(schema=SCHEMA, derivation=DERIVATION, writer=me)

    def _facts(self) -> dict[str, str]:
        return {fact.name: fact.value for fact in self._connection.execute(select(FACTS))}

    def _note(self, **facts: str) -> None:
        self._connection.execute(KEEP_FACT, [{"name": name, "value": value} for name, value in facts.items()])

    # -- keeping ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """What is written inside is written together, or not at all where an exception leaves it."""
        if self._read_only:
            raise StoreError(f"The journal {self._path} was opened to be read, and cannot be written through that.")
        with undisturbed(), self._speaking("written"):
            self._connection.exec_driver_sql("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.exec_driver_sql("COMMIT")
            except BaseException:
                raw: Any = self._connection.connection.driver_connection
                if raw.in_transaction:  # where it is not, SQLite has undone it itself
                    self._connection.exec_driver_sql("ROLLBACK")
                raise

    def _write(self, records: Mapping[int, Record], states: Sequence[Written]) -> None:
        if records:
            rows = [
                {
                    "position": position,
                    "kind": record.kind,
                    "rollout": record.rollout,
                    "body": record.body,
                    "size": len(record.payload),
                    "crc": _checksum(record.body, record.payload),
                }
                for position, record in records.items()
            ]
            self._connection.execute(KEEP_EVENT, rows)
        if states:
            self._connection.execute(KEEP_STATE, [state._asdict() for state in states])

    def _records(
        self, after: int, until: int, kind: str | None, rollout: int | None, limit: int
    ) -> list[tuple[int, Record]]:
        asked = FIND_OF_ROLLOUT if rollout is not None else FIND_OF_KIND if kind is not None else FIND_EVENTS
        given = {"after": after, "until": until, "limit": limit, "kind": kind, "rollout": rollout}
        with self._speaking("read"):
            page = self._connection.execute(asked, given).all()
            payloads = self.blobs.get([row.position for row in page if row.size])
        return [(row.position, self._checked(row, payloads.get(row.position, b""))) for row in page]

    def _checked(self, row: Row[Any], payload: bytes) -> Record:
        if _checksum(row.body, payload) != row.crc:
            raise StoreError(
                f"The event at position {row.position} of the journal {self._path} does not match its checksum: the "
                "file was damaged after it was written. Keep the file, and go on from a copy of it that is whole."
            )
        return Record(row.kind, row.rollout, row.body, payload)

    def _states(self, kind: str, ids: Sequence[int]) -> dict[int, str]:
        found = {}
        with self._speaking("read"):
            for some in _parts(ids):
                rows = self._connection.execute(FIND_STATES, {"kind": kind, "ids": some})
                found.update({row.id: row.body for row in rows})
        return found

    def _found(self, kind: str, phases: Sequence[str]) -> list[str]:
        with self._speaking("read"):
            rows = self._connection.execute(FIND_PHASES, {"kind": kind, "phases": phases}).all()
        return [row.body for row in sorted(rows, key=lambda row: row.id)]

    def _listed(self, kind: str, after: int | None, limit: int, backwards: bool) -> list[str]:
        end = LAST_ID if backwards else -LAST_ID
        given = {"kind": kind, "after": end if after is None else after, "limit": limit}
        with self._speaking("read"):
            return list(self._connection.execute(FIND_LISTED_BACKWARDS if backwards else FIND_LISTED, given).scalars())

    @contextmanager
    def _speaking(self, done: str) -> Iterator[None]:
        """Say in a sentence why the database could not do what it was asked."""
        try:
            yield
        except ResourceClosedError as error:
            raise StoreError(f"The journal {self._path} could not be {done}: it is closed.") from error
        except (DBAPIError, sqlite3.Error) as error:
            cause: Any = error.orig if isinstance(error, DBAPIError) else error
            code = getattr(cause, "sqlite_errorcode", 0) & 0xFF
            raise StoreError(f"The journal {self._path} could not be {done}: {FAILURES.get(code, cause)}.") from error


def _held(path: Path) -> sqlite3.Connection:
    """The right to write this journal: a lock of the operating system, which no process keeps beyond its end."""
    lock = sqlite3.connect(
        path.with_name(f"{path.name}-lock"), timeout=0, isolation_level=None, check_same_thread=False
    )
    try:
        lock.execute("BEGIN EXCLUSIVE")
    except sqlite3.OperationalError as error:
        lock.close()
        if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
            raise
        raise StoreError(
            f"The journal {path} is being written by {_writer(path)}, and one process writes a journal at a time. End "
            "that run or wait for it, or choose another run directory."
        ) from error
    return lock


def _writer(path: Path) -> str:
    """Who opened a journal for writing last, as far as it can be told."""
    try:
        with closing(sqlite3.connect(path)) as journal:
            return str(journal.execute("SELECT value FROM facts WHERE name = 'writer'").fetchone()[0])
    except (sqlite3.Error, TypeError):  # it is being made at this moment
        return "another process"


def _checksum(body: str, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(body.encode()))


def _parts(values: Sequence[int]) -> Iterator[Sequence[int]]:
    return (values[first : first + MANY] for first in range(0, len(values), MANY))
