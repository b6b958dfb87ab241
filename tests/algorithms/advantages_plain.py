"""Batches as plain lists, one rollout at a time, to restate estimators without tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from etude.algorithms.advantages import ADVANTAGES
from etude.algorithms.base import AdvantageEstimate, AlgorithmState
from etude.algorithms.view import View
from etude.batch import Batch
from tests.batches import random_batch

T = TypeVar("T")


@dataclass
class PlainRollout:
    """One rollout as lists: the columns of its action tokens in time order, over all its rows."""

    group: int
    own_reward: float
    token_rewards: list[float]
    turn: list[int]
    value: list[float]
    old_logp: list[float]
    teacher_logp: list[float]
    sum_pi_squared: list[float]

    @property
    def rewards(self) -> list[float]:
        return [*self.token_rewards[:-1], self.token_rewards[-1] + self.own_reward] if self.token_rewards else []

    @property
    def total(self) -> float:
        return self.own_reward + sum(self.token_rewards)

    def turns(self) -> list[list[int]]:
        """Return the indices of each turn's tokens."""
        return [[t for t, of in enumerate(self.turn) if of == k] for k in sorted(set(self.turn))]

    def per_turn(self) -> list[float]:
        """Return r_k, the reward of each turn. The rollout's own reward counts in the last turn."""
        return [sum(self.rewards[t] for t in turn) for turn in self.turns()]


def plain_rollouts(batch: Batch) -> list[PlainRollout]:
    rollouts = []
    for u in range(batch.num_rollouts):
        first, end = batch.rollout_token_offsets[u : u + 2].tolist()
        at = [t for t in range(first, end) if batch.action[t]]

        def column(name: str, at: list[int] = at) -> list[Any]:
            return [batch.require(name)[t].item() for t in at]

        rollouts.append(
            PlainRollout(
                int(batch.group[u]),
                float(batch.require("reward")[u]),
                column("token_reward"),
                column("turn"),
                column("value"),
                column("old_logp"),
                column("teacher_logp"),
                column("sum_pi_squared"),
            )
        )
    return rollouts


def irregular_batch(seed: int, group_sizes: tuple[int, ...] = (3, 1, 4, 2)) -> Batch:
    """Return a random batch with the columns that only some estimators read."""
    batch = random_batch(seed, group_sizes)
    rng = torch.Generator().manual_seed(seed)
    return batch.replace(
        anchor=torch.randint(0, 3, (batch.num_tokens,), generator=rng),
        final_value=torch.rand(batch.num_rollouts, generator=rng, dtype=torch.float64),
    )


def estimate(name: str, batch: Batch, state: AlgorithmState | None = None, **options: Any) -> AdvantageEstimate:
    return ADVANTAGES[name](**options)(View(batch), state or AlgorithmState())


def to_tokens(batch: Batch, values: list[float]) -> Tensor:
    """Give one number of each rollout to its action tokens."""
    return torch.tensor(
        [a for a, p in zip(values, plain_rollouts(batch), strict=True) for _ in p.token_rewards], dtype=torch.float64
    )


def close(rollouts: Tensor, expected: Tensor) -> None:
    assert len(expected)
    torch.testing.assert_close(rollouts, expected, rtol=1e-9, atol=1e-9)
