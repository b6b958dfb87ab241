"""A rank's part in sending weights to servers: it sends them to its share of the servers, by one weight transport.

rank 0 ──transport──► servers 0, 2, …      weights go from the trainer to the servers that sample
rank 1 ──transport──► servers 1, 3, …      and the controller gets the result of each server

A server always belongs to the same rank, because the two may have made a process group. Servers that leave or join the
rotation do not change that.

consumes       the weights of this process, and the addresses of servers that are out of rotation
produces       servers that compute with exactly these weights, and the result of each
waits for      each answer of a server, at most `timeout`; and where ranks divide the weights, for each other, weight by
               weight: all of them go through all weights, also a rank without servers, or whose servers failed
unblocked by   that answer, or by its failure, which is returned and not raised: the other ranks' servers continue
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from etude.errors import EtudeError
from etude.rollout.server_client import ServerAddress, ServerClient
from etude.sync import ReplicaWeightSync, SyncConfig, build_weight_sync


@dataclass(frozen=True)
class SendPlan:
    """The ranks that send weights to the servers of a run, and the settings for it."""

    sync: SyncConfig
    ranks: Sequence[int]
    """The ranks that send."""
    untied: bool
    """True if a head that is tied to the embedding is sent as a separate weight."""
    keeps_tower: bool = False
    """True if servers keep weights between updates: the run has started them, and they do not sleep. Then a vision
    tower that is not trained is sent to each of them once."""
    names_of: Path | None = None
    """The model directory whose files have the names that the servers know; None for those of transformers' model."""

    def share(self, servers: Mapping[int, ServerAddress], rank: int) -> list[ServerAddress]:
        """Return the servers of this rank: by their numbers among all servers of the run, the ranks take turns."""
        if rank not in self.ranks:
            return []
        turn = self.ranks.index(rank)
        return [address for number, address in servers.items() if number % len(self.ranks) == turn]


@dataclass(frozen=True)
class ServerUpdate:
    """The result of one server's weight update."""

    url: str
    updated: bool
    """True if the server computes with the new weights."""
    started: bool = True
    """False if nothing was done with the server, so that it continues with its old weights."""
    error: str = ""
    """The error, as a sentence."""


@dataclass(frozen=True)
class SendResult:
    """The results of a rank's share of the servers."""

    servers: Sequence[ServerUpdate] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The metrics that the rank measured."""


class CollectiveWeights:
    """Weights that ranks gather together, one after the other. Each rank must take all of them, even if it sends
    none."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._weights = iter(weights)
        self._one = threading.Lock()

    def __iter__(self) -> CollectiveWeights:
        return self

    def __next__(self) -> tuple[str, Tensor]:
        with self._one:
            return next(self._weights)

    def drain(self) -> None:
        """Take all remaining weights, because other ranks wait for this rank's part of them."""
        for _ in self:
            pass


@contextmanager
def collect_together(weights: Iterable[tuple[str, Tensor]], *, divided: bool) -> Iterator[Iterable[tuple[str, Tensor]]]:
    """Yield weights. If they are divided among ranks, every rank goes through all of them, even if it uses none."""
    if not divided:
        yield weights
        return
    collective = CollectiveWeights(weights)
    try:
        yield collective
    finally:
        collective.drain()


class WeightSender:
    """Sends the weights of one rank to servers, which may be different ones each time."""

    def __init__(self, sync: SyncConfig, device: torch.device) -> None:
        """device: the device of the weights."""
        self._sync = sync
        self._gpu = device if device.type == "cuda" else None
        self._weight_sync: ReplicaWeightSync | None = None
        self._epochs: dict[str, int] = {}
        """The incarnation of each server at the last update, by URL."""
        self._complete: dict[str, int] = {}
        """The incarnation of each server that has taken all weights, and no update that failed since, by URL."""

    def close(self) -> None:
        """Free the resources of the weight transport."""
        if self._weight_sync is not None:
            self._weight_sync.close()
        self._weight_sync = None

    def have_all(self, servers: Sequence[ServerAddress]) -> bool:
        """Return True if each of these servers has taken all weights, so that those which do not change can be left
        out."""
        return all(self._complete.get(server.url) == server.incarnation for server in servers)

    def send(
        self,
        servers: Sequence[ServerAddress],
        weights: Iterable[tuple[str, Tensor]],
        version: int,
        *,
        partial: bool = False,
    ) -> SendResult:
        """Send these weights to the servers, and return the results. partial: some that all have are left out."""
        clients = [ServerClient.from_address(server) for server in servers]
        result = asyncio.run(self._send(clients, weights, version, partial))
        for server, update in zip(servers, result.servers, strict=True):
            self._complete.pop(server.url, None)
            if update.updated:
                self._complete[server.url] = server.incarnation
        return result

    async def _send(
        self, servers: Sequence[ServerClient], weights: Iterable[tuple[str, Tensor]], version: int, partial: bool
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
            metrics = (
                await self._weight_sync.publish(weights, version, servers, restarted=restarted, partial=partial)
            ).reduce()
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
