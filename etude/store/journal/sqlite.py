"""A journal in a SQLite file, in the run directory.

Durability: write-ahead log with `synchronous=NORMAL`. When `append` returns, the commit has handed its pages to the
operating system without waiting for the disk. It then survives the death of the process, by `kill -9` too. A loss of
power may lose the last batches, whole ones only, and never corrupts the file; `flush` closes that gap.

One process writes at a time. It holds an exclusive lock on a file beside the journal, which the operating system
releases when the process ends, also by a crash. Other processes may read meanwhile.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from etude.errors import StoreError
from etude.store.journal.blobs import ReadSlice
from etude.store.journal.database import Database

WAIT_S = 30.0
"""Seconds that a statement waits for another process that holds the database."""

FAILURES: dict[int, str] = {
    sqlite3.SQLITE_BUSY: f"another process has held it for {WAIT_S:g} seconds: end that process and try again",
    sqlite3.SQLITE_FULL: "the disk is full: free some space and try again; everything written before is safe",
    sqlite3.SQLITE_IOERR: "the operating system failed to read or write it: check the disk, its space and its quota; "
    "everything written before is safe",
    sqlite3.SQLITE_CORRUPT: "its contents are damaged, and nothing was changed: keep the file, and continue from an "
    "intact copy",
    sqlite3.SQLITE_NOTADB: "it is not a database, or was overwritten, and nothing was changed: restore an intact copy, "
    "or give another path",
    sqlite3.SQLITE_READONLY: "it is read-only: check the permissions of the file and its directory",
    sqlite3.SQLITE_CANTOPEN: "its directory is missing or not accessible: check the path and the permissions",
}
"""Meaning and remedy of SQLite's errors, by primary error code."""


class SqliteDatabase(Database):
    """A journal in a file."""

    driver = "sqlite"
    paramstyle = "named"
    begin = "BEGIN IMMEDIATE"
    writer_setup: Sequence[str] = ("PRAGMA journal_mode=WAL", "PRAGMA synchronous=NORMAL")
    reader_setup: Sequence[str] = ("PRAGMA query_only=ON",)
    # a commit between the two syncs all commits before it
    flush_setup = ("PRAGMA synchronous=FULL", "PRAGMA synchronous=NORMAL")

    def __init__(self, path: Path, *, read_only: bool) -> None:
        self._path = path
        self._read_only = read_only
        self.name = str(path)
        if path.is_dir() or (read_only and not path.exists()):
            found = "a directory" if path.is_dir() else "nothing"
            raise StoreError(f"A journal cannot be opened at {path}: {found} is there. Give the path of its file.")

    @property
    def url(self) -> dict[str, Any]:
        """The parts of the connection URL.

        A reader opens the file as read-only, so that it copies no events from the log into the file when it closes.
        SQLite creates files beside a journal even to read it. Where it cannot, the journal is opened as immutable. Then
        the events of a log would be missing. So there must be no log, or an empty one that no process has open.
        """
        if not self._read_only:
            return {"database": str(self._path)}
        log, shared = (self._path.with_name(f"{self._path.name}-{end}") for end in ("wal", "shm"))
        query = {"uri": "true", "mode": "ro"}
        if not os.access(self._path.parent, os.W_OK):
            try:
                has_log = log.stat().st_size > 0 or shared.exists()
            except FileNotFoundError:
                has_log = False
            if not has_log:
                query["immutable"] = "1"
        return {"database": self._path.resolve().as_uri(), "query": query}

    @property
    def options(self) -> dict[str, Any]:
        return {"check_same_thread": False, "timeout": WAIT_S}

    def lock(self, execute: Callable[[str], Any]) -> Callable[[], None]:  # noqa: ARG002
        """Take the lock for writing, a lock of the operating system that ends with the process; return the function
        that releases it."""
        path = self._path
        lock_path = path.with_name(f"{path.name}-lock")
        lock = sqlite3.connect(lock_path, timeout=0, isolation_level=None, check_same_thread=False)
        try:
            lock.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError as error:
            lock.close()
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
                raise
            raise StoreError(
                f"The journal {path} is being written by {_last_writer(path)}, and one process writes a journal at "
                "a time. End that run or wait for it, or choose another run directory."
            ) from error
        return lock.close

    def find_damage(self, execute: Callable[[str], Any]) -> str:
        """Return the faults that SQLite finds in its pages and indexes. It takes a few seconds per million events.

        Payloads, most of the file, are covered by their own checksums. They are checked here only if there are free
        pages, which might wrongly be in use as well.
        """
        tables = [""] if execute("PRAGMA freelist_count").scalar() else ["('facts')", "('events')", "('states')"]
        for table in tables:
            if (found := str(execute(f"PRAGMA integrity_check{table}").scalar())) != "ok":
                return " ".join(found.split())
        return ""

    def in_transaction(self, raw: Any) -> bool:
        """Return whether a transaction must still be rolled back. After some failures SQLite has done so itself."""
        return bool(raw.in_transaction)

    def payload_slicer(self, raw: Any, position: int) -> ReadSlice:
        try:
            payload = raw.blobopen("blobs", "payload", position, readonly=True)
        except sqlite3.OperationalError as error:
            if getattr(error, "sqlite_errorcode", None) != sqlite3.SQLITE_ERROR:
                raise
            return lambda offset, size: b""  # noqa: ARG005  # there is no such payload

        def read(offset: int, size: int) -> bytes:
            payload.seek(min(offset, len(payload)))
            return bytes(payload.read(size))

        return read

    def describe_failure(self, error: Any) -> str:
        code = getattr(error, "sqlite_errorcode", None)
        if code in (None, sqlite3.SQLITE_ERROR):  # invalid text, or a missing table or column
            return f"{error}: {FAILURES[sqlite3.SQLITE_CORRUPT]}"
        return FAILURES.get(code & 0xFF, str(error))


def _last_writer(path: Path) -> str:
    """Return the process that opened the journal for writing last, if it is known."""
    try:
        with closing(sqlite3.connect(path)) as journal:
            return str(journal.execute("SELECT value FROM facts WHERE name = 'writer'").fetchone()[0])
    except (sqlite3.Error, TypeError):  # the journal is being created right now
        return "another process"
