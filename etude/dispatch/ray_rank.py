"""The main program of a rank in a Ray actor: the same rank as in a process, reached by calls to the actor.

consumes       messages, in the order of their delivery
produces       messages, which the controller fetches: each fetch waits a moment if there are none
waits for      a call; and, within one, for the other ranks, no longer than `timeout`
unblocked by   a message; the end of the actor is the end of its process

Each fetch, even of no message, is a sign of life: its thread does nothing else.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import ray

from etude.batch import Batch, BatchMeta
from etude.config.env import set_gloo_interface
from etude.dispatch.machine import machine_id
from etude.dispatch.messages import (
    AsyncCallRequest,
    CallRequest,
    CancelAsyncCall,
    Payload,
    PayloadRef,
    RankSetup,
    StoredBatch,
    deserialize,
    serialize,
)
from etude.dispatch.rank import AsyncCallRunner, serve
from etude.dispatch.remote_batch import load_batch

MIN_STORED_BYTES = 64 * 1024
"""The size in bytes from which a value goes to the object store. Smaller values travel in their message."""
_ray: Any = ray
"""Ray's functions whose types are missing or wrong."""


def store_payload(payload: Payload, *, always: bool = False) -> PayloadRef:
    """Put a payload into the object store of this node if it is large, or `always`. It stays as long as a reference to
    it exists."""
    return ray.put(payload) if always or payload.size >= MIN_STORED_BYTES else payload


def get_payload(payload_ref: PayloadRef) -> Payload:
    """Get a payload: in place if it is on this node, else as a copy."""
    payload: Payload = payload_ref if isinstance(payload_ref, Payload) else _ray.get(payload_ref)
    return payload


class RayBytes:
    """A handle to bytes in Ray's object store. They stay as long as a handle exists, on any machine."""

    def __init__(self, content: bytes) -> None:
        self._ref: Any = ray.put(content)

    def read(self) -> bytes:
        """Return the bytes."""
        content: bytes = _ray.get(self._ref)
        return content


def to_bytes_ref(value: object) -> RayBytes | None:
    """Return a handle, which Ray must see in a message to keep its bytes; None for any other value."""
    return value if isinstance(value, RayBytes) else None


class RankLocation(NamedTuple):
    """The place where a rank runs."""

    pid: int
    node: str
    """The node's id in the cluster."""
    machine: str
    """The result of `machine_id` there."""


class _Outbox:
    """The rank's messages, until they are fetched."""

    def __init__(self) -> None:
        self._messages: SimpleQueue[object] = SimpleQueue()

    def send(self, message: object) -> None:
        self._messages.put(message)

    def serialize(self, value: object, *, keep: bool = False) -> PayloadRef:
        if not keep:
            return store_payload(serialize(value, to_bytes_ref))
        assert isinstance(value, Batch), "only batches can stay here"
        return StoredBatch(store_payload(serialize(value, to_bytes_ref), always=True), BatchMeta.from_batch(value))

    def deserialize(self, payload_ref: PayloadRef) -> Any:
        return deserialize(get_payload(payload_ref), lambda ref: load_batch(ref, _load_pieces))

    def take_messages(self, seconds: float) -> list[object]:
        """Return all messages. If there are none, wait for the first one, up to `seconds`."""
        messages: list[object] = []
        try:
            messages.append(self._messages.get(timeout=seconds))
            while True:
                messages.append(self._messages.get_nowait())
        except Empty:
            return messages


class RankActor:
    """One actor. Its methods run on separate threads: one computes, one receives, one is fetched from."""

    def __init__(self, log: Path, path: Sequence[str]) -> None:
        """`log` gets all output; `path` is the controller's import path."""
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: even a stopped rank ends with its node
        _redirect_output(log)
        sys.path.extend(entry for entry in path if entry not in sys.path)
        self._outbox = _Outbox()
        self._setups: SimpleQueue[RankSetup] = SimpleQueue()
        self._jobs: SimpleQueue[CallRequest] = SimpleQueue()
        self._async_calls = AsyncCallRunner(self._outbox)

    def location(self) -> RankLocation:
        """Return where it runs."""
        return RankLocation(os.getpid(), ray.get_runtime_context().get_node_id(), machine_id())

    def bind_rendezvous(self, address: str) -> tuple[int, int]:
        """Return where it will listen for the other ranks: a free port of this address, and the file descriptor."""
        listener = socket.create_server((address, 0))
        port: int = listener.getsockname()[1]
        return port, listener.detach()

    def serve(self, address: str) -> None:
        """Be the rank of the coming `RankSetup`, for ever, and reach the others through this address of its node."""
        setup = self._setups.get()
        set_gloo_interface(address)
        serve(self._outbox, setup, self._jobs, self._async_calls)

    def deliver(self, message: object) -> None:
        """Take a message."""
        match message:
            case RankSetup():
                self._setups.put(message)
            case CallRequest():
                self._jobs.put(message)
            case AsyncCallRequest() | CancelAsyncCall():
                self._async_calls.handle(message)

    def take_messages(self, seconds: float) -> list[object]:
        """Return its messages, now or within as many seconds."""
        return self._outbox.take_messages(seconds)


def _load_pieces(payload_refs: Sequence[PayloadRef]) -> list[Any]:
    """Return the values of payloads that were stored with `always`. They are fetched in parallel."""
    return [deserialize(payload) for payload in _ray.get(list(payload_refs))]


def _redirect_output(log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
