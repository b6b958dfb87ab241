"""The trials of `etude simulate`: each staleness bound with its best split of GPUs, and a choice among them.

Splits are tried on a part of a large cluster. GPUs and tasks are divided by the same number, so that each engine and
each training GPU has as much to do. The best split of each bound is then simulated whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from etude.recipes.collect.scheduler import CollectionScheduler
from etude.tools.simulate.options import SimulateOptions
from etude.tools.simulate.simulation import Simulation, SimulationResult
from etude.tools.simulate.trace import RunTrace
from etude.tools.simulate.workload import SyntheticWorkload, Workload

PART_ROLLOUTS = 1024
"""Rollouts of a step that a part of a cluster must keep: its slowest rollout is then as slow as that of the whole."""
PART_ENGINES = 16
"""Engines that a part must keep."""
NEAR = 0.97
"""A trial is as good as the fastest one, if it has this share of its speed."""


@dataclass(frozen=True)
class Trial:
    """A simulated choice of staleness bound, split and batch, and its result over the measured steps."""

    max_staleness: int
    trainer_gpus: int
    tasks: int
    in_turns: bool
    result: SimulationResult
    peak: float
    """The most tokens per second that the engines sample, with all slots in use."""
    scale: int = 1
    window: int | None = None
    """The `collect.window` of `collect.order=windowed`; None in the order of tasks."""
    attempts: int | None = None
    """The most attempts at the same time; None is no limit."""

    @property
    def step_s(self) -> list[float]:
        """The seconds of each measured step."""
        return [step.seconds for step in self.result.steps]

    @property
    def mean_step_s(self) -> float:
        """The mean seconds of a step."""
        return float(np.mean(self.step_s))

    @property
    def tokens_per_s(self) -> float:
        """Tokens that were trained on in a second."""
        tokens = sum(step.tokens for step in self.result.steps)
        return self.scale * tokens / sum(self.step_s)

    @property
    def waiting(self) -> float:
        """The share of its time in which the trainer waits for rollouts."""
        return sum(step.wait_s for step in self.result.steps) / sum(self.step_s)

    @property
    def training(self) -> float:
        """The share of its time in which the trainer computes."""
        return sum(step.update_s for step in self.result.steps) / sum(self.step_s)

    @property
    def drawing(self) -> float:
        """The sampled tokens as a share of those that the engines could sample."""
        return self.result.drawn / (self.result.seconds * self.peak)

    @property
    def mean_staleness(self) -> float:
        """The mean staleness of trained rollouts."""
        counts = self.result.staleness
        return sum(value * number for value, number in counts.items()) / counts.total()


def run_trial(
    options: SimulateOptions,
    max_staleness: int,
    trainer_gpus: int,
    tasks: int,
    *,
    window: int | None = None,
    scale: int = 1,
    steps: int | None = None,
    in_turns: bool = False,
    workload: Workload | None = None,
    on_step: Callable[[], None] = lambda: None,
) -> Trial:
    """Simulate one choice. workload: rollouts to use in place of those that the options describe."""
    skipped = max_staleness + 2  # the cluster fills up
    cluster = options.cluster(trainer_gpus, scale, in_turns=in_turns)
    scheduler = CollectionScheduler(
        tasks=max(round(tasks / scale), 1),
        group_size=options.group_size,
        refill=options.refill,
        max_staleness=max_staleness,
        window=None if window is None else max(round(window / scale), round(tasks / scale) + 1),
    )
    simulation = Simulation(
        cluster,
        SyntheticWorkload(options) if workload is None else workload,
        scheduler,
        steps=skipped + (options.steps if steps is None else steps),
        skip=skipped,
        retries=options.retries,
        seed=options.seed,
        on_step=on_step,
    )
    peak = cluster.engines * options.slots / options.token_s(options.slots)
    return Trial(max_staleness, trainer_gpus, tasks, in_turns, simulation.run(), peak, scale, window)


def search(
    options: SimulateOptions, workload: Workload | None = None, on_step: Callable[[], None] = lambda: None
) -> list[Trial]:
    """Return the best split of each bound and batch. on_step: called after each simulated step.

    The first trial of each batch is the run without staleness in which all GPUs sample, then all train.
    """
    options.check()
    best: list[Trial] = []
    for tasks in sorted(set(options.tasks)):
        best.append(run_trial(options, 0, 0, tasks, in_turns=True, workload=workload, on_step=on_step))
        start = _balanced(options, best[-1])
        for bound in sorted(set(options.max_staleness)):
            for window in options.windows(tasks, bound):
                split = _best_split(options, bound, tasks, window, start, workload, on_step)
                start = options.splits.index(split)
                best.append(run_trial(options, bound, split, tasks, window=window, workload=workload, on_step=on_step))
    return best


def choose(trials: Sequence[Trial]) -> Trial:
    """Return the trial with the smallest batch, and then the least staleness, that is nearly as fast as the fastest.

    Of two orders with the same bound it is the one with the smaller mean staleness.
    """
    fastest = max(trial.tokens_per_s for trial in trials)
    near = [trial for trial in trials if trial.tokens_per_s >= NEAR * fastest]

    def mildness(trial: Trial) -> tuple[int, int, bool, float, float]:
        mean = trial.mean_staleness if trial.result.staleness else 0.0
        return trial.tasks, trial.max_staleness, not trial.in_turns, round(mean, 1), -trial.tokens_per_s

    return min(near, key=mildness)


def _best_split(
    options: SimulateOptions,
    bound: int,
    tasks: int,
    window: int | None,
    start: int,
    workload: Workload | None,
    on_step: Callable[[], None],
) -> int:
    """Return the fastest split: from a first guess on, the next one in each direction while it is faster."""
    splits = options.splits
    scale = max(min(tasks * options.group_size // PART_ROLLOUTS, options.engines(splits[-1]) // PART_ENGINES), 1)
    speeds: dict[int, float] = {}

    def speed(index: int) -> float:
        if index not in range(len(splits)):
            return 0.0
        if index not in speeds:
            given: dict[str, Any] = {"scale": scale, "steps": 8, "workload": workload, "on_step": on_step}
            speeds[index] = run_trial(options, bound, splits[index], tasks, window=window, **given).tokens_per_s
        return speeds[index]

    at = start
    for direction in (-1, 1):
        while len(splits) > 1 and speed(at + direction) > speed(at):
            at += direction
    return splits[at]


def _balanced(options: SimulateOptions, in_turns: Trial) -> int:
    """Return the index of the split at which sampling and training would take equally long, from a run in turns."""
    tokens = in_turns.tokens_per_s * in_turns.mean_step_s
    sampling = 1.2 * tokens / in_turns.peak * options.gpus  # GPU seconds: engines do not always have all slots taken
    training = options.update_s(tokens, 1)
    wanted = options.gpus * training / (training + sampling)
    return min(range(len(options.splits)), key=lambda index: abs(options.splits[index] - wanted))


def replay(
    trace: RunTrace,
    bounds: Sequence[int],
    on_step: Callable[[], None] = lambda: None,
    *,
    windows: Callable[[int], Sequence[int | None]] = lambda bound: [None],  # noqa: ARG005
    attempts: int | None = None,
) -> list[Trial]:
    """Return a finished run as it would have been with other staleness bounds, on its own machine.

    The first trial is the run as it was: with the first bound, and in its own order. windows: the values of `window` to
    try for a bound. attempts: the most attempts at the same time in the other trials; None is the run's own limit.
    """
    limit = trace.attempts if attempts is None else attempts
    own = bounds[0], trace.run.collect.candidates, trace.attempts
    trials = []
    every = ((bound, window, limit) for bound in bounds for window in windows(bound))
    for max_staleness, window, at_once in dict.fromkeys([own, *every]):
        cluster, scheduler = trace.cluster(at_once), trace.scheduler(max_staleness, window)
        retries, tasks = trace.run.collect.retries, trace.run.collect.tasks
        simulation = Simulation(cluster, trace.seconds, scheduler, steps=trace.steps, retries=retries, on_step=on_step)
        trials.append(
            Trial(
                max_staleness,
                trainer_gpus=0,
                tasks=tasks,
                in_turns=False,
                result=simulation.run(),
                peak=float(trace.slots),
                window=window,
                attempts=at_once,
            )
        )
    return trials
