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

from etude.batch import Batch, Outline
from etude.config.env import meet_through
from etude.dispatch.held import resolved
from etude.dispatch.machine import machine
from etude.dispatch.messages import Ask, Begin, Body, Drop, Job, Kept, Sent, pack, unpack
from etude.dispatch.rank import Asked, serve

__all__ = ["Depot", "Here", "Rank"]


class Depot(Protocol):
    """Where what is large lies until somebody takes it."""

    def put(self, body: Body, *, anyhow: bool = False) -> Sent:
        """Leave it there, if it is large, or anyhow; what the other side needs to take it."""
        ...

    def take(self, sent: Sent) -> Body:
        """Look at it, wherever it lies."""
        ...

    def take_all(self, sent: Sequence[Sent]) -> list[Body]:
        """Look at all of these, which are fetched side by side."""
        ...


class Here(NamedTuple):
    """Where a rank came to stand."""

    pid: int
    node: str
    """The node's own name in the cluster."""
    machine: str
    """What `machine` says there."""


class _Outbox:
    """What the rank says, until it is fetched."""

    def __init__(self, depot: Depot) -> None:
        self._depot = depot
        self._said: SimpleQueue[object] = SimpleQueue()

    def send(self, message: object) -> None:
        self._said.put(message)

    def pack(self, value: object, *, keep: bool = False) -> Sent:
        if not keep:
            return self._depot.put(pack(value))
        assert isinstance(value, Batch), "only batches are held"
        return Kept(self._depot.put(pack(value), anyhow=True), Outline.of(value))

    def unpack(self, sent: Sent) -> Any:
        return unpack(self._depot.take(sent), lambda lent: resolved(lent, self._pieces))

    def _pieces(self, sent: Sequence[Sent]) -> list[Any]:
        return [unpack(body) for body in self._depot.take_all(sent)]

    def fetched(self, seconds: float) -> list[object]:
        """All there is; where there is nothing, what comes within so many seconds."""
        told: list[object] = []
        try:
            told.append(self._said.get(timeout=seconds))
            while True:
                told.append(self._said.get_nowait())
        except Empty:
            return told


class Rank:
    """One actor. Its methods run on threads of their own: one that works, one that listens, one that tells."""

    def __init__(self, log: Path, path: Sequence[str], depot: Depot, node: str) -> None:
        """`log` is where all goes that it says; `path` is where the controller finds modules."""
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: also a stopped rank ends with its node
        _write_to(log)
        sys.path.extend(each for each in path if each not in sys.path)
        self._node = node
        self._outbox = _Outbox(depot)
        self._begin: SimpleQueue[Begin] = SimpleQueue()
        self._jobs: SimpleQueue[Job] = SimpleQueue()
        self._asked = Asked(self._outbox)

    def here(self) -> Here:
        """Where it stands."""
        return Here(os.getpid(), self._node, machine())

    def meeting(self, address: str) -> tuple[int, int]:
        """Where it will listen for the other ranks: a port that is free at this address, and the descriptor there."""
        listener = socket.create_server((address, 0))
        port: int = listener.getsockname()[1]
        return port, listener.detach()

    def work(self, address: str) -> None:
        """Be the rank that `Begin` speaks of, for ever, and speak to the others through this address of its own."""
        begin = self._begin.get()
        meet_through(address)
        serve(self._outbox, begin, self._jobs, self._asked)

    def give(self, message: object) -> None:
        """Take a message."""
        match message:
            case Begin():
                self._begin.put(message)
            case Job():
                self._jobs.put(message)
            case Ask() | Drop():
                self._asked.take(message)

    def told(self, seconds: float) -> list[object]:
        """What it has to say, now or within so many seconds."""
        return self._outbox.fetched(seconds)


def _write_to(log: Path) -> None:
    """Have everything that this process says go to a file of its own."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
