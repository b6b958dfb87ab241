"""The messages between a crew and its ranks, and their serialization.

The payload of a call is serialized apart from the message around it, by the caller. So a payload that cannot be read on
the other side is an error of that call. Batches and metrics have their own wire formats; all else is pickled. Both ends
are processes of one program, and no other process can write to the pipe.
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

from etude.batch import Batch, BatchMeta, ImageContent
from etude.batch.serialization import from_bytes, to_bytes
from etude.errors import EtudeError
from etude.observe import LogLevel, Metrics

INLINE_BYTES = 4096
"""The size in bytes below which a buffer stays inside the pickle."""


@dataclass(frozen=True, slots=True)
class Payload:
    """A serialized value: `pickled` has the small parts, `buffers` the large ones as they are in memory."""

    pickled: bytes
    buffers: tuple[NDArray[np.uint8], ...] = ()
    refs: tuple[Any, ...] = ()
    """The values that stay where they are: `BatchRef`s to be loaded from there, and handles that are read later."""

    @property
    def size(self) -> int:
        """The number of bytes."""
        return len(self.pickled) + sum(buffer.nbytes for buffer in self.buffers)


PayloadRef = Any
"""A `Payload`, or a reference to one; each `Channel` has its own kind."""
BatchFactory = Callable[[Sequence[Any], Sequence[Any]], Batch]
"""A function that builds a batch from one value for each rollout, and from their metadata. It is sent by name."""


@dataclass(frozen=True, slots=True)
class BatchRef:
    """A batch that stays where it is."""

    pieces: tuple[PayloadRef, ...]
    locations: NDArray[np.int64]
    """[U, 2]: the piece of each rollout, and its index in that piece."""
    group: NDArray[np.int64]
    """[U]: the group of each."""
    make: BatchFactory | None = None
    """Builds the batch from the pieces and their `metadata`, if the pieces are not batches."""
    metadata: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """From a rank, in place of a batch that stays there."""

    sent: PayloadRef
    outline: BatchMeta


@dataclass(frozen=True, slots=True)
class RankSetup:
    """To a rank, as its first message: its identity, and how to make its worker."""

    rank: int
    ranks: int
    host: str
    port: int
    """The port at which the ranks meet."""
    listener: int | None
    """The file descriptor of the listening socket, for the rank that hosts the rendezvous."""
    threads: int
    device: str
    gpu: int
    """The index of its GPU among those that it sees, if it computes on one."""
    timeout: float
    heartbeat_s: float
    level: LogLevel
    body: PayloadRef
    """A function and its arguments."""


@dataclass(frozen=True, slots=True)
class CallRequest:
    """To a rank: make this call, after the earlier ones."""

    number: int
    body: PayloadRef
    """A method of the worker, its arguments, and its keyword arguments."""
    keep: bool = False
    """True if the resulting batch must stay there."""
    wants_result: bool = True
    """True if the result is needed; else the rank only reports that the call is done."""


@dataclass(frozen=True, slots=True)
class AsyncCallRequest:
    """To a rank: answer this by a coroutine method, concurrently with everything else."""

    number: int
    body: PayloadRef
    """The method and its arguments."""


@dataclass(frozen=True, slots=True)
class CancelAsyncCall:
    """To a rank: the caller no longer waits for this reply."""

    number: int


@dataclass(frozen=True, slots=True)
class HeartbeatMessage:
    """From a rank: it is alive."""


@dataclass(frozen=True, slots=True)
class StartupStatus:
    """From a rank: its current step, while it starts."""

    what: str


@dataclass(frozen=True, slots=True)
class CallResult:
    """From a rank: the result of a call."""

    number: int
    body: PayloadRef


@dataclass(frozen=True, slots=True)
class CallError:
    """From a rank: the error of a call."""

    number: int
    error: EtudeError | None
    """The error itself, if it is an `EtudeError`."""
    description: str
    """The error and where it was raised, in one line."""


@dataclass(frozen=True, slots=True)
class CallStarted:
    """From a rank: an async call has started."""

    number: int


@dataclass(frozen=True, slots=True)
class RankLogRecord:
    """From a rank: a warning that it logged."""

    level: int
    name: str
    text: str


ToRef = Callable[[object], Any]
LoadBatchRef = Callable[[BatchRef], Any]


class Channel(Protocol):
    """The rank's side of its connection: it sends messages, and serializes payloads."""

    def send(self, message: object) -> None:
        """Send a message, from any thread."""
        ...

    def serialize(self, value: object, *, keep: bool = False) -> PayloadRef:
        """Return a value as a reply carries it; or, with `keep`, a reference to a batch that stays here."""
        ...

    def deserialize(self, payload_ref: PayloadRef) -> Any:
        """Return the value that a call carried."""
        ...


class PipeChannel:
    """One end of the pipe. Any thread may send, one receives."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, message: object) -> None:
        """Send a message. It waits while the other side does not read, and raises `OSError` if that side has ended."""
        data = pickle.dumps(message)
        with self._lock:
            self._connection.send_bytes(data)

    def receive(self) -> object | None:
        """Return the next message; None at the end."""
        try:
            message: object = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            return None
        return message

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def serialize(self, value: object, *, keep: bool = False) -> Payload:
        """Return a value as it goes through the pipe."""
        assert not keep, "another process cannot load a batch that stays here"
        return serialize(value)

    def deserialize(self, payload: Payload) -> Any:
        """Return the value that came through the pipe."""
        return deserialize(payload)


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, to_ref: ToRef, on_buffer: Callable[[pickle.PickleBuffer], bool]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL, buffer_callback=on_buffer)
        self._to_ref = to_ref
        self.refs: list[Any] = []

    def persistent_id(self, value: Any) -> int | None:
        """Return the number of a value that stays where it is; None for any other value."""
        ref = self._to_ref(value)
        if ref is None:
            return None
        self.refs.append(ref)
        return len(self.refs) - 1

    def reducer_override(self, value: Any) -> Any:
        """Use the wire formats of batches and metrics."""
        if isinstance(value, Batch):
            return _batch, (pickle.PickleBuffer(to_bytes(value, contents=False)), value.images)
        if isinstance(value, Metrics):
            return Metrics.from_wire, (value.to_wire(),)
        return NotImplemented


def _batch(buffer: Any, images: tuple[ImageContent, ...]) -> Batch:
    """Return the batch. Its tensors are views of the buffer in which it arrived."""
    view = memoryview(buffer)
    return from_bytes(view, images, shared=view.readonly)


class _Unpacker(pickle.Unpickler):
    def __init__(self, payload: Payload, load_ref: LoadBatchRef | None) -> None:
        super().__init__(io.BytesIO(payload.pickled), buffers=payload.buffers)
        self._payload = payload
        self._load_ref = load_ref

    def persistent_load(self, number: Any) -> Any:
        """Load a batch that stayed where it is. A handle to another value is passed on."""
        ref = self._payload.refs[number]
        return self._load_ref(ref) if self._load_ref is not None and isinstance(ref, BatchRef) else ref


def serialize(value: object, to_ref: ToRef = lambda _: None) -> Payload:
    """Serialize a value, for `deserialize` in another process. to_ref: returns a reference for a value that stays
    here, or None."""
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
    return Payload(buffer.getvalue(), tuple(large), tuple(packer.refs))


def deserialize(payload: Payload, load_ref: LoadBatchRef | None = None) -> Any:
    """Return the value. Large parts are views of the payload, read-only if that is. load_ref: loads a batch by its
    reference."""
    if load_ref is not None or payload.refs:
        return _Unpacker(payload, load_ref).load()
    return pickle.loads(payload.pickled, buffers=payload.buffers)
