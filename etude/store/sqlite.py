"""Where a journal is a file: SQLite, in the run directory.

Durability: write-ahead log with `synchronous=NORMAL`. When `append` returns, a commit has handed its pages to the
operating system, so that what is acknowledged survives the death of the process, by `kill -9` too, and no disk is
waited for. A loss of power may take the last moments, in whole batches, and never corrupts; `flush` closes that gap.

One process writes at a time: it holds an exclusive lock on a file beside the journal, which the operating system frees
however the process ends. Others may read meanwhile.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

from etude.errors import StoreError

__all__ = ["SqliteDatabase"]

WAIT_S = 30.0
"""How long a statement waits for another process that holds the database."""

FAILURES: dict[int, str] = {
    sqlite3.SQLITE_BUSY: f"another process has held it for {WAIT_S:g} seconds: end that process and go on",
    sqlite3.SQLITE_FULL: "the disk is full: free some space and go on; what was written before is safe",
    sqlite3.SQLITE_IOERR: "the operating system failed to read or write it: look at the disk, its space and its quota; "
    "what was written before is safe",
    sqlite3.SQLITE_CORRUPT: "its contents are damaged, and nothing was changed: keep the file, and go on from a copy "
    "of it that is whole",
    sqlite3.SQLITE_NOTADB: "it is not a database, or was overwritten, and nothing was changed: bring it back from a "
    "copy that is whole, or give another path",
    sqlite3.SQLITE_READONLY: "it may not be written here: look at the permissions of the file and its directory",
    sqlite3.SQLITE_CANTOPEN: "its directory is missing or closed to us: look at the path and the permissions",
}
"""What SQLite's errors mean and what to do, by their primary code."""


class SqliteDatabase:
    """A journal in a file."""

    driver = "sqlite"
    paramstyle: Literal["named", "pyformat"] = "named"
    begin = "BEGIN IMMEDIATE"
    writer_setup: Sequence[str] = ("PRAGMA journal_mode=WAL", "PRAGMA synchronous=NORMAL")
    reader_setup: Sequence[str] = ("PRAGMA query_only=ON",)
    flush_setup = (
        "PRAGMA synchronous=FULL",
        "PRAGMA synchronous=NORMAL",
    )  # a commit between them syncs every one before

    def __init__(self, path: Path, *, read_only: bool) -> None:
        self._path = path
        self.name = str(path)
        if path.is_dir() or (read_only and not path.exists()):
            found = "a directory" if path.is_dir() else "nothing"
            raise StoreError(f"A journal was to be opened at {path}, and {found} is there. Give the path of its file.")

    @property
    def url(self) -> dict[str, Any]:
        """What is connected to."""
        return {"database": str(self._path)}

    @property
    def options(self) -> dict[str, Any]:
        """How it is connected to."""
        return {"check_same_thread": False, "timeout": WAIT_S}

    def lock(self, execute: Callable[[str], Any]) -> Callable[[], None]:  # noqa: ARG002
        """Have the right to write this journal, a lock of the operating system, which no process keeps beyond its end;
        what gives it back."""
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
        """What SQLite finds wrong with its pages and indexes. Payloads, most of the file, are left to their checksums,
        unless there are free pages, which might be in use as well: a few seconds per million events."""
        tables = [""] if execute("PRAGMA freelist_count").scalar() else ["('facts')", "('events')", "('states')"]
        for table in tables:
            if (found := str(execute(f"PRAGMA integrity_check{table}").scalar())) != "ok":
                return " ".join(found.split())
        return ""

    def in_transaction(self, raw: Any) -> bool:
        """Whether a transaction is still to be undone: after some failures SQLite has undone it itself."""
        return bool(raw.in_transaction)

    def describe_failure(self, error: Any) -> str:
        """What went wrong and what to do."""
        code = getattr(error, "sqlite_errorcode", None)
        if code in (None, sqlite3.SQLITE_ERROR):  # a text that is none, a table or a column that is not there
            return f"{error}: {FAILURES[sqlite3.SQLITE_CORRUPT]}"
        return FAILURES.get(code & 0xFF, str(error))


def _last_writer(path: Path) -> str:
    """Who opened a journal for writing last, as far as it can be told."""
    try:
        with closing(sqlite3.connect(path)) as journal:
            return str(journal.execute("SELECT value FROM facts WHERE name = 'writer'").fetchone()[0])
    except (sqlite3.Error, TypeError):  # it is being made at this moment
        return "another process"
