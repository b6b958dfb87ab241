"""The metrics of a step's rollouts by agents, and warnings where something is wrong with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from etude.data.samples import count_joined_rows
from etude.observe import Mean, Metrics, Sum, get_logger
from etude.records import Outcome, Turn
from etude.store import RolloutState

CONTEXT_LENGTH_METRIC = "endpoint/context_length"
"""The metric that counts refusals of a prompt that is longer than the model's context."""
RewardedBy: TypeAlias = Literal["runner", "judge", "turns", "nobody"]
"""The source of a rollout's reward: its runner, which is also that of failures; the run's reward, which judged the last
answer; the rewards of its turns alone; or none."""


@dataclass(slots=True)
class AttemptCounts:
    """Counts of the attempts at a step's rollouts, by every way in which one can be lost."""

    ended: Counter[str] = field(default_factory=Counter)
    """Attempts by their status; and rollouts that ended without an attempt."""
    rewarded_by: Counter[RewardedBy] = field(default_factory=Counter)
    retried: int = 0
    without_turns: int = 0
    turns: int = 0
    rows: int = 0
    rollouts: int = 0
    reused: int = 0
    """Prompt tokens that repeat tokens which the model had read or written before."""

    def add(self, state: RolloutState, turns: Sequence[Turn], by: RewardedBy) -> None:
        """Count a rollout that ended."""
        self.rollouts += 1
        self.rewarded_by[by] += 1
        self.retried += max(len(state.attempts) - 1, 0)
        self.ended.update(attempt.status.value for attempt in state.attempts)
        if not state.attempts:
            self.ended[state.status.value] += 1
        rows, reused = count_joined_rows(turns)
        self.turns += len(turns)
        self.without_turns += not turns
        self.rows += rows
        self.reused += reused

    def warn(self) -> None:
        """Warn if no rollout called the model, which no metric on the console shows."""
        if self.rollouts and self.without_turns == self.rollouts and self.ended[Outcome.SUCCEEDED.value]:
            get_logger("recipes").warning(
                "None of the %d rollouts of this step called the model, so nothing was learned from them. Does the "
                "agent call `llm.base_url`, or, as a program, OPENAI_BASE_URL?",
                self.rollouts,
            )

    def metrics(self) -> Metrics:
        """Return the counts as metrics."""
        metrics = Metrics(
            {
                "agents/retried": Sum.of(self.retried),
                "agents/empty": Sum.of(self.without_turns),
                "agents/no_reward": Sum.of(self.rewarded_by["nobody"]),
                "agents/turns": Mean.over(self.turns, self.rollouts),
                "agents/branches": Mean.over(self.rows, self.rollouts),
                "agents/tokens_reused": Sum.of(self.reused),
            }
        )
        for outcome in Outcome:
            metrics.add(f"agents/{outcome.value}", Sum.of(self.ended[outcome.value]))
        return metrics


class AgentStatistics:
    """Statistics of the rollouts of agents, and of the model endpoint that they call."""

    def __init__(self, reward: str = "", endpoint_metrics: Callable[[], Metrics] = Metrics) -> None:
        """reward: the name of the run's reward, if the user chose one. endpoint_metrics: returns the metrics of the
        model endpoint."""
        self._counts = AttemptCounts()
        self._refused = 0.0
        self._idle_reward = reward
        """The reward that the user chose, as long as it has judged nothing and no warning has said so."""
        self._endpoint_metrics = endpoint_metrics

    def add(self, state: RolloutState, turns: Sequence[Turn], by: RewardedBy) -> None:
        """Count a rollout that ended."""
        self._counts.add(state, turns, by)

    def pop_metrics(self) -> Metrics:
        """Return the metrics of the rollouts that ended since the last call."""
        counts = self._counts
        self._counts = AttemptCounts()
        counts.warn()
        self._warn_of_idle_reward(counts)
        metrics = counts.metrics()
        endpoint_metrics = self._endpoint_metrics()
        metrics.merge(endpoint_metrics)
        refused = endpoint_metrics.reduce().get(CONTEXT_LENGTH_METRIC, 0.0)
        metrics.add("agents/over_long", Sum.of(refused - self._refused))
        self._refused = refused
        return metrics

    def _warn_of_idle_reward(self, counts: AttemptCounts) -> None:
        """Warn once if the agent gave all rewards of the first step, so that the run's own reward judged nothing."""
        succeeded = counts.ended[Outcome.SUCCEEDED.value]
        if not (self._idle_reward and succeeded):
            return
        if not counts.rewarded_by["judge"]:
            get_logger("recipes").warning(
                "`reward` (%s) has no effect so far: the agent itself gave a reward to each of the %d rollouts of this "
                "step, and an agent's reward counts. Leave `reward` out, or have the agent return None.",
                self._idle_reward,
                succeeded,
            )
        self._idle_reward = ""
