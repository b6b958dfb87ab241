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
from etude.rollout.server_client import ServerAddress, ServerClient
from etude.sync import ReplicaWeightSync, SyncConfig, assign_replicas, build_weight_sync

__all__ = ["CollectiveWeights", "SendPlan", "SendResult", "ServerUpdate", "WeightSender"]


@dataclass(frozen=True)
class SendPlan:
    """How the ranks of a run bring weights to its servers."""

    sync: SyncConfig
    ranks: Sequence[int]
    """Those that do."""
    untied: bool
    """Whether a head that is the embedding travels as a weight of its own."""

    def share(self, servers: Mapping[int, ServerAddress], rank: int) -> list[ServerAddress]:
        """The servers that are this rank's, by their places among all that the run has."""
        if rank not in self.ranks or not servers:
            return []
        numbers = assign_replicas(1 + max(servers), len(self.ranks), self.ranks.index(rank))
        return [address for number, address in servers.items() if number in numbers]


@dataclass(frozen=True)
class ServerUpdate:
    """What came of one server."""

    url: str
    updated: bool
    """Whether it computes with the new weights."""
    started: bool = True
    """Whether anything was done with it; if not, it goes on with the weights it had."""
    error: str = ""
    """What went wrong, as a sentence."""


@dataclass(frozen=True)
class SendResult:
    """What came of a rank's share."""

    servers: Sequence[ServerUpdate] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What it measured."""


class CollectiveWeights:
    """Weights that ranks make together, one after the other: each of them takes all, whoever it brings them to."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._weights, self._one = iter(weights), threading.Lock()

    def __iter__(self) -> CollectiveWeights:
        return self

    def __next__(self) -> tuple[str, Tensor]:
        with self._one:
            return next(self._weights)

    def drain(self) -> None:
        """Take what nobody here has asked for: others wait for this rank's part of it."""
        for _ in self:
            pass


class WeightSender:
    """Brings the weights of one rank to servers, which may be others each time."""

    def __init__(self, sync: SyncConfig, device: torch.device) -> None:
        """device: where the weights lie."""
        self._sync = sync
        self._gpu = device if device.type == "cuda" else None
        self._weight_sync: ReplicaWeightSync | None = None
        self._epochs: dict[str, int] = {}
        """Which of its lives each server was in when it was gone to last, by URL."""

    def close(self) -> None:
        """Let go of what the carrier holds."""
        if self._weight_sync is not None:
            self._weight_sync.close()
        self._weight_sync = None

    def send(self, servers: Sequence[ServerAddress], weights: Iterable[tuple[str, Tensor]], version: int) -> SendResult:
        """Bring these to the weights."""
        return asyncio.run(self._send([ServerClient.from_address(server) for server in servers], weights, version))

    async def _send(
        self, servers: Sequence[ServerClient], weights: Iterable[tuple[str, Tensor]], version: int
    ) -> SendResult:
        if not servers:
            return SendResult()
        metrics: Mapping[str, float] = {}
        failed: Mapping[str, str] = {}
        failure = ""
        try:
            if self._weight_sync is None:
                self._weight_sync = build_weight_sync(servers, self._sync, Path(), self._gpu)
            restarted = [server for server in servers if self._epochs.get(server.url) != server.incarnation]
            self._epochs |= {server.url: server.incarnation for server in servers}
            metrics = (await self._weight_sync.publish(weights, version, servers, restarted=restarted)).reduce()
        except (EtudeError, OSError, RuntimeError) as error:
            failure = str(error) or type(error).__name__
        finally:
            failed = {} if self._weight_sync is None else self._weight_sync.failed
            for server in servers:
                await server.close()
        errors = [failed.get(server.url, failure) for server in servers]
        updates = [
            ServerUpdate(address.url, not problem, address.withdrawn, problem)
            for address, problem in zip(servers, errors, strict=True)
        ]
        return SendResult(updates, metrics)
