"""The token sequences of rollouts to train on, and the numbers that the controller keeps of them.

As soon as a rollout is over, its sequences are stored where the ranks can read them (`Crew.put`). On a cluster that is
the object store. The controller keeps only a few numbers of each, and builds a step from those (`step_batch`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from etude.records import Rollout, Sample

__all__ = ["PutSamples", "RolloutRows", "ScoredRollout"]

PutSamples = Callable[[Sequence[Sample]], Any]
"""Stores sequences, and returns a reference to them."""


@dataclass(frozen=True, slots=True, eq=False)
class RolloutRows:
    """The sequences of one rollout."""

    samples_ref: Any
    """The sequences, or a reference to them."""
    models: tuple[str, ...]
    """Of each sequence, the model that wrote its tokens."""
    has_anchor: tuple[bool, ...]
    """Of each sequence, whether it names states."""
    tokens: int
    """Number of tokens of all sequences."""
    first_action: int
    """Number of tokens before the first one that the model wrote."""
    prompt_tokens: int
    """Number of tokens before that one in the first sequence."""
    answer_tokens: int
    """Number of tokens that the model wrote."""
    observation_tokens: int
    """Number of tokens that the environment showed between answers."""
    turn_rewards: tuple[float, ...]
    """The rewards of turns, in order."""

    @classmethod
    def from_samples(cls, samples: Sequence[Sample]) -> RolloutRows:
        """Return the rows of sequences in this process."""
        action_positions = [np.flatnonzero(sample.action) for sample in samples]
        first = [
            int(at[0]) if len(at) else len(sample.ids) for sample, at in zip(samples, action_positions, strict=True)
        ]
        lengths = [len(sample.ids) for sample in samples]
        first_spoken = next((row for row, at in enumerate(action_positions) if len(at)), None)
        num_actions = sum(map(len, action_positions))
        return cls(
            samples_ref=samples,
            models=tuple(sample.model for sample in samples),
            has_anchor=tuple(sample.anchor is not None for sample in samples),
            tokens=sum(lengths),
            first_action=sum(lengths) if first_spoken is None else sum(lengths[:first_spoken]) + first[first_spoken],
            prompt_tokens=first[0] if first else 0,
            answer_tokens=num_actions,
            observation_tokens=sum(
                int(sample.observation.sum()) for sample in samples if sample.observation is not None
            ),
            turn_rewards=tuple(
                float(each) for s in samples if s.reward is not None for each in s.reward[s.reward != 0]
            ),
        )

    def stored(self, put: PutSamples) -> RolloutRows:
        """Return the same rows with their sequences stored."""
        return replace(self, samples_ref=put(self.samples_ref))

    def total_reward(self, reward: float) -> float:
        """Return the sum of a rollout's reward and its turns' rewards, added in the same order as in `collate`."""
        for turn_reward in self.turn_rewards:  # `sum` compensates rounding errors since Python 3.12
            reward += turn_reward
        return reward


@dataclass(frozen=True, slots=True, eq=False)
class ScoredRollout:
    """A rollout that a step may train on."""

    turns: int
    """Number of its turns."""
    rows: RolloutRows
    rollout: Rollout
    total: float
    """The sum of all its rewards, those of its turns included."""
    metric: float
    """The number that groups are compared by: the total, or the part that `collect.metric` names."""

    def stored(self, put: PutSamples) -> ScoredRollout:
        """Return the same rollout with its sequences stored."""
        return replace(self, rows=self.rows.stored(put))
