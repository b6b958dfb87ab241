"""Where a journal is a database of a PostgreSQL server: for runs on several machines.

    postgresql://etude:password@db.example:5432/my_run

One journal fills one database, or one schema of it (`?options=-csearch_path=my_run`). A commit is acknowledged when the
server has it on its disk. One process writes at a time: it holds an advisory lock of its session, which the server
frees when the connection ends, however that came to be. A connection that was lost is not made again behind anybody's
back, as the right to write went with it: the journal says so, and is opened anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal
from urllib.parse import parse_qsl, unquote, urlsplit

from etude.errors import MissingPackageError, StoreError

try:
    import psycopg
except ImportError as error:
    raise MissingPackageError(
        f"A journal in PostgreSQL needs the package psycopg, which cannot be imported here ({error}). Install it with: "
        "pip install 'psycopg[binary]'"
    ) from error

__all__ = ["PostgresDatabase"]

WAIT_S = 30.0
"""How long a statement may take, or the way to the server."""
LOCK = "SELECT pg_try_advisory_lock(hashtext('etude journal'), hashtext(current_schema()))"

FAILURES: dict[str, str] = {
    "08": "its connection was lost: see that the server runs and can be reached, and open the journal again",
    "28": "the server refused who asked: look at the user and the password of its address",
    "3D": "there is no such database: make it with createdb, or give the address of another",
    "42501": "it may not be written by this user: grant what is missing, or give another user",
    "53": "the server is out of disk, memory or connections: free some and go on; what was written before is safe",
    "57014": f"a statement took longer than {WAIT_S:g} seconds: look at what else keeps the server busy",
    "57": "the server was stopped: start it and open the journal again; what was written before is safe",
    "25006": "it may not be written here: the server, or this user, is allowed to read only",
}
"""What PostgreSQL's errors mean and what to do, by their code or its class."""


class PostgresDatabase:
    """A journal in a PostgreSQL server."""

    driver = "postgresql+psycopg"
    paramstyle: Literal["named", "pyformat"] = "pyformat"
    begin = "BEGIN"
    writer_setup: Sequence[str] = (f"SET statement_timeout = '{WAIT_S:g}s'", "SET synchronous_commit = on")
    reader_setup: Sequence[str] = (f"SET statement_timeout = '{WAIT_S:g}s'", "SET default_transaction_read_only = on")
    flush_setup = ("SET synchronous_commit = on", "SET synchronous_commit = on")  # as every commit was

    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        if parts.scheme not in ("postgresql", "postgres"):
            raise StoreError(
                f"A journal cannot be opened at {parts.scheme}://…: give the path of a file, or the address of a "
                "PostgreSQL database as postgresql://user:password@host:port/database."
            )
        self._parts = parts
        self._database = unquote(parts.path.removeprefix("/"))
        self.name = f"{self._database} on {parts.hostname or dict(parse_qsl(parts.query)).get('host', 'this machine')}"

    @property
    def url(self) -> dict[str, Any]:
        """What is connected to."""
        parts = self._parts
        named = {"username": parts.username, "password": parts.password}
        credentials = {name: unquote(value) for name, value in named.items() if value is not None}
        query = dict(parse_qsl(parts.query))
        return {**credentials, "host": parts.hostname, "port": parts.port, "database": self._database, "query": query}

    @property
    def options(self) -> dict[str, Any]:
        """How it is connected to: no way is waited for without end."""
        return {"connect_timeout": int(WAIT_S), "tcp_user_timeout": int(1000 * WAIT_S), "keepalives_idle": int(WAIT_S)}

    def lock(self, execute: Callable[[str], Any]) -> Callable[[], None]:
        """Have the right to write this journal, for as long as this connection lasts."""
        if execute("SELECT current_schema()").scalar() is None:
            raise StoreError(
                f"The journal {self.name} has no schema to be in: its search_path names none that exists. Create it, "
                "or leave search_path out of the address."
            )
        if not execute(LOCK).scalar():
            raise StoreError(
                f"The journal {self.name} is being written by {_last_writer(execute)}, and one process writes a "
                "journal at a time. End that run or wait for it, or choose another database."
            )
        return lambda: None

    def find_damage(self, execute: Callable[[str], Any]) -> str:  # noqa: ARG002
        """The server looks after its pages itself."""
        return ""

    def in_transaction(self, raw: Any) -> bool:
        """Whether a transaction is still to be undone: a connection that was lost took it along."""
        return not raw.closed and raw.info.transaction_status != psycopg.pq.TransactionStatus.IDLE

    def describe_failure(self, error: Any) -> str:
        """What went wrong and what to do."""
        message = str(error).strip().partition("\n")[0].rstrip(".")
        code = getattr(error, "sqlstate", None)
        if code is None and isinstance(error, psycopg.OperationalError):  # it is libpq that speaks
            return f"{message}. See that the server runs and can be reached, and open the journal again"
        return FAILURES.get(code or "") or FAILURES.get((code or "")[:2]) or message


def _last_writer(execute: Callable[[str], Any]) -> str:
    """Who opened a journal for writing last, as far as it can be told."""
    if execute("SELECT to_regclass('facts')").scalar() is None:  # it is being made at this moment
        return "another process"
    return str(execute("SELECT value FROM facts WHERE name = 'writer'").scalar() or "another process")
