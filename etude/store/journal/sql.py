"""The journal in a database: a file of SQLite (`sqlite`) or a PostgreSQL server (`postgres`). It uses SQLAlchemy, as
its tables do (`tables`), and serves both databases. A `Database` holds the few lines in which they differ.

When `append` returns, the events survive the death of the process, by `kill -9` too. One process writes at a time, and
its lock ends with it. Other processes may read meanwhile.

Each event and each state has its own checksum, which not every database provides. A damaged one is refused when it is
read. A sequential read also refuses an event in the place of another. When a writer opens the journal, the database
checks its pages and indexes, and the events are counted. So no result lacks an event either.
"""

from __future__ import annotations

import json
import os
import socket
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import zip_longest
from operator import attrgetter
from typing import Any

from sqlalchemy import URL, ClauseElement, Connection, NullPool, Row, Select, create_engine, delete, inspect, select
from sqlalchemy.exc import DBAPIError, PendingRollbackError, ResourceClosedError

from etude.errors import StoreError
from etude.images import ImageRef
from etude.store.journal import tables
from etude.store.journal.blobs import ReadSlice
from etude.store.journal.database import Database
from etude.store.journal.deferred_signals import defer_signals
from etude.store.journal.event_records import (
    ChainedRecord,
    EventRecord,
    JournalMark,
    chain_checksum,
    digest_of,
    stored_names,
)
from etude.store.journal.grammar_texts import grammar_name
from etude.store.journal.images import StoredImage, image_checksum
from etude.store.journal.journal import DamagedJournalError, Journal
from etude.store.journal.large_sets import set_name
from etude.store.journal.state_rows import StateRow, encode_state, state_digest

_IMAGE_COLUMNS = tuple(column.name for column in tables.IMAGES.c)


class SqlJournal(Journal):
    """A journal in a database. With `read_only`, another process may write it, and this one cannot."""

    def __init__(self, database: Database, *, read_only: bool = False) -> None:
        super().__init__()
        self._database = database
        self._read_only = read_only
        self.name = database.name
        self._end: JournalMark | None = None
        """The newest mark, as known to this process, which alone may write."""
        engine = create_engine(
            URL.create(database.driver, **database.url),
            isolation_level="AUTOCOMMIT",
            poolclass=NullPool,
            paramstyle=database.paramstyle,
            connect_args=database.options,
        )
        with ExitStack() as opened, self._explain_errors("opened"):
            locks = opened.enter_context(ExitStack())  # released last
            self._connection = opened.enter_context(engine.connect())
            if not read_only:
                locks.callback(database.lock(self._connection.exec_driver_sql))
            self._insert_event = _compile_sql(tables.INSERT_EVENT, self._connection)
            self._insert_payload = _compile_sql(tables.INSERT_PAYLOAD, self._connection)
            self._insert_set = _compile_sql(tables.INSERT_SET, self._connection)
            self._insert_image = _compile_sql(tables.INSERT_IMAGE, self._connection)
            self._upsert_state = _compile_sql(tables.UPSERT_STATE, self._connection)
            with self._explain_damage("opened"):
                self._prepare()
            self._opened = opened.pop_all()

    def flush(self) -> JournalMark:
        with self._lock, self._explain_errors("flushed"):
            before, after = self._database.flush_setup
            self._connection.exec_driver_sql(before)
            try:
                with self._storage_transaction():
                    end = self.end_mark
                    self._set_facts(flushed=str(end.position))
            finally:
                self._connection.exec_driver_sql(after)
            return end

    def close(self) -> None:
        with self._lock, self._explain_errors("closed"):
            self._end = None
            self._opened.close()

    @property
    def end_mark(self) -> JournalMark:
        with self._lock:
            if self._end is not None:
                return self._end
            with self._explain_damage():
                newest: Sequence[Any] | None = self._connection.execute(tables.FIND_END).one_or_none()
                end = JournalMark(0, 0) if newest is None else JournalMark(*newest)
            self._end = None if self._read_only else end
            return end

    # -- opening ------------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Check that this version can read the tables of an existing journal, or create those of a new one."""
        present = inspect(self._connection).get_table_names()
        facts = self._facts() if tables.FACTS.name in present else {}
        if (present or self._read_only) and facts.get("schema") != tables.SCHEMA:
            found = f"schema {facts['schema']}" if "schema" in facts else f"the tables {', '.join(present) or '(none)'}"
            raise StoreError(
                f"{self._database.name} is not a journal that this version of Etude reads: it needs schema "
                f"{tables.SCHEMA} and found {found}. Nothing was changed. Open it with the version that wrote it, or "
                "begin a new run or store in another directory."
            )
        for statement in self._database.reader_setup if self._read_only else self._database.writer_setup:
            self._connection.exec_driver_sql(statement)
        if self._read_only:
            return
        if present:
            self._refuse_damage(facts)
        with self._storage_transaction():
            if not present:
                tables.TABLES.create_all(self._connection)
            elif facts.get("derivation") != tables.DERIVATION:
                self._connection.execute(delete(tables.STATES))
                self._write({}, [encode_state(state) for state in self.replay().values()])
            writer = f"process {os.getpid()} on {socket.gethostname()}"
            self._set_facts(schema=tables.SCHEMA, derivation=tables.DERIVATION, writer=writer)

    def _refuse_damage(self, facts: Mapping[str, str]) -> None:
        """Refuse a damaged database, and one that lacks an event."""
        if found := self._database.find_damage(self._connection.exec_driver_sql):
            raise self._damaged(f"its database has faults ({found})")
        if facts.get("end", _format_mark(JournalMark(0, 0))) != _format_mark(self.end_mark):
            raise self._damaged(f"it ends at event {self.position}, which is not the last one written")
        count, first = self._connection.execute(tables.COUNT_EVENTS).one()
        if count != self.position or (count and first != 1):
            for _ in self._pages(0, self.position, None, None):  # its error names the first missing position
                pass
            raise self._damaged(f"it holds {count} events, the last of them at position {self.position}")

    def _damaged(self, fault: str) -> StoreError:
        return DamagedJournalError(
            f"The journal {self.name} is damaged: {fault}. Nothing was changed. Keep it, and continue from an intact "
            "copy with its -wal file."
        )

    def _facts(self) -> dict[str, str]:
        return {fact.name: fact.value for fact in self._connection.execute(select(tables.FACTS))}

    def _set_facts(self, **facts: str) -> None:
        self._connection.execute(tables.UPSERT_FACT, [{"name": name, "value": value} for name, value in facts.items()])

    # -- storing ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _storage_transaction(self) -> Iterator[None]:
        if self._read_only:
            raise StoreError(f"The journal {self._database.name} was opened read-only and cannot be written.")
        with defer_signals(), self._explain_errors("written"):
            self._connection.exec_driver_sql(self._database.begin)
            try:
                yield
                self._connection.exec_driver_sql("COMMIT")
            except BaseException:
                self._end = None
                if self._database.in_transaction(self._connection.connection.driver_connection):
                    self._connection.exec_driver_sql("ROLLBACK")
                raise

    def _write(self, events: Mapping[int, ChainedRecord], states: Sequence[StateRow]) -> None:
        if events:
            rows = [
                {
                    "position": position,
                    "kind": record.kind,
                    "rollout": record.rollout,
                    "body": record.body,
                    "size": len(record.payload),
                    "digest": digest,
                    "chain": chain,
                }
                for position, (record, digest, chain) in events.items()
            ]
            self._connection.exec_driver_sql(self._insert_event, rows)
            payloads = [
                {"position": position, "payload": record.payload}
                for position, (record, _, _) in events.items()
                if record.payload
            ]
            if payloads:
                self._connection.exec_driver_sql(self._insert_payload, payloads)
            sets = {name: data for record, _, _ in events.values() for name, data in record.sets}
            if sets:
                set_rows = [{"digest": name, "data": data} for name, data in sets.items()]
                self._connection.exec_driver_sql(self._insert_set, set_rows)
            newest = max(events)
            self._end = JournalMark(newest, events[newest].chain)
            self._set_facts(end=_format_mark(self._end))
        if states:
            self._connection.exec_driver_sql(self._upsert_state, [state._asdict() for state in states])

    def _write_images(self, images: Sequence[StoredImage]) -> None:
        rows = []
        for image in images:
            head = (image.ref.digest, image.media_type, image.ref.width, image.ref.height)
            rows.append(dict(zip(_IMAGE_COLUMNS, (*head, image_checksum(*head), image.content), strict=True)))
        self._connection.exec_driver_sql(self._insert_image, rows)

    def _images(self, digests: Sequence[str]) -> list[StoredImage]:
        with self._explain_damage():
            rows = self._select(tables.FIND_IMAGES, "digests", digests)
            return [StoredImage(self._image_ref(row), row.media_type, row.content) for row in rows]

    def _image_refs(self, digests: Sequence[str]) -> list[ImageRef]:
        with self._explain_damage():
            return [self._image_ref(row) for row in self._select(tables.FIND_IMAGE_SIZES, "digests", digests)]

    def _image_ref(self, row: Row[Any]) -> ImageRef:
        if image_checksum(row.digest, row.media_type, row.width, row.height) != row.checksum:
            raise self._damaged(f"its image {row.digest} does not match its checksum")
        return ImageRef(row.digest, row.width, row.height)

    def _chain(self, position: int) -> int:
        if position == 0:
            return 0
        with self._explain_damage():
            chain = self._connection.execute(tables.FIND_CHAIN, {"position": position}).scalar()
            if chain is None:
                raise self._damaged(f"its event at position {position} is missing")
            return int(chain)

    def _records(
        self, after: int, until: int, kind: str | None, rollout: int | None, limit: int
    ) -> list[tuple[int, EventRecord]]:
        query = tables.FIND_EVENTS if kind is None else tables.FIND_OF_KIND
        query = query if rollout is None else tables.FIND_OF_ROLLOUT
        parameters = {"after": after, "until": until, "limit": limit, "kind": kind, "rollout": rollout}
        with self._explain_damage():
            page = self._connection.execute(query, parameters).all()
            if query is tables.FIND_EVENTS:
                self._refuse_gaps(page, after, min(until, after + limit))
            positions = [row.position for row in page if row.size]
            rows = self._connection.execute(tables.FIND_PAYLOADS, {"positions": positions}) if positions else ()
            payloads = {row.position: row.payload for row in rows}
            records = [self._verified(row, payloads.get(row.position, b"")) for row in page]
            return [(row.position, record) for row, record in zip(page, self._with_sets(records), strict=True)]

    def _rollout_sizes(self, rollouts: Sequence[int]) -> dict[int, int]:
        with self._explain_damage():
            return {row.rollout: int(row.bytes) for row in self._select(tables.FIND_SIZES, "rollouts", rollouts)}

    def _rollout_records(self, rollouts: Sequence[int]) -> list[EventRecord]:
        with self._explain_damage():
            rows = self._select(tables.FIND_OF_ROLLOUTS, "rollouts", rollouts)
            ordered = sorted(rows, key=attrgetter("position"))
            return self._with_sets([self._verified(row, row.payload or b"") for row in ordered])

    def _refuse_gaps(self, page: Sequence[Row[Any]], after: int, last: int) -> None:
        """Refuse events if one is missing, or is in the place of another."""
        if after == last:
            return
        chain = self._chain(after)
        for position, row in zip_longest(range(after + 1, last + 1), page):
            if row is None or row.position != position:
                raise self._damaged(f"its event at position {position} is missing")
            chain = chain_checksum(chain, row.digest)
            if row.chain != chain:
                raise self._damaged(f"its event at position {position} does not follow the one before")

    def _verified(self, row: Row[Any], payload: bytes) -> EventRecord:
        record = EventRecord(row.kind, row.rollout, row.body, payload)
        if digest_of(row.position, record) != row.digest:
            raise self._damaged(f"its event at position {row.position} does not match its checksum")
        return record

    def _with_sets(self, records: list[EventRecord]) -> list[EventRecord]:
        """Add the sets and the grammars that the events name. A missing or changed one is refused."""
        named = [stored_names(record) for record in records]
        wanted = list({name for names in named for name in names})
        if not wanted:
            return records
        rows = self._select(tables.FIND_SETS, "names", wanted)
        intact = {row.digest: row.data for row in rows if set_name(row.data) == row.digest}
        for record, names in zip(records, named, strict=True):
            for name in names:
                if name not in intact:
                    turn = json.loads(record.body)["turn"]["index"]
                    kind = "grammar" if name == grammar_name(record.body) else "set"
                    raise self._damaged(
                        f"the {kind} {name.hex()} that turn {turn} of rollout {record.rollout} names is not in it, or "
                        "is not what was stored"
                    )
        return [
            record._replace(sets=tuple((name, intact[name]) for name in names))
            for record, names in zip(records, named, strict=True)
        ]

    def _payload_slicer(self, position: int) -> ReadSlice:
        return self._database.payload_slicer(self._connection.connection.driver_connection, position)

    def _event_kinds(self, rollouts: Sequence[int]) -> list[tuple[int, int, str]]:
        with self._explain_damage():
            rows = self._select(tables.FIND_KINDS, "rollouts", rollouts)
            return [(row.rollout, row.position, row.kind) for row in sorted(rows, key=attrgetter("position"))]

    def _image_turns(self, after: int, limit: int) -> list[tuple[int, int, str]]:
        with self._explain_damage():
            rows = self._connection.execute(tables.FIND_IMAGE_TURNS, {"after": after, "limit": limit})
            return [(row.position, row.rollout, row.body) for row in rows]

    def _turn_bodies(self, rollouts: Sequence[int]) -> list[tuple[int, str]]:
        with self._explain_damage():
            rows = self._select(tables.FIND_TURN_BODIES, "rollouts", rollouts)
            return [(row.rollout, row.body) for row in sorted(rows, key=attrgetter("position"))]

    def _states(self, kind: str, ids: Sequence[int]) -> dict[int, str]:
        with self._explain_damage():
            return {row.id: self._body(row) for row in self._select(tables.FIND_STATES, "ids", ids, kind=kind)}

    def _select(
        self, query: Select[Any], name: str, values: Sequence[int | bytes | str], **others: str
    ) -> list[Row[Any]]:
        """Return the rows of a query with these values, which may be too many for one statement."""
        step = tables.MAX_BOUND_VALUES
        chunks = (values[first : first + step] for first in range(0, len(values), step))
        return [row for chunk in chunks for row in self._connection.execute(query, {name: chunk, **others})]

    def _states_in_phases(self, kind: str, phases: Sequence[str]) -> list[str]:
        with self._explain_damage():
            rows = self._connection.execute(tables.FIND_PHASES, {"kind": kind, "phases": phases}).all()
            return [self._body(row) for row in sorted(rows, key=lambda row: row.id)]

    def _state_page(self, kind: str, after: int | None, limit: int, backwards: bool, use: str | None) -> list[str]:
        end = tables.LAST_ID if backwards else -tables.LAST_ID
        parameters = {"kind": kind, "after": end if after is None else after, "limit": limit, "use": use}
        with self._explain_damage():
            if use is None:
                query = tables.FIND_LISTED_BACKWARDS if backwards else tables.FIND_LISTED
            else:
                query = tables.FIND_USED_BACKWARDS if backwards else tables.FIND_USED
            rows = self._connection.execute(query, parameters)
            return [self._body(row) for row in rows]

    def _body(self, row: Row[Any]) -> str:
        if state_digest(row.kind, row.id, row.phase, row.use, row.body) != row.digest:
            raise self._damaged(f"its state of {row.kind} {row.id} does not match its checksum")
        return str(row.body)

    @contextmanager
    def _explain_damage(self, action: str = "read") -> Iterator[None]:
        """Turn an error of reading into a sentence; this includes a value of another type than was written."""
        try:
            with self._explain_errors(action):
                yield
        except (TypeError, ValueError, AttributeError) as error:
            raise self._damaged(f"a value in it was changed after it was written ({error})") from error

    @contextmanager
    def _explain_errors(self, action: str) -> Iterator[None]:
        """Turn a database error into a sentence with its cause."""
        try:
            yield
        except ResourceClosedError as error:
            raise StoreError(f"The journal {self._database.name} could not be {action}: it is closed.") from error
        except PendingRollbackError as error:  # never reconnected, since the lock ended with the connection
            raise StoreError(
                f"The journal {self._database.name} could not be {action}: its connection was lost. Open the journal "
                "again."
            ) from error
        except (DBAPIError, sqlite3.Error) as error:
            cause: Any = error.orig if isinstance(error, DBAPIError) else error
            why = self._database.describe_failure(cause)
            damaged = getattr(cause, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_CORRUPT
            kind = DamagedJournalError if damaged else StoreError
            raise kind(f"The journal {self._database.name} could not be {action}: {why}.") from error


def _compile_sql(statement: ClauseElement, connection: Connection) -> str:
    """Compile a statement to the SQL of a database, for rows by column name. SQLAlchemy's own handling of each value of
    each row would cost as much as the write."""
    return str(statement.compile(dialect=connection.dialect))


def _format_mark(end: JournalMark) -> str:
    return f"{end.position} {end.chain}"
