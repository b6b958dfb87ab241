"""The metrics of a step's collection, and warnings where something is wrong with it."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from etude.errors import CollectionError
from etude.observe import Mean, Metrics, Sum, format_seconds, get_logger
from etude.recipes.collect.rollouts import PlayedRollout
from etude.records import Outcome, Rollout
from etude.store import Phase, RolloutState, TaskState
from etude.store.journal.states import LIVE, AttemptState
from etude.store.queue.attempt_ends import INTERRUPTED

RARE = 0.05
"""The share of answers above the lowest reward below which the first model of a run gets a warning."""


@dataclass(slots=True)
class CollectionStatistics:
    """Statistics of one step's collection."""

    began: float = field(default_factory=time.perf_counter)
    tokens: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    attempts: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    failed_parts: Counter[str] = field(default_factory=Counter)
    failed_rewards: int = 0
    """Failures of the reward, whose causes the judge has logged."""
    judging_seconds: float = 0.0
    error: str = ""
    environment_seconds: float = 0.0
    """Seconds spent in environments and tools."""
    calls: int = 0
    failed_calls: int = 0
    bound_tokens: int = 0
    """Tokens that were drawn from a set."""
    kept_mass: float = 0.0
    """Sum over these tokens of the model's own probability of the set."""

    def add_attempt(self, played: PlayedRollout) -> None:
        """Count the cost of an attempt, of any outcome, and its failure."""
        self.attempts += 1
        if played.verdict.failed_part:
            self.failed_parts[played.verdict.failed_part] += 1
        self.judging_seconds += played.verdict.seconds
        for completion in (turn.completion for turn in played.turns):
            self.tokens += len(completion.ids)
            if completion.support is not None and completion.raw_logp is not None:
                self.bound_tokens += len(completion.ids)
                self.kept_mass += float(np.exp(completion.raw_logp.astype(np.float64) - completion.logp).sum())
        self.environment_seconds += played.waited
        self.calls += played.calls
        self.failed_calls += played.failed_calls
        self.failed_rewards += bool(played.verdict.cause)
        if played.verdict.error:
            self.add_failure(played.verdict.outcome, played.verdict.error)

    def add_interrupted(self, task: TaskState, rollouts: Iterable[RolloutState]) -> None:
        """Count the failures of a task from before the run was stopped."""
        if task.phase is Phase.DROPPED:
            self.dropped[task.cause] += 1
        for attempt in (ended for rollout in rollouts for ended in ended_attempts(rollout)):
            self.attempts += 1
            if attempt.error:
                self.add_failure(Outcome(attempt.status.value), attempt.error)

    def add_failure(self, outcome: Outcome, error: str) -> None:
        """Count a failure of judging or playing. Beside a success, `judging`'s error score stands for the reward."""
        self.failed["given_error_score" if outcome is Outcome.SUCCEEDED else outcome.value] += 1
        self.error = error

    def nothing_to_train_on(self, step: int, tasks: int) -> CollectionError:
        """Return the error of a step whose tasks, `tasks` and their replacements, have all failed."""
        replacements = self.dropped.total() - tasks
        counted = f", {replacements} of them as replacements" if replacements > 0 else ""
        between = "\n" if "\n" in self.error else " "  # a traceback ends with a line break
        return CollectionError(
            f"Step {step} has nothing to train on: each of {self.dropped.total()} tasks failed{counted}. "
            f"The last failure: {self.error}{between}Fix that; a run that is started again continues from here."
        )

    def metrics(self, *, episodic: bool = False, tempered: bool = False) -> Metrics:
        """Return the metrics. episodic: rollouts may have several turns. tempered: the temperature is not 1, so that
        the model's own distribution does not tell the mass of a set."""
        metrics = Metrics(
            {
                "sampled_tokens": Sum.of(self.tokens),
                "judging_seconds": Sum.of(self.judging_seconds),
                "dropped_tasks": Sum.of(self.dropped.total()),
                "failed_attempts": Sum.of(self.failed.total()),
                "failed_share": Mean.over(self.failed.total(), self.attempts),
            }
        )
        if episodic:
            metrics.add("environment_seconds", Sum.of(self.environment_seconds))
            metrics.add("tool_calls", Sum.of(self.calls))
            metrics.add("failed_tool_calls", Sum.of(self.failed_calls))
        if self.bound_tokens and not tempered:
            metrics.add("support/kept_mass", Mean.over(self.kept_mass, self.bound_tokens))
        for cause, count in self.failed.items():
            metrics.add(f"failed_attempts/{cause}", Sum.of(count))
        for part, count in self.failed_parts.items():
            metrics.add(f"failed_parts/{part}", Sum.of(count))
        for cause, count in self.dropped.items():
            metrics.add(f"dropped_tasks/{cause.replace(' ', '_')}", Sum.of(count))
        return metrics


def ended_attempts(state: RolloutState) -> list[AttemptState]:
    """Return the attempts at a rollout that ended by themselves, and not by a stop of the run."""
    return [attempt for attempt in state.attempts if attempt.status not in LIVE and attempt.error != INTERRUPTED]


def also_before(steps: int) -> str:
    """Return the part of a warning that says in how many steps before this one it held too. steps: with this one."""
    if steps == 1:
        return ""
    return " as in the step before" if steps == 2 else f" as in the {steps - 1} steps before"


class CollectionWarnings:
    """Logs problems of steps: at once, and again when they have doubled."""

    def __init__(self, *, one_by_one: bool, pays: bool = True) -> None:
        """one_by_one: answers are judged one at a time, though several could be. pays: the run has a reward."""
        self._log = get_logger("recipes")
        self._failures = self._warned_failures = self._zero_variance_steps = 0
        self._hint_workers = one_by_one
        self._warned_parts = False
        self._has_reward = pays

    def warn_about_step(
        self, step: int, statistics: CollectionStatistics, earned: Collection[float], *, zero_variance: bool
    ) -> None:
        """Check a collected step. earned: the rewards of its rollouts. zero_variance: all rewards are equal within each
        group."""
        self._warn_failures(step, statistics)
        self._warn_slow_judging(step, statistics)
        self._warn_rewards(step, earned, zero_variance=zero_variance)

    def fill_missing_parts(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Return a step's rollouts, all with the same named reward parts; missing parts are 0.

        Rollouts of other data sources may have other rewards, so they are compared with those of their own.
        """
        of_source: dict[str, set[str]] = defaultdict(set)
        for rollout in rollouts:
            of_source[rollout.source] |= rollout.parts.keys()
        names = sorted(set().union(*of_source.values()))
        if all(len(rollout.parts) == len(names) for rollout in rollouts):
            return list(rollouts)
        lacking = [rollout.id for rollout in rollouts if len(rollout.parts) < len(of_source[rollout.source])]
        if lacking and not self._warned_parts:
            self._warned_parts = True
            self._log.warning(
                "The reward gave %d of %d answers fewer named parts than others, which have %s. Missing parts count "
                "as 0. This is logged once.",
                len(lacking),
                len(rollouts),
                ", ".join(names),
            )
        return [replace(rollout, parts={name: rollout.parts.get(name, 0.0) for name in names}) for rollout in rollouts]

    def _warn_failures(self, step: int, statistics: CollectionStatistics) -> None:
        others = statistics.failed.total() - statistics.failed_rewards
        self._failures += others
        if not others or self._failures < 2 * self._warned_failures:
            return
        self._warned_failures = self._failures
        causes = ", ".join(f"{count} {cause.replace('_', ' ')}" for cause, count in statistics.failed.items())
        self._log.warning(
            "In step %d attempts at answers failed: %s. The last: %s. They are counted in `failed_attempts`, and "
            "logged again when there are twice as many.",
            step,
            causes,
            statistics.error.strip().rpartition("\n")[2].rstrip("."),
        )

    def _warn_slow_judging(self, step: int, statistics: CollectionStatistics) -> None:
        seconds = time.perf_counter() - statistics.began
        if self._hint_workers and statistics.judging_seconds > max(seconds / 2, 2.0):
            self._hint_workers = False
            self._log.warning(
                "Judging took %s of the %s in which step %d was collected, one answer at a time. `judging.workers=2` "
                "judges in two processes beside the run.",
                format_seconds(statistics.judging_seconds),
                format_seconds(seconds),
                step,
            )

    def _warn_rewards(self, step: int, earned: Collection[float], *, zero_variance: bool) -> None:
        self._zero_variance_steps = self._zero_variance_steps + 1 if zero_variance else 0
        low, high = min(earned), max(earned)
        with_the_first_model = step == 1
        all_earned_alike = high == low > 0
        if self._has_reward and with_the_first_model and not zero_variance and not all_earned_alike:
            self._warn_weak_model(step, earned)
        if not self._has_reward or self._zero_variance_steps.bit_count() != 1:  # 1, 2, 4, 8 … steps in a row
            return
        rewards_text = f"all {low:g}" if low == high else f"from {low:g} to {high:g}"
        self._log.warning(
            "In step %d%s every rollout of each group earned the same (%s): there is nothing to train on. If "
            "that is the highest possible reward, the tasks are learned. Else look at the answers with `etude "
            "answers`, at `sampling.temperature` and at the reward.",
            step,
            f",{also}," if (also := also_before(self._zero_variance_steps)) else "",
            rewards_text,
        )

    def _warn_weak_model(self, step: int, earned: Collection[float]) -> None:
        """Warn if the first model of a run rarely gets a reward, and say what helps."""
        least = min(earned)
        above = sum(reward > least for reward in earned)
        if above < RARE * len(earned):
            self._log.warning(
                "In step %d, %d of %d answers got more than the lowest reward, %g: a model learns slowly from so few. "
                "Start with easier tasks, or sample more answers to each (`collect.group_size`). Or train it first on "
                "demonstrations: `etude sft`.",
                step,
                above,
                len(earned),
                least,
            )
