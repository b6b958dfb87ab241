"""A rank's part in bringing weights to servers: it goes to its share of them, by a carrier that it keeps.

rank 0 ──carrier──► servers 0, 2, …        weights go from where they are trained to where they are sampled
rank 1 ──carrier──► servers 1, 3, …        and the controller is told how each of them fared

A server is the same rank's each time, whichever of the others are there: who it has made a process group with.

consumes       the weights of this process, and the addresses of servers that are out of rotation
produces       servers that compute with exactly these, and what came of each
waits for      each answer of a server, at most `timeout`; and where ranks divide the weights, for each other, weight by
               weight: all of them go through all, one that brings them to nobody and one whose servers failed too
unblocked by   it, or by its failure, which is told and not raised: the other ranks' servers go on
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from etude.errors import EtudeError
from etude.rollout.remote import Address, Remote
from etude.sync import Fleet, SyncConfig, fleet, shares

__all__ = ["Brought", "Carriage", "Carried", "Courier", "InStep"]


@dataclass(frozen=True)
class Carriage:
    """How the ranks of a run bring weights to its servers."""

    sync: SyncConfig
    ranks: Sequence[int]
    """Those that do."""
    untied: bool
    """Whether a head that is the embedding travels as a weight of its own."""

    def share(self, servers: Mapping[int, Address], rank: int) -> list[Address]:
        """The servers that are this rank's, by their places among all that the run has."""
        if rank not in self.ranks or not servers:
            return []
        mine = shares(1 + max(servers), len(self.ranks), self.ranks.index(rank))
        return [address for place, address in servers.items() if place in mine]


@dataclass(frozen=True)
class Brought:
    """What came of one server."""

    url: str
    took: bool
    """Whether it computes with the new weights."""
    begun: bool = True
    """Whether anything was done with it; if not, it goes on with the weights it had."""
    why: str = ""
    """What went wrong, as a sentence."""


@dataclass(frozen=True)
class Carried:
    """What came of a rank's share."""

    servers: Sequence[Brought] = ()
    figures: Mapping[str, float] = field(default_factory=dict)
    """What it measured."""


class InStep:
    """Weights that ranks make together, one after the other: each of them takes all, whoever it brings them to."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._weights, self._one = iter(weights), threading.Lock()

    def __iter__(self) -> InStep:
        return self

    def __next__(self) -> tuple[str, Tensor]:
        with self._one:
            return next(self._weights)

    def rest(self) -> None:
        """Take what nobody here has asked for: others wait for this rank's part of it."""
        for _ in self:
            pass


class Courier:
    """Brings the weights of one rank to servers, which may be others each time."""

    def __init__(self, sync: SyncConfig, device: torch.device) -> None:
        """device: where the weights lie."""
        self._sync = sync
        self._gpu = device if device.type == "cuda" else None
        self._fleet: Fleet | None = None
        self._lives: dict[str, int] = {}
        """Which of its lives each server was in when it was gone to last, by URL."""

    def close(self) -> None:
        """Let go of what the carrier holds."""
        if self._fleet is not None:
            self._fleet.close()
        self._fleet = None

    def carry(self, servers: Sequence[Address], weights: Iterable[tuple[str, Tensor]], version: int) -> Carried:
        """Bring these to the weights."""
        return asyncio.run(self._carry([Remote.at(each) for each in servers], weights, version))

    async def _carry(self, servers: Sequence[Remote], weights: Iterable[tuple[str, Tensor]], version: int) -> Carried:
        if not servers:
            return Carried()
        figures: Mapping[str, float] = {}
        failed: Mapping[str, str] = {}
        why = ""
        try:
            if self._fleet is None:
                self._fleet = fleet(servers, self._sync, Path(), self._gpu)
            anew = [server for server in servers if self._lives.get(server.url) != server.life]
            self._lives |= {server.url: server.life for server in servers}
            figures = (await self._fleet.publish(weights, version, servers, anew=anew)).reduce()
        except (EtudeError, OSError, RuntimeError) as error:
            why = str(error) or type(error).__name__
        finally:
            failed = {} if self._fleet is None else self._fleet.failed
            for server in servers:
                await server.close()
        fared = [failed.get(server.url, why) for server in servers]
        told = [Brought(at.url, not said, at.withdrawn, said) for at, said in zip(servers, fared, strict=True)]
        return Carried(told, figures)
