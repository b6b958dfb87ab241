"""The trials of `etude simulate`: each staleness bound with its best split of GPUs, and a choice among them.

Splits are tried on a part of a large cluster. GPUs and tasks are divided by the same number, so that each engine and
each training GPU has as much to do. The best split of each bound is then simulated whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from etude.recipes.collect.scheduler import CollectionScheduler
from etude.tools.simulate.options import SimulateOptions
from etude.tools.simulate.simulation import Simulation, SimulationResult
from etude.tools.simulate.trace import RunTrace
from etude.tools.simulate.workload import Workload

__all__ = ["NEAR", "Trial", "choose", "replay", "run_trial", "search"]

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
    """The most tokens per second that the engines draw, with all slots taken."""
    scale: int = 1

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
        """The drawn tokens as a share of those that the engines could draw."""
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
        retries=0,
        max_staleness=max_staleness,
    )
    simulation = Simulation(
        cluster,
        options.workload() if workload is None else workload,
        scheduler,
        steps=skipped + (options.steps if steps is None else steps),
        skip=skipped,
        retries=options.retries,
        seed=options.seed,
        on_step=on_step,
    )
    peak = cluster.engines * options.slots / options.token_s(options.slots)
    return Trial(max_staleness, trainer_gpus, tasks, in_turns, simulation.run(), peak, scale)


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
            split = _best_split(options, bound, tasks, start, workload, on_step)
            start = options.splits.index(split)
            best.append(run_trial(options, bound, split, tasks, workload=workload, on_step=on_step))
    return best


def choose(trials: Sequence[Trial]) -> Trial:
    """Return the trial with the smallest batch, and then the least staleness, that is nearly as fast as the fastest."""
    fastest = max(trial.tokens_per_s for trial in trials)
    near = [trial for trial in trials if trial.tokens_per_s >= NEAR * fastest]
    return min(near, key=lambda trial: (trial.tasks, trial.max_staleness, not trial.in_turns, -trial.tokens_per_s))


def _best_split(
    options: SimulateOptions,
    bound: int,
    tasks: int,
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
            trial = run_trial(
                options, bound, splits[index], tasks, scale=scale, steps=8, workload=workload, on_step=on_step
            )
            speeds[index] = trial.tokens_per_s
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


def replay(trace: RunTrace, bounds: Sequence[int], on_step: Callable[[], None] = lambda: None) -> list[Trial]:
    """Return a finished run as it would have been with other staleness bounds, on its own machine."""
    trials = []
    for bound in bounds:
        cluster, scheduler = trace.cluster(), trace.scheduler(bound)
        simulation = Simulation(
            cluster, trace.seconds, scheduler, steps=trace.steps, retries=trace.retries, on_step=on_step
        )
        trials.append(Trial(bound, 0, trace.collection.tasks, False, simulation.run(), float(trace.slots)))
    return trials
