"""The rollouts and the trainer of a finished run, read from its journal and its metrics, to be simulated again.

The journal says when an attempt started, when each turn began and ended, and when the attempt ended. The time between
turns, and after the last one, is a wait. Of several turns, the time before the first is left out: the wait for a slot.
For one turn, that wait follows from the other times: at most `max_concurrency` requests run, in the order of their
starts. An attempt with a turn whose begin is unknown is one piece of work, from its begin to its end.

An agent's attempt starts when a runner takes it, so the time before its first turn is the agent's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate
from pathlib import Path

import numpy as np

from etude.errors import ConfigError
from etude.recipes.collect.agent_config import AgentConfig
from etude.recipes.collect.config import CollectionConfig
from etude.recipes.collect.environment import EnvConfig
from etude.recipes.collect.scheduler import CollectionScheduler
from etude.recipes.run.config import Run
from etude.recipes.run.directory import read_run
from etude.recipes.run.resume.session_log import read_sessions
from etude.recipes.run.rules.group_size import min_group_size
from etude.recipes.run_argument import without_secrets
from etude.rollout import TorchEngineConfig
from etude.store import Journal, RolloutState, Status
from etude.tools.metric_curves import read_curves
from etude.tools.rollout_reader import RolloutRecord, open_journal, read_settled_groups, reward_getter
from etude.tools.simulate.cluster import Cluster
from etude.tools.simulate.workload import SimulatedRollout, TraceWorkload, Turn

LEAST_S = 1e-6
TRAINER_PHASES = ("annotate", "estimate", "update")


@dataclass(frozen=True)
class RunTrace:
    """A run as it can be simulated."""

    directory: Path
    run: Run
    shares_processors: bool
    """True if trainer and engine would slow each other down by working at the same time, and its seconds are without
    that."""
    slots: int
    """The most requests at the same time."""
    attempts: int | None
    """The most attempts at the same time; None is no limit."""
    admitted: tuple[frozenset[int], ...]
    """The tasks of each step."""
    step_s: tuple[float, ...]
    """The measured seconds of each step."""
    update_s: tuple[float, ...]
    publish_s: float
    between_s: tuple[float, ...]
    seconds: TraceWorkload
    """The rollouts, with the seconds that sampling took as their work."""
    tokens: TraceWorkload
    """The rollouts, with tokens as their work."""
    notes: tuple[str, ...] = ()
    """Sentences about what the run did not record."""

    @property
    def steps(self) -> int:
        """The number of steps."""
        return len(self.admitted)

    def scheduler(self, max_staleness: int, window: int | None = None) -> CollectionScheduler:
        """Return the run's scheduler, with another bound and another `collect.window`."""
        run, collection = self.run, self.run.collect
        return CollectionScheduler(
            tasks=collection.tasks,
            group_size=collection.group_size,
            refill=collection.refill,
            greedy=run.has_greedy_baseline,
            min_group_size=min_group_size(run.advantage, run.collect.group_size),
            max_staleness=max_staleness,
            window=window,
            last_step=self.steps,
        )

    def cluster(self, attempts: int | None) -> Cluster:
        """Return the machines of the run: each request takes as long as it took. attempts: the most at the same time;
        None sets no limit."""
        return Cluster(
            engines=1,
            slots=self.slots,
            token_s=lambda running: 1.0,  # noqa: ARG005
            update_s=lambda step, tokens: self.update_s[step - 1],  # noqa: ARG005
            publish_s=self.publish_s,
            pause_s=self.publish_s,
            attempts=attempts,
            shares_processors=self.shares_processors,
            between_s=lambda step: self.between_s[step - 1],
        )


@dataclass
class AttemptTimes:
    """The last attempt at a rollout."""

    task: int
    sample: int
    began: float
    """The time at which it was started, which may be before the engine had a free slot."""
    ended: float
    tokens: list[int]
    """The tokens of each turn."""
    turns: list[tuple[float, float]] = field(default_factory=list)
    """The times at which each turn began and ended; empty if the journal does not have them all."""
    metric: float = 0.0
    failures: int = 0
    """Number of attempts that failed; more than the run's retries if the rollout has no score."""


def read_trace(directory: Path, on_rollout: Callable[[], None] = lambda: None) -> RunTrace:
    """Read a run. on_rollout: called for each rollout that is read."""
    run = read_run(directory, masked=without_secrets)
    reward_of = reward_getter(directory)
    with open_journal(directory) as store:
        admitted = _admitted_tasks(store)
        attempts = []
        for group in read_settled_groups(store, reward_of):
            for rollout in group:
                on_rollout()
                if rollout.attempts and rollout.attempts[-1].ended > 0:
                    attempts.append(_attempt(rollout, run.collect))
    if not admitted or not attempts:
        raise ConfigError(f"{directory} has not trained a step yet, so there is nothing to simulate. Wait for one.")
    slots = run.rollout.max_concurrency(run.ranks)
    if not run.has_agents:
        remove_queueing(attempts, slots)
    seconds, tokens = to_workloads(attempts, prepares=run.has_agents)
    times = _step_times(directory, len(admitted))
    device = next((session.device for session in read_sessions(directory)[::-1] if session.device), run.device)
    on_cpu = isinstance(run.rollout, TorchEngineConfig) and "cpu" in device.split()
    shares = on_cpu and run.max_staleness == 0
    return RunTrace(
        directory=directory,
        run=run,
        shares_processors=shares,
        slots=slots,
        attempts=find_limit(run.agent, run.env, run.collect, attempts),
        admitted=admitted,
        step_s=times["step"],
        update_s=times["update"],
        publish_s=float(np.median(times["publish"])),
        between_s=times["between"],
        seconds=seconds,
        tokens=tokens,
        notes=tuple(_notes(attempts, shares)),
    )


def _admitted_tasks(store: Journal) -> tuple[frozenset[int], ...]:
    """Return the tasks of each step, from the first one on."""
    steps = store.admitted()
    tasks = []
    for step in range(1, max(steps, default=0) + 1):
        states = store.load_states(RolloutState, steps.get(step, ()))
        tasks.append(frozenset(state.task for state in states.values()))
    return tuple(tasks)


def _metric(collection: CollectionConfig, state: RolloutState, reward: float | None) -> float:
    last = state.last
    if last is None or reward is None:
        return 0.0
    return collection.group_metric(state.task, last.parts, reward, last.error)


def _failures(state: RolloutState, retries: int) -> int:
    failed = sum(attempt.status not in (Status.SUCCEEDED, Status.INFRA_ERROR) for attempt in state.attempts)
    succeeded = state.status is Status.SUCCEEDED
    return min(failed, retries) if succeeded else retries + 1


def _attempt(rollout: RolloutRecord, collection: CollectionConfig) -> AttemptTimes:
    record = rollout.attempts[-1]
    return AttemptTimes(
        task=rollout.task.id,
        sample=rollout.state.sample,
        began=record.began,
        ended=record.ended,
        tokens=[len(turn.completion.ids) for turn in record.turns],
        turns=list(zip(record.starts, record.times, strict=True)) if all(record.starts) else [],
        metric=_metric(collection, rollout.state, rollout.reward),
        failures=_failures(rollout.state, collection.retries),
    )


def find_limit(
    agent: AgentConfig, env: EnvConfig, collect: CollectionConfig, attempts: Sequence[AttemptTimes]
) -> int | None:
    """Return the most attempts that a run makes at the same time; None if no limit is known.

    An agent may allow fewer to a runner, and runners may join from elsewhere. So the limit of agents is the number that
    was seen, if more rollouts were waiting.
    """
    if not agent.is_enabled and not env.has_programs:
        return env.max_concurrency if env.is_enabled and not env.sources else None
    allowed = agent.runners * agent.max_concurrency or None
    seen = _most_at_once(attempts)
    wanted = collect.tasks * collect.group_size
    return seen if seen < min(wanted, allowed or wanted) else allowed


def _most_at_once(attempts: Iterable[AttemptTimes]) -> int:
    starts, ends = [(attempt.began, 1) for attempt in attempts], [(attempt.ended, -1) for attempt in attempts]
    return max(accumulate(change for _, change in sorted([*starts, *ends])), default=0)


def remove_queueing(attempts: Iterable[AttemptTimes], slots: int) -> None:
    """Move the start of each attempt to the moment at which it got a slot.

    Attempts with the times of several turns stay as they are: those times include the waits.
    """
    ends: list[float] = []
    queued = [attempt for attempt in attempts if len(attempt.turns) < 2]
    for attempt in sorted(queued, key=lambda attempt: (attempt.began, attempt.task, attempt.sample)):
        if len(ends) >= slots:
            attempt.began = max(attempt.began, heappop(ends))
        ended = attempt.turns[0][1] if attempt.turns else attempt.ended
        attempt.turns = [(attempt.began, ended) for _ in attempt.turns]
        heappush(ends, max(ended, attempt.began))


def to_workloads(attempts: Sequence[AttemptTimes], *, prepares: bool = False) -> tuple[TraceWorkload, TraceWorkload]:
    """Return the rollouts with seconds as their work, and with tokens as their work.

    prepares: the time before the first turn is the agent's own.
    """
    seconds: dict[int, dict[int, SimulatedRollout]] = {}
    tokens: dict[int, dict[int, SimulatedRollout]] = {}
    for attempt in attempts:
        before = max(attempt.turns[0][0] - attempt.began, 0.0) if prepares and attempt.turns else 0.0
        drawn, rest = sum(attempt.tokens), (attempt.metric, attempt.failures, before)
        timed = _turns(attempt)
        counts = attempt.tokens if len(timed) == len(attempt.tokens) else [drawn]
        counted = tuple(Turn(max(count, 1), turn.wait) for count, turn in zip(counts, timed, strict=True))
        seconds.setdefault(attempt.task, {})[attempt.sample] = SimulatedRollout(timed, drawn, *rest)
        tokens.setdefault(attempt.task, {})[attempt.sample] = SimulatedRollout(counted, drawn, *rest)
    return TraceWorkload(seconds), TraceWorkload(tokens)


def _turns(attempt: AttemptTimes) -> tuple[Turn, ...]:
    """Return the seconds for which each turn was sampled, and the wait after it."""
    turns = attempt.turns or [(attempt.began, attempt.ended)]
    following = [*(start for start, _ in turns[1:]), attempt.ended]
    times = zip(turns, following, strict=True)
    return tuple(Turn(max(end - start, LEAST_S), max(then - end, 0.0)) for (start, end), then in times)


def _step_times(directory: Path, steps: int) -> dict[str, tuple[float, ...]]:
    """Return the seconds of each step, by phase. A step that was not measured takes the median."""
    curves = read_curves(directory).curves

    def phase(name: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        values = np.full(steps, np.nan)
        if f"time/{name}" in curves:
            curve = curves[f"time/{name}"]
            known = (curve.steps >= 1) & (curve.steps <= steps)
            values[curve.steps[known] - 1] = curve.values[known]
        return np.where(np.isnan(values), np.nanmedian(values) if (~np.isnan(values)).any() else 0.0, values)

    step, publish = phase("step"), phase("publish")
    update = sum((phase(name) for name in TRAINER_PHASES), np.zeros(steps))
    between = np.maximum(step - phase("collect") - update - publish, 0.0)
    named = {"step": step, "update": update, "publish": publish, "between": between}
    return {name: tuple(values.tolist()) for name, values in named.items()}


def _notes(attempts: Sequence[AttemptTimes], shares: bool) -> Iterator[str]:
    if not all(attempt.turns for attempt in attempts):
        yield (
            "The journal does not say when the sampling of some rollouts started: each of them counts as one piece of "
            "work, with its waits and its reward."
        )
    if shares:
        yield (
            "Engine and trainer share the processors: while both compute, each one counts at half its speed. A turn "
            "takes as long as it took, also beside more turns."
        )
    else:
        yield "Each rollout and each update takes as long as it took, also beside more of the other."
