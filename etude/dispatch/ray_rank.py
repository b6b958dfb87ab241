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
from typing import Any, NamedTuple, Protocol

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


class ObjectStore(Protocol):
    """A store of large payloads."""

    def put(self, payload: Payload, *, always: bool = False) -> PayloadRef:
        """Store a payload if it is large, or `always`; return what the other side needs to get it."""
        ...

    def get(self, payload_ref: PayloadRef) -> Payload:
        """Get a payload from anywhere."""
        ...

    def get_all(self, payload_refs: Sequence[PayloadRef]) -> list[Payload]:
        """Get all of these payloads, which are fetched in parallel."""
        ...


class RankLocation(NamedTuple):
    """The place where a rank runs."""

    pid: int
    node: str
    """The node's id in the cluster."""
    machine: str
    """The result of `machine_id` there."""


class _Outbox:
    """The rank's messages, until they are fetched."""

    def __init__(self, object_store: ObjectStore) -> None:
        self._object_store = object_store
        self._messages: SimpleQueue[object] = SimpleQueue()

    def send(self, message: object) -> None:
        self._messages.put(message)

    def serialize(self, value: object, *, keep: bool = False) -> PayloadRef:
        if not keep:
            return self._object_store.put(serialize(value))
        assert isinstance(value, Batch), "only batches can stay here"
        return StoredBatch(self._object_store.put(serialize(value), always=True), BatchMeta.from_batch(value))

    def deserialize(self, payload_ref: PayloadRef) -> Any:
        return deserialize(self._object_store.get(payload_ref), lambda ref: load_batch(ref, self._pieces))

    def _pieces(self, payload_refs: Sequence[PayloadRef]) -> list[Any]:
        return [deserialize(payload) for payload in self._object_store.get_all(payload_refs)]

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

    def __init__(self, log: Path, path: Sequence[str], object_store: ObjectStore, node: str) -> None:
        """`log` gets all output; `path` is the controller's import path."""
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: even a stopped rank ends with its node
        _redirect_output(log)
        sys.path.extend(entry for entry in path if entry not in sys.path)
        self._node = node
        self._outbox = _Outbox(object_store)
        self._setups: SimpleQueue[RankSetup] = SimpleQueue()
        self._jobs: SimpleQueue[CallRequest] = SimpleQueue()
        self._async_calls = AsyncCallRunner(self._outbox)

    def location(self) -> RankLocation:
        """Return where it runs."""
        return RankLocation(os.getpid(), self._node, machine_id())

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


def _redirect_output(log: Path) -> None:
    """Send all output of this process to a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
