"""What a crew and its ranks say to each other through a pipe, and how it becomes bytes.

What a call carries is packed apart from the message around it, by whoever made the call: what cannot be read on the
other side is then an error of that call. A batch goes by its own wire, metrics by theirs, all else is pickled; both
ends are processes of one program, and nobody else can write to the pipe.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from etude.batch import Batch, BatchMeta
from etude.batch.serialization import from_bytes, to_bytes
from etude.errors import EtudeError
from etude.observe import LogLevel, Metrics

__all__ = [
    *("AsyncCallRequest", "BatchFactory", "BatchRef", "CallError", "CallRequest", "CallResult", "CallStarted"),
    *("CancelAsyncCall", "Channel", "HeartbeatMessage", "Payload", "PayloadRef", "PipeChannel", "RankLogRecord"),
    *("RankSetup", "StartupStatus", "StoredBatch", "deserialize", "serialize"),
]

INLINE_BYTES = 4096
"""Bytes of one value that are not worth a place of their own."""


@dataclass(frozen=True, slots=True)
class Payload:
    """A value as bytes: what is small in `pickled`, and beside it what is large, each as it lay in memory."""

    pickled: bytes
    buffers: tuple[NDArray[np.uint8], ...] = ()
    batch_refs: tuple[BatchRef, ...] = ()
    """What stays where it lies, and is to be looked at there."""

    @property
    def size(self) -> int:
        """How many bytes there are."""
        return len(self.pickled) + sum(buffer.nbytes for buffer in self.buffers)


PayloadRef = Any
"""A `Payload`, or where one lies: what a `Channel` makes of it."""
BatchFactory = Callable[[Sequence[Any], Sequence[Any]], Batch]
"""What makes a batch of values, one for each rollout, and of what else is known of each. It travels by its name."""


@dataclass(frozen=True, slots=True)
class BatchRef:
    """A batch that stays where it lies."""

    pieces: tuple[PayloadRef, ...]
    locations: NDArray[np.int64]
    """[U, 2]: the piece that each rollout is in, and which one of it."""
    group: NDArray[np.int64]
    """[U]: the group of each."""
    make: BatchFactory | None = None
    """Makes the batch of the pieces and what `metadata` says of each, where they are not batches."""
    metadata: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """From a rank, in place of a batch that stays there."""

    sent: PayloadRef
    outline: BatchMeta


@dataclass(frozen=True, slots=True)
class RankSetup:
    """To a rank, first of all: who it is, and what makes its worker."""

    rank: int
    ranks: int
    host: str
    port: int
    """Where the ranks meet."""
    listener: int | None
    """The descriptor that the ranks' meeting point listens at, for the rank that keeps it."""
    threads: int
    device: str
    gpu: int
    """Which of the GPUs that it sees is its own, where it computes on one."""
    timeout: float
    heartbeat_s: float
    level: LogLevel
    body: PayloadRef
    """A function and its arguments."""


@dataclass(frozen=True, slots=True)
class CallRequest:
    """To a rank: make this call, after those before it."""

    number: int
    body: PayloadRef
    """A method of the worker's, its arguments, and those by name."""
    keep: bool = False
    """Whether the batch that comes of it is to stay there."""
    wants_result: bool = True
    """Whether anybody wants what comes of it; else it is told that it is done."""


@dataclass(frozen=True, slots=True)
class AsyncCallRequest:
    """To a rank: answer this beside everything else, by a coroutine method."""

    number: int
    body: PayloadRef
    """The method and its arguments."""


@dataclass(frozen=True, slots=True)
class CancelAsyncCall:
    """To a rank: nobody waits for this answer any more."""

    number: int


@dataclass(frozen=True, slots=True)
class HeartbeatMessage:
    """From a rank: it lives."""


@dataclass(frozen=True, slots=True)
class StartupStatus:
    """From a rank: what it is at, while it starts."""

    what: str


@dataclass(frozen=True, slots=True)
class CallResult:
    """From a rank: what came of a call."""

    number: int
    body: PayloadRef


@dataclass(frozen=True, slots=True)
class CallError:
    """From a rank: what went wrong in a call."""

    number: int
    error: EtudeError | None
    """The error itself, where it is one of ours."""
    description: str
    """The error, and where it was raised, in a line."""


@dataclass(frozen=True, slots=True)
class CallStarted:
    """From a rank: an answer's turn has come."""

    number: int


@dataclass(frozen=True, slots=True)
class RankLogRecord:
    """From a rank: what it warned of."""

    level: int
    name: str
    text: str


ToBatchRef = Callable[[object], BatchRef | None]
LoadBatchRef = Callable[[BatchRef], Any]


class Channel(Protocol):
    """How a rank answers: what it says, and what a call brought or is to take back."""

    def send(self, message: object) -> None:
        """Send it; any thread may."""
        ...

    def serialize(self, value: object, *, keep: bool = False) -> PayloadRef:
        """A value, as an answer carries it; or a batch that is kept, as it is told of."""
        ...

    def deserialize(self, payload_ref: PayloadRef) -> Any:
        """The value that a call carried."""
        ...


class PipeChannel:
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

    def serialize(self, value: object, *, keep: bool = False) -> Payload:
        """A value, as it goes through the pipe."""
        assert not keep, "what a process keeps, no other can look at"
        return serialize(value)

    def deserialize(self, payload: Payload) -> Any:
        """What came through the pipe."""
        return deserialize(payload)


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, to_ref: ToBatchRef, on_buffer: Callable[[pickle.PickleBuffer], bool]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL, buffer_callback=on_buffer)
        self._to_ref = to_ref
        self.batch_refs: list[BatchRef] = []

    def persistent_id(self, value: Any) -> int | None:
        """What is lent is told by its number."""
        ref = self._to_ref(value)
        if ref is None:
            return None
        self.batch_refs.append(ref)
        return len(self.batch_refs) - 1

    def reducer_override(self, value: Any) -> Any:
        """Batches and metrics have wires of their own."""
        if isinstance(value, Batch):
            return _batch, (pickle.PickleBuffer(to_bytes(value)),)
        if isinstance(value, Metrics):
            return Metrics.from_wire, (value.to_wire(),)
        return NotImplemented


def _batch(buffer: Any) -> Batch:
    """The batch, which looks into the buffer that it came in."""
    view = memoryview(buffer)
    return from_bytes(view, shared=view.readonly)


class _Unpacker(pickle.Unpickler):
    def __init__(self, payload: Payload, load_ref: LoadBatchRef) -> None:
        super().__init__(io.BytesIO(payload.pickled), buffers=payload.buffers)
        self._payload, self._load_ref = payload, load_ref

    def persistent_load(self, number: Any) -> Any:
        """What was lent."""
        return self._load_ref(self._payload.batch_refs[number])


def serialize(value: object, to_ref: ToBatchRef = lambda _: None) -> Payload:
    """A value as bytes, which `unpack` reads in another process. lend: what is to stay where it lies."""
    buffer = io.BytesIO()
    large: list[NDArray[np.uint8]] = []

    def keep_inline(pickle_buffer: pickle.PickleBuffer) -> bool:
        raw = pickle_buffer.raw()
        if raw.nbytes < INLINE_BYTES:
            return True
        large.append(np.frombuffer(raw, np.uint8))
        return False

    packer = _Packer(buffer, to_ref, keep_inline)
    packer.dump(value)
    return Payload(buffer.getvalue(), tuple(large), tuple(packer.batch_refs))


def deserialize(payload: Payload, load_ref: LoadBatchRef | None = None) -> Any:
    """The value again. What was large in it looks into the body, which it keeps: it is read-only if that is. borrow:
    how one looks at what was lent."""
    if load_ref is not None:
        return _Unpacker(payload, load_ref).load()
    return pickle.loads(payload.pickled, buffers=payload.buffers)
