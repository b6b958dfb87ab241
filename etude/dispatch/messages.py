"""What a crew and its ranks say to each other through a pipe, and how it becomes bytes.

What a call carries is packed apart from the message around it, by whoever made the call: what cannot be read on the
other side is then an error of that call. A batch goes by its own wire, metrics by theirs, all else is pickled; both
ends are processes of one program, and nobody else can write to the pipe.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from etude.batch import Batch
from etude.batch.wire import from_bytes, to_bytes
from etude.errors import EtudeError
from etude.observe import LogLevel, Metrics

__all__ = ["Ask", "At", "Beat", "Begin", "Begun", "Done", "Drop", "Failed", "Job", "Line", "Said", "pack", "unpack"]


@dataclass(frozen=True, slots=True)
class Begin:
    """To a rank, first of all: who it is, and what makes its worker."""

    rank: int
    ranks: int
    port: int
    listener: int | None
    """The descriptor that the ranks' meeting point listens at, for the rank that keeps it."""
    threads: int
    device: str
    timeout: float
    beat: float
    level: LogLevel
    body: bytes
    """A function and its arguments."""


@dataclass(frozen=True, slots=True)
class Job:
    """To a rank: make this call, after those before it."""

    number: int
    body: bytes
    """A method of the worker's, its arguments, and those by name."""


@dataclass(frozen=True, slots=True)
class Ask:
    """To a rank: answer this beside everything else, by a coroutine method."""

    number: int
    body: bytes
    """The method and its arguments."""


@dataclass(frozen=True, slots=True)
class Drop:
    """To a rank: nobody waits for this answer any more."""

    number: int


@dataclass(frozen=True, slots=True)
class Beat:
    """From a rank: it lives."""


@dataclass(frozen=True, slots=True)
class At:
    """From a rank: what it is at, while it starts."""

    what: str


@dataclass(frozen=True, slots=True)
class Done:
    """From a rank: what came of a call."""

    number: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Failed:
    """From a rank: what went wrong in a call."""

    number: int
    error: EtudeError | None
    """The error itself, where it is one of ours."""
    told: str
    """The error, and where it was raised, in a line."""


@dataclass(frozen=True, slots=True)
class Begun:
    """From a rank: an answer's turn has come."""

    number: int


@dataclass(frozen=True, slots=True)
class Said:
    """From a rank: what it warned of."""

    level: int
    name: str
    text: str


class Line:
    """One end of the pipe: any thread sends, one receives."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, message: object) -> None:
        """Send it. It waits while the other side does not read; raises `OSError` once nobody ever will."""
        data = pickle.dumps(message)
        with self._lock:
            self._connection.send_bytes(data)

    def receive(self) -> object | None:
        """The next message; None once there will be no more."""
        try:
            message: object = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            return None
        return message

    def close(self) -> None:
        """Let go of it."""
        self._connection.close()


class _Packer(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Batches and metrics have wires of their own."""
        if isinstance(value, Batch):
            return from_bytes, (to_bytes(value),)
        if isinstance(value, Metrics):
            return Metrics.from_wire, (value.to_wire(),)
        return NotImplemented


def pack(value: object) -> bytes:
    """A value as bytes, which `unpack` reads in another process."""
    buffer = io.BytesIO()
    _Packer(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


unpack: Callable[[bytes], Any] = pickle.loads
