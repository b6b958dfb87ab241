"""A batch as a list of numpy rollouts, to restate formulas one rollout and one token at a time.

Nothing here shares code with the algorithms. The loops follow the formulas, without regard to speed.
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
class NumpyRollout:
    """One rollout: its rewards, and the columns of its action tokens in time order."""

    group: int
    reward: float
    columns: dict[str, Array]  # each [L]
    token_rewards: Array  # [L] token rewards; one on a context token counts for the action before it
    rollout_columns: dict[str, Array]  # columns with one entry per rollout

    def __getitem__(self, name: str) -> Array:
        return self.columns[name]

    def __len__(self) -> int:
        return len(self.token_rewards)

    @property
    def total(self) -> float:
        """Return R: the rollout's reward plus those of its tokens."""
        return self.reward + float(self.token_rewards.sum())

    @property
    def rewards(self) -> Array:
        """[L]: return r_t, with the rollout's own reward at its last action token."""
        rewards = self.token_rewards.copy()
        if len(rewards):
            rewards[-1] += self.reward
        return rewards

    @property
    def turns(self) -> list[slice]:
        """Return the slices of action tokens of one turn each."""
        turn = self.columns["turn"]
        cuts = [0, *(t for t in range(1, len(turn)) if turn[t] != turn[t - 1]), len(turn)]
        return [slice(a, b) for a, b in pairwise(cuts) if b > a]


ROLLOUT_COLUMNS = ("greedy_reward", "reward_parts", "role", "rollout_id", "truncated", "metric")


def numpy_rollouts(batch: Batch, **extra: Tensor) -> list[NumpyRollout]:
    """Return the rollouts of a batch. `more` adds token columns [T] to those of the batch."""
    columns = {name: column.tensor.detach().numpy() for name, column in batch.columns() if column.kind.value == "token"}
    columns |= {name: values.detach().numpy() for name, values in extra.items()}
    action = batch.action.numpy()
    rewards = None if batch.reward is None else batch.reward.numpy()
    rollout_columns = {
        name: batch.require(name).numpy() for name in ROLLOUT_COLUMNS if batch.__dict__[name] is not None
    }
    result = []
    for u in range(batch.num_rollouts):
        where = [
            t for t in range(int(batch.rollout_token_offsets[u]), int(batch.rollout_token_offsets[u + 1])) if action[t]
        ]
        token_rewards = np.zeros(len(where))
        if batch.token_reward is not None:
            for t in range(int(batch.rollout_token_offsets[u]), int(batch.rollout_token_offsets[u + 1])):
                token_reward = columns["token_reward"][t]
                if np.isfinite(token_reward) and token_reward != 0:
                    token_rewards[max(i for i, position in enumerate(where) if position <= t)] += token_reward
        result.append(
            NumpyRollout(
                group=int(batch.group[u]),
                reward=0.0 if rewards is None else float(rewards[u]),
                columns={name: values[where].astype(np.float64) for name, values in columns.items()},
                token_rewards=token_rewards,
                rollout_columns={name: values[u] for name, values in rollout_columns.items()},
            )
        )
    return result


def flat(parts: Sequence[Array]) -> Array:
    """Concatenate the arrays of all rollouts, in the order of the action tokens."""
    return np.concatenate([np.zeros(0), *parts])


def to_tokens(values_of_rollouts: Sequence[float], rollouts: Sequence[NumpyRollout]) -> Array:
    """Give the number of each rollout to each of its action tokens."""
    return flat([np.full(len(t), a) for a, t in zip(values_of_rollouts, rollouts, strict=True)])


def by_group(rollouts: Sequence[NumpyRollout], function: Callable[[Array], Array]) -> list[float]:
    """Apply a function of a group's total rewards to each group, and return one number per rollout."""
    result = [0.0] * len(rollouts)
    for g in {t.group for t in rollouts}:
        members = [u for u, t in enumerate(rollouts) if t.group == g]
        values = function(np.array([rollouts[u].total for u in members]))
        for u, value in zip(members, values, strict=True):
            result[u] = float(value)
    return result
