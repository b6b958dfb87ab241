"""The differences between the databases that hold a journal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

from etude.store.journal.blobs import ReadSlice


class Database(Protocol):
    """The differences between the databases."""

    driver: str
    paramstyle: Literal["named", "pyformat"]
    """The style of named parameters that the driver takes."""
    name: str
    """Its name in messages."""
    begin: str
    """The statement that begins a write transaction."""
    writer_setup: Sequence[str]
    """Statements that a new connection executes if it will write."""
    reader_setup: Sequence[str]
    """Statements that a new connection executes if it only reads."""
    flush_setup: tuple[str, str]
    """Statements before and after a commit that makes all earlier commits durable."""

    @property
    def url(self) -> dict[str, Any]:
        """The parts of the connection URL."""
        ...

    @property
    def options(self) -> dict[str, Any]:
        """The options of the connection."""
        ...

    def lock(self, execute: Callable[[str], Any]) -> Callable[[], None]:
        """Take the lock for writing, or report its owner; return the function that releases it."""
        ...

    def find_damage(self, execute: Callable[[str], Any]) -> str:
        """Return the faults that the database finds in its pages and indexes; usually empty."""
        ...

    def in_transaction(self, raw: Any) -> bool:
        """Return whether a failed transaction must still be rolled back."""
        ...

    def payload_slicer(self, raw: Any, position: int) -> ReadSlice:
        """Return a function that reads parts of the payload at a position, by the raw connection."""
        ...

    def describe_failure(self, error: Any) -> str:
        """Return a failure's cause and its remedy."""
        ...
