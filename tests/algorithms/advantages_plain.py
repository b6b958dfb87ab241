"""Batches taken apart into plain lists, one rollout at a time, for restating estimators without a tensor."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from etude.algorithms.advantages import ADVANTAGES
from etude.algorithms.base import AdvantageEstimate, AlgorithmState
from etude.algorithms.view import Ranks, View
from etude.batch import Batch
from tests.batches import random_batch

T = TypeVar("T")


@dataclass
class Plain:
    """One rollout: numbers of its action tokens in time order, over all its rows."""

    group: int
    own: float
    paid: list[float]
    turn: list[int]
    value: list[float]
    old: list[float]
    teacher: list[float]
    squares: list[float]

    @property
    def rewards(self) -> list[float]:
        return [*self.paid[:-1], self.paid[-1] + self.own] if self.paid else []

    @property
    def total(self) -> float:
        return self.own + sum(self.paid)

    def turns(self) -> list[list[int]]:
        """The places of each turn's tokens."""
        return [[t for t, of in enumerate(self.turn) if of == k] for k in sorted(set(self.turn))]

    def per_turn(self) -> list[float]:
        """r_k, the own reward in the last turn."""
        return [sum(self.rewards[t] for t in turn) for turn in self.turns()]


def plain(batch: Batch) -> list[Plain]:
    found = []
    for u in range(batch.num_rollouts):
        first, end = batch.rollout_token_offsets[u : u + 2].tolist()
        at = [t for t in range(first, end) if batch.action[t]]

        def column(name: str, at: list[int] = at) -> list[Any]:
            return [batch.require(name)[t].item() for t in at]

        found.append(
            Plain(
                int(batch.group[u]),
                float(batch.require("reward")[u]),
                *(column(name) for name in ("token_reward", "turn", "value", "old_logp", "teacher_logp")),
                column("sum_pi_squared"),
            )
        )
    return found


def awkward(seed: int, group_sizes: tuple[int, ...] = (3, 1, 4, 2)) -> Batch:
    """A random batch with the columns that only some estimators read."""
    batch = random_batch(seed, group_sizes)
    rng = torch.Generator().manual_seed(seed)
    return batch.replace(
        anchor=torch.randint(0, 3, (batch.num_tokens,), generator=rng),
        final_value=torch.rand(batch.num_rollouts, generator=rng, dtype=torch.float64),
    )


def estimate(name: str, batch: Batch, state: AlgorithmState | None = None, **knobs: Any) -> AdvantageEstimate:
    return ADVANTAGES[name](**knobs)(View(batch), state or AlgorithmState())


def spread(batch: Batch, values: list[float]) -> Tensor:
    """One number a rollout, given to its action tokens."""
    return torch.tensor([a for a, p in zip(values, plain(batch), strict=True) for _ in p.paid], dtype=torch.float64)


def close(found: Tensor, wanted: Tensor) -> None:
    assert len(wanted)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


class Meeting:
    """Ranks as threads: a collective waits until every one of them has come."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count, timeout=30)
        self.said: list[Tensor] = [torch.empty(0)] * count

    def all(self, rank: int, values: Tensor) -> list[Tensor]:
        self.said[rank] = values
        self.barrier.wait()
        heard = list(self.said)
        self.barrier.wait()
        return heard

    def run(self, work: Callable[[Ranks, int], T]) -> list[T]:
        """What each rank's work returns; the first error of any, else."""
        results: dict[int, T] = {}
        errors: list[Exception] = []

        def one(rank: int) -> None:
            try:
                results[rank] = work(Member(self, rank), rank)
            except Exception as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(self.said))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return [results[rank] for rank in sorted(results)]


@dataclass
class Member:
    """One rank of a meeting."""

    meeting: Meeting
    rank: int

    def all_reduce(self, values: Tensor) -> Tensor:
        return torch.stack(self.meeting.all(self.rank, values)).sum(0)

    def all_gather(self, values: Tensor) -> Tensor:
        return torch.cat(self.meeting.all(self.rank, values))
