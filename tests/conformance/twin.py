"""A batch seen as a list of rollouts in numpy, for restating a formula plainly, one rollout and one token at a time.

Nothing here shares code with the algorithms: the loops are what the formulas say, written without regard to speed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from torch import Tensor

from etude.batch import Batch

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Try:
    """One rollout: what it earned, and the columns of its action tokens in time order."""

    group: int
    reward: float
    columns: dict[str, Array]  # each [L]
    paid: Array  # [L] rewards of tokens; one paid on context has moved to the action before it
    facts: dict[str, Array]  # columns that have one entry a rollout

    def __getitem__(self, name: str) -> Array:
        return self.columns[name]

    def __len__(self) -> int:
        return len(self.paid)

    @property
    def total(self) -> float:
        """R: the rollout's reward and those of its tokens."""
        return self.reward + float(self.paid.sum())

    @property
    def rewards(self) -> Array:
        """[L]: r_t, with the rollout's own reward at its last action token."""
        rewards = self.paid.copy()
        if len(rewards):
            rewards[-1] += self.reward
        return rewards

    @property
    def turns(self) -> list[slice]:
        """The stretches of action tokens that share a turn."""
        turn = self.columns["turn"]
        cuts = [0, *(t for t in range(1, len(turn)) if turn[t] != turn[t - 1]), len(turn)]
        return [slice(a, b) for a, b in pairwise(cuts) if b > a]


FACTS = ("greedy_reward", "reward_parts", "role", "rollout_id", "truncated", "metric")


def tries(batch: Batch, **more: Tensor) -> list[Try]:
    """The rollouts of a batch; `more` adds token columns [T] to those of the batch."""
    columns = {name: column.tensor.detach().numpy() for name, column in batch.columns() if column.kind.value == "token"}
    columns |= {name: values.detach().numpy() for name, values in more.items()}
    action = batch.action.numpy()
    rewards = None if batch.reward is None else batch.reward.numpy()
    facts = {name: batch.require(name).numpy() for name in FACTS if batch.__dict__[name] is not None}
    found = []
    for u in range(batch.num_rollouts):
        where = [
            t for t in range(int(batch.rollout_token_offsets[u]), int(batch.rollout_token_offsets[u + 1])) if action[t]
        ]
        paid = np.zeros(len(where))
        if batch.token_reward is not None:
            for t in range(int(batch.rollout_token_offsets[u]), int(batch.rollout_token_offsets[u + 1])):
                given = columns["token_reward"][t]
                if np.isfinite(given) and given != 0:
                    paid[max(i for i, place in enumerate(where) if place <= t)] += given
        found.append(
            Try(
                group=int(batch.group[u]),
                reward=0.0 if rewards is None else float(rewards[u]),
                columns={name: values[where].astype(np.float64) for name, values in columns.items()},
                paid=paid,
                facts={name: values[u] for name, values in facts.items()},
            )
        )
    return found


def flat(parts: Sequence[Array]) -> Array:
    """Per-rollout arrays end to end: the order of the action tokens."""
    return np.concatenate([np.zeros(0), *parts])


def shared(each: Sequence[float], of: Sequence[Try]) -> Array:
    """One number a rollout, given to each of its action tokens."""
    return flat([np.full(len(t), a) for a, t in zip(each, of, strict=True)])


def by_group(of: Sequence[Try], one: Callable[[Array], Array]) -> list[float]:
    """Apply a function of a group's total rewards to each group, and give every rollout its own number."""
    found = [0.0] * len(of)
    for g in {t.group for t in of}:
        members = [u for u, t in enumerate(of) if t.group == g]
        values = one(np.array([of[u].total for u in members]))
        for u, value in zip(members, values, strict=True):
            found[u] = float(value)
    return found
