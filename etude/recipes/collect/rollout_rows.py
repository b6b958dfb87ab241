"""The token sequences that rollouts are trained on as, and what the controller knows of them without having them.

As soon as a rollout is over, its sequences are laid where the ranks can look at them (`Crew.keep`). On a cluster that
is the object store: the controller keeps a few numbers of each, and puts a step together by those (`step_batch`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from etude.records import Rollout, Sample

__all__ = ["PutSamples", "RolloutRows", "ScoredRollout"]

PutSamples = Callable[[Sequence[Sample]], Any]
"""Lays sequences down; what stands for them."""


@dataclass(frozen=True, slots=True, eq=False)
class RolloutRows:
    """The sequences of one rollout."""

    samples_ref: Any
    """They themselves, or what stands for them."""
    models: tuple[str, ...]
    """Of each, whose tokens it has."""
    has_anchor: tuple[bool, ...]
    """Of each, whether it names states."""
    tokens: int
    """Of all of them."""
    first_action: int
    """Of those, the ones before the first that the model said."""
    prompt_tokens: int
    """Those before it in the first sequence."""
    answer_tokens: int
    """Those that the model said."""
    observation_tokens: int
    """Those that the environment showed between its answers."""
    turn_rewards: tuple[float, ...]
    """What turns were paid, one after another."""

    @classmethod
    def from_samples(cls, samples: Sequence[Sample]) -> RolloutRows:
        """Those that are here."""
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
        """The same, laid down."""
        return replace(self, samples_ref=put(self.samples_ref))

    def total_reward(self, reward: float) -> float:
        """All that a rollout was given which earned so much; see `collate`, where it is added up in the same way."""
        for turn_reward in self.turn_rewards:  # `sum` makes up for what rounding loses, since Python 3.12
            reward += turn_reward
        return reward


@dataclass(frozen=True, slots=True, eq=False)
class ScoredRollout:
    """A rollout that a step may train on."""

    turns: int
    """How many it had."""
    rows: RolloutRows
    rollout: Rollout
    total: float
    """All that it earned, what its turns were paid included."""
    metric: float
    """What its group is compared by: all of that, or the part that `collect.metric` names."""

    def stored(self, put: PutSamples) -> ScoredRollout:
        """The same, its sequences laid down."""
        return replace(self, rows=self.rows.stored(put))
