"""A journal in a database of a PostgreSQL server, for runs on several machines.

    postgresql://etude:password@db.example:5432/my_run

One journal fills one database, or one schema of it (`?options=-csearch_path=my_run`). A commit is acknowledged when the
server has it on its disk.

One process writes at a time. It holds an advisory lock of its session, which the server releases when the connection
ends for any reason. A lost connection is not reopened silently, since the lock ended with it. The journal reports the
loss and must be opened again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from etude.errors import MissingPackageError, StoreError
from etude.store.journal.blobs import ReadSlice
from etude.store.journal.database import Database

try:
    import psycopg
except ImportError as error:
    raise MissingPackageError(
        f"A journal in PostgreSQL needs the package psycopg, which cannot be imported here ({error}). Install it with: "
        "pip install 'psycopg[binary]'"
    ) from error

WAIT_S = 30.0
"""Timeout of a statement and of a connection, in seconds."""
LOCK = "SELECT pg_try_advisory_lock(hashtext('etude journal'), hashtext(current_schema()))"

FAILURES: dict[str, str] = {
    "08": "its connection was lost: check that the server runs and can be reached, and open the journal again",
    "28": "the server refused the login: check the user and the password of its address",
    "3D": "there is no such database: create it with createdb, or give the address of another",
    "42501": "this user may not write it: grant the missing privileges, or give another user",
    "53": "the server lacks disk, memory or connections: free some and try again; everything written before is safe",
    "57014": f"a statement took longer than {WAIT_S:g} seconds: check what else keeps the server busy",
    "57": "the server was stopped: start it and open the journal again; everything written before is safe",
    "25006": "it is read-only: the server, or this user, may only read",
}
"""Meaning and remedy of PostgreSQL's errors, by error code or class."""


class PostgresDatabase(Database):
    """A journal in a PostgreSQL server."""

    driver = "postgresql+psycopg"
    paramstyle = "pyformat"
    begin = "BEGIN"
    writer_setup: Sequence[str] = (f"SET statement_timeout = '{WAIT_S:g}s'", "SET synchronous_commit = on")
    reader_setup: Sequence[str] = (f"SET statement_timeout = '{WAIT_S:g}s'", "SET default_transaction_read_only = on")
    flush_setup = ("SET synchronous_commit = on", "SET synchronous_commit = on")  # as every commit was

    def __init__(self, address: str, answer_s: float | None = None) -> None:
        """answer_s: the timeout of the connection; None for `WAIT_S`."""
        self._answer_s = WAIT_S if answer_s is None else answer_s
        parts = urlsplit(address)
        if parts.scheme not in ("postgresql", "postgres"):
            raise StoreError(
                f"A journal cannot be opened at {parts.scheme}://…. Give the path of a file, or the address of a "
                "PostgreSQL database as postgresql://user:password@host:port/database."
            )
        self._parts = parts
        self._database = unquote(parts.path.removeprefix("/"))
        self.name = f"{self._database} on {parts.hostname or dict(parse_qsl(parts.query)).get('host', 'this machine')}"

    @property
    def url(self) -> dict[str, Any]:
        parts = self._parts
        named = {"username": parts.username, "password": parts.password}
        credentials = {name: unquote(value) for name, value in named.items() if value is not None}
        query = dict(parse_qsl(parts.query))
        return {**credentials, "host": parts.hostname, "port": parts.port, "database": self._database, "query": query}

    @property
    def options(self) -> dict[str, Any]:
        """The options of the connection; every wait has a timeout."""
        seconds = self._answer_s
        return {
            "connect_timeout": int(seconds),
            "tcp_user_timeout": int(1000 * seconds),
            "keepalives_idle": int(seconds),
        }

    def lock(self, execute: Callable[[str], Any]) -> Callable[[], None]:
        """Take the lock for writing, which lasts as long as this connection."""
        if execute("SELECT current_schema()").scalar() is None:
            raise StoreError(
                f"The journal {self.name} has no schema: its search_path names none that exists. Create one, or leave "
                "search_path out of the address."
            )
        if not execute(LOCK).scalar():
            raise StoreError(
                f"The journal {self.name} is being written by {_last_writer(execute)}, and one process writes a "
                "journal at a time. End that run or wait for it, or choose another database."
            )
        return lambda: None

    def find_damage(self, execute: Callable[[str], Any]) -> str:  # noqa: ARG002
        """Return nothing: the server checks its own pages."""
        return ""

    def in_transaction(self, raw: Any) -> bool:
        """Return whether a transaction must still be rolled back. A lost connection has ended its own."""
        return not raw.closed and raw.info.transaction_status != psycopg.pq.TransactionStatus.IDLE

    def payload_slicer(self, raw: Any, position: int) -> ReadSlice:
        find = "SELECT substring(payload FROM %s FOR %s) FROM blobs WHERE position = %s"

        def read(offset: int, size: int) -> bytes:
            found = raw.execute(find, (offset + 1, size, position)).fetchone()
            return bytes(found[0]) if found is not None else b""

        return read

    def describe_failure(self, error: Any) -> str:
        message = str(error).strip().partition("\n")[0].rstrip(".")
        code = getattr(error, "sqlstate", None)
        if code is None and isinstance(error, psycopg.OperationalError):  # an error of libpq
            return f"{message}. Check that the server runs and can be reached, and open the journal again"
        return FAILURES.get(code or "") or FAILURES.get((code or "")[:2]) or message


def _last_writer(execute: Callable[[str], Any]) -> str:
    """Return the process that opened the journal for writing last, if it is known."""
    if execute("SELECT to_regclass('facts')").scalar() is None:  # the journal is being created right now
        return "another process"
    return str(execute("SELECT value FROM facts WHERE name = 'writer'").scalar() or "another process")
