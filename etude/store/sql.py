"""The journal in a database: a file of SQLite's (`sqlite`), or a PostgreSQL server's (`postgres`). The only file that
speaks SQLAlchemy, and the one implementation of both: a `Place` says in which few lines they differ.

When `append` returns, what was written survives the death of the process, by `kill -9` too. One process writes at a
time, and the right to write ends with it. Others may read meanwhile.

Every event carries a checksum over its body and payload, which not every database has: a damaged one is refused.
"""

from __future__ import annotations

import os
import socket
import sqlite3
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, Protocol

from sqlalchemy import (
    URL,
    BigInteger,
    ClauseElement,
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
    insert,
    inspect,
    select,
    text,
)
from sqlalchemy.exc import DBAPIError, PendingRollbackError, ResourceClosedError

from etude.errors import StoreError
from etude.store.journal import Journal, Written, written
from etude.store.record import Record
from etude.store.shield import undisturbed

__all__ = ["SqlJournal"]

SCHEMA = "1"
"""The layout of the tables below. A journal of another layout is refused."""
DERIVATION = "3"
"""What `transitions` makes of events. States made by another version are made anew when a writer opens the journal."""
LAST_ID = 2**63 - 1
"""No id is beyond it."""
MANY = 10_000
"""Values in one statement, of which SQLite takes 32,766 and PostgreSQL 65,535."""

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

KEEP_STATE = text(
    "INSERT INTO states (kind, id, phase, body) VALUES (:kind, :id, :phase, :body) "
    "ON CONFLICT (kind, id) DO UPDATE SET phase = excluded.phase, body = excluded.body"
)
KEEP_FACT = text(
    "INSERT INTO facts (name, value) VALUES (:name, :value) ON CONFLICT (name) DO UPDATE SET value = excluded.value"
)

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


class Place(Protocol):
    """What differs between the databases."""

    driver: str
    paramstyle: Literal["named", "pyformat"]
    """How its driver takes values by their names."""
    name: str
    """As it is called in sentences."""
    begin: str
    """Begins a transaction that writes."""
    to_write: Sequence[str]
    """What is said to a connection first, if it will write."""
    to_read: Sequence[str]
    """What is said to it if it may only read."""
    to_flush: tuple[str, str]
    """What is said before and after a commit that makes everything safe."""

    @property
    def url(self) -> dict[str, Any]:
        """What is connected to."""
        ...

    @property
    def options(self) -> dict[str, Any]:
        """How it is connected to."""
        ...

    def hold(self, ask: Callable[[str], Any]) -> Callable[[], None]:
        """Have the right to write, or say who has it; what gives it back."""
        ...

    def under_way(self, raw: Any) -> bool:
        """Whether a transaction that failed is still to be undone."""
        ...

    def failure(self, error: Any) -> str:
        """What went wrong and what to do."""
        ...


class SqlBlobs:
    """Payloads in a table beside the events, written in their transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._keep = _spoken(KEEP_PAYLOAD, connection)

    def put(self, payloads: Mapping[int, bytes]) -> None:
        """Keep these."""
        if payloads:
            rows = [{"position": position, "payload": payload} for position, payload in payloads.items()]
            self._connection.exec_driver_sql(self._keep, rows)

    def get(self, positions: Sequence[int]) -> dict[int, bytes]:
        """The payloads of these positions, those that are there."""
        found = {}
        for some in _parts(positions):
            rows = self._connection.execute(FIND_PAYLOADS, {"positions": some})
            found.update({row.position: row.payload for row in rows})
        return found


class SqlJournal(Journal):
    """A journal in a database. With `read_only` another process may be writing it, and nothing can be appended here."""

    def __init__(self, place: Place, *, read_only: bool = False) -> None:
        super().__init__()
        self._place, self._read_only = place, read_only
        self._newest: int | None = None
        """The newest position, as this process knows it that alone may write."""
        engine = create_engine(
            URL.create(place.driver, **place.url),
            isolation_level="AUTOCOMMIT",
            poolclass=NullPool,
            paramstyle=place.paramstyle,
            connect_args=place.options,
        )
        with ExitStack() as opened, self._speaking("opened"):
            held = opened.enter_context(ExitStack())  # the last to be let go of
            self._connection = opened.enter_context(engine.connect())
            if not read_only:
                held.callback(place.hold(self._connection.exec_driver_sql))
            self.blobs = SqlBlobs(self._connection)
            self._keep_event, self._keep_state = (_spoken(each, self._connection) for each in (KEEP_EVENT, KEEP_STATE))
            self._prepare()
            self._opened = opened.pop_all()

    def flush(self) -> None:
        """Make all that is written survive the loss of power too."""
        with self._lock, self._speaking("flushed"):
            before, after = self._place.to_flush
            self._connection.exec_driver_sql(before)
            try:
                with self._transaction():
                    self._note(flushed=str(self.position))
            finally:
                self._connection.exec_driver_sql(after)

    def close(self) -> None:
        """Let go of the database, and of the right to write it."""
        with self._lock, self._speaking("closed"):
            self._newest = None
            self._opened.close()

    @property
    def position(self) -> int:
        """The position of the newest event; 0 where there is none."""
        with self._lock:
            if self._newest is not None:
                return self._newest
            with self._speaking("read"):
                newest = int(self._connection.execute(FIND_NEWEST).scalar() or 0)
            self._newest = None if self._read_only else newest
            return newest

    # -- opening ------------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """See that the tables of an old journal are what this version reads, and make those of a new one."""
        tables = inspect(self._connection).get_table_names()
        facts = self._facts() if FACTS.name in tables else {}
        if (tables or self._read_only) and facts.get("schema") != SCHEMA:
            found = f"schema {facts['schema']}" if "schema" in facts else f"the tables {', '.join(tables) or '(none)'}"
            raise StoreError(
                f"What is at {self._place.name} is not a journal that this version of Etude reads: it wants schema "
                f"{SCHEMA} and found {found}. Nothing was changed: open it with the version that wrote it, or give "
                "another path."
            )
        for said in self._place.to_read if self._read_only else self._place.to_write:
            self._connection.exec_driver_sql(said)
        if self._read_only:
            return
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
            raise StoreError(
                f"The journal {self._place.name} was opened to be read, and cannot be written through that."
            )
        with undisturbed(), self._speaking("written"):
            self._connection.exec_driver_sql(self._place.begin)
            try:
                yield
                self._connection.exec_driver_sql("COMMIT")
            except BaseException:
                self._newest = None
                if self._place.under_way(self._connection.connection.driver_connection):
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
            self._connection.exec_driver_sql(self._keep_event, rows)
            self._newest = max(records)
        if states:
            self._connection.exec_driver_sql(self._keep_state, [state._asdict() for state in states])

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
                f"The event at position {row.position} of the journal {self._place.name} does not match its checksum: "
                "it was damaged after it was written. Keep the journal, and go on from a copy of it that is whole."
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
            raise StoreError(f"The journal {self._place.name} could not be {done}: it is closed.") from error
        except PendingRollbackError as error:  # it is never made anew, as the right to write went with it
            raise StoreError(
                f"The journal {self._place.name} could not be {done}: its connection was lost. Open the journal again."
            ) from error
        except (DBAPIError, sqlite3.Error) as error:
            cause: Any = error.orig if isinstance(error, DBAPIError) else error
            why = self._place.failure(cause)
            raise StoreError(f"The journal {self._place.name} could not be {done}: {why}.") from error


def _spoken(statement: ClauseElement, connection: Connection) -> str:
    """A statement in the words of a database, for rows by the names of their columns: to have SQLAlchemy look at every
    value of every row costs as much as to write it."""
    return str(statement.compile(dialect=connection.dialect))


def _checksum(body: str, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(body.encode()))


def _parts(values: Sequence[int]) -> Iterator[Sequence[int]]:
    return (values[first : first + MANY] for first in range(0, len(values), MANY))
