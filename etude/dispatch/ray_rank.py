"""What runs in an actor: the same rank as in a process of its own, spoken to by calls to the actor.

consumes       messages, in the order in which they are given
produces       messages, which the controller comes for: each time it waits for some, but only a moment
waits for      a call; and, within one, for the other ranks, no longer than `timeout`
unblocked by   what is given; the end of the actor, which is the end of its process

That it hands over anything, and be it nothing, is its sign of life: the thread that does so does nothing else.
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

__all__ = ["ObjectStore", "RankActor", "RankLocation"]


class ObjectStore(Protocol):
    """Where what is large lies until somebody takes it."""

    def put(self, payload: Payload, *, always: bool = False) -> PayloadRef:
        """Leave it there, if it is large, or anyhow; what the other side needs to take it."""
        ...

    def get(self, payload_ref: PayloadRef) -> Payload:
        """Look at it, wherever it lies."""
        ...

    def get_all(self, payload_refs: Sequence[PayloadRef]) -> list[Payload]:
        """Look at all of these, which are fetched side by side."""
        ...


class RankLocation(NamedTuple):
    """Where a rank came to stand."""

    pid: int
    node: str
    """The node's own name in the cluster."""
    machine: str
    """What `machine_id` returns there."""


class _Outbox:
    """What the rank says, until it is fetched."""

    def __init__(self, object_store: ObjectStore) -> None:
        self._object_store = object_store
        self._messages: SimpleQueue[object] = SimpleQueue()

    def send(self, message: object) -> None:
        self._messages.put(message)

    def serialize(self, value: object, *, keep: bool = False) -> PayloadRef:
        if not keep:
            return self._object_store.put(serialize(value))
        assert isinstance(value, Batch), "only batches are held"
        return StoredBatch(self._object_store.put(serialize(value), always=True), BatchMeta.from_batch(value))

    def deserialize(self, payload_ref: PayloadRef) -> Any:
        return deserialize(self._object_store.get(payload_ref), lambda ref: load_batch(ref, self._pieces))

    def _pieces(self, payload_refs: Sequence[PayloadRef]) -> list[Any]:
        return [deserialize(payload) for payload in self._object_store.get_all(payload_refs)]

    def take_messages(self, seconds: float) -> list[object]:
        """All there is; where there is nothing, what comes within so many seconds."""
        messages: list[object] = []
        try:
            messages.append(self._messages.get(timeout=seconds))
            while True:
                messages.append(self._messages.get_nowait())
        except Empty:
            return messages


class RankActor:
    """One actor. Its methods run on threads of their own: one that works, one that listens, one that tells."""

    def __init__(self, log: Path, path: Sequence[str], object_store: ObjectStore, node: str) -> None:
        """`log` is where all goes that it says; `path` is where the controller finds modules."""
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: also a stopped rank ends with its node
        _redirect_output(log)
        sys.path.extend(entry for entry in path if entry not in sys.path)
        self._node = node
        self._outbox = _Outbox(object_store)
        self._setups: SimpleQueue[RankSetup] = SimpleQueue()
        self._jobs: SimpleQueue[CallRequest] = SimpleQueue()
        self._async_calls = AsyncCallRunner(self._outbox)

    def location(self) -> RankLocation:
        """Where it stands."""
        return RankLocation(os.getpid(), self._node, machine_id())

    def bind_rendezvous(self, address: str) -> tuple[int, int]:
        """Where it will listen for the other ranks: a port that is free at this address, and the descriptor there."""
        listener = socket.create_server((address, 0))
        port: int = listener.getsockname()[1]
        return port, listener.detach()

    def serve(self, address: str) -> None:
        """Be the rank that `RankSetup` speaks of, for ever, and speak to the others through this address of its own."""
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
        """What it has to say, now or within so many seconds."""
        return self._outbox.take_messages(seconds)


def _redirect_output(log: Path) -> None:
    """Have everything that this process says go to a file of its own."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
