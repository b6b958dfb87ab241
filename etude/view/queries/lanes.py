"""The lanes of a run over wall-clock time: the phases of the trainer, and the attempts that were running meanwhile.

The trainer's phases follow from the metrics: a step's line is written at its end, and has the seconds of each phase.
The attempts follow from their starts and ends in the journal.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from etude.errors import NotFoundError
from etude.store import AttemptEnded, AttemptStarted
from etude.view.queries.curves import PHASES
from etude.view.replies import Table
from etude.view.run_reader import RunReader

MOST_STEPS = 8
"""Steps that are shown at once; the end of the range counts."""
BINS = 600
"""Points of the lane of attempts."""


@dataclass(frozen=True)
class Lanes:
    """Some steps over time."""

    began: float
    """Wall-clock time of the beginning, in seconds since 1970. The times below count from it."""
    seconds: float
    trainer: Table
    """The phases: step, phase, begin, end."""
    attempts: Table
    """The mean number of running attempts in each bin of time; empty without a journal."""
    idle: float | None
    """The share of the time in which no attempt ran."""


def read_lanes(reader: RunReader, first: int | None = None, last: int | None = None) -> Lanes:
    """Return the lanes of some steps, by default of the last three."""
    metrics = reader.metrics
    steps = [step for step in metrics.steps if step > 0]
    if not steps:
        raise NotFoundError(f"The run '{reader.name}' has no step with metrics yet.")
    end = steps[-1] if last is None else last
    start = max(end - 2 if first is None else first, end - MOST_STEPS + 1)
    shown = [step for step in steps if start <= step <= end]
    if not shown:
        raise NotFoundError(
            f"The run '{reader.name}' has metrics of steps {steps[0]} to {steps[-1]}, and not of these."
        )
    ends, totals = metrics.values("time"), metrics.values("time/step")
    rows = [metrics.steps.index(step) for step in shown]
    began, until = float(ends[rows[0]] - np.nan_to_num(totals[rows[0]])), float(ends[rows[-1]])
    spans: list[tuple[int, str, float, float]] = []
    for step, row in zip(shown, rows, strict=True):
        at = float(ends[row] - np.nan_to_num(totals[row])) - began
        for phase in PHASES:
            seconds = float(np.nan_to_num(metrics.values(f"time/{phase}")[row]))
            if seconds > 0:
                spans.append((step, phase, at, at + seconds))
            at += seconds
    columns = [list(column) for column in zip(*spans, strict=True)] or [[], [], [], []]
    trainer = Table(dict(zip(("step", "phase", "begin", "end"), columns, strict=True)))
    attempts, idle = _running_attempts(reader, shown[0], shown[-1], began, until)
    return Lanes(began, until - began, trainer, attempts, idle)


def _running_attempts(
    reader: RunReader, first: int, last: int, began: float, until: float
) -> tuple[Table, float | None]:
    """Return the mean number of running attempts over time, and the share of the time without one."""
    empty = Table({"time": [], "running": []})
    if not reader.has_journal or until <= began:
        return empty, None
    starts, ends = _attempt_times(reader, first, last)
    if not len(starts):
        return empty, None
    starts, ends = np.clip(starts, began, until) - began, np.clip(ends, began, until) - began
    times = np.concatenate([starts, ends])
    order = np.argsort(times, kind="stable")
    changes = np.concatenate([np.ones(len(starts)), -np.ones(len(ends))])[order]
    times, running = np.append(times[order], until - began), np.cumsum(changes)
    busy = np.concatenate([[0.0], np.cumsum(running * np.diff(times))])  # attempt-seconds up to each change
    edges = np.linspace(0.0, until - began, BINS + 1)
    means = np.diff(np.interp(edges, times, busy)) / (edges[1] - edges[0])
    idle = float(times[0] + np.diff(times)[running < 0.5].sum()) / (until - began)
    return Table({"time": edges[:-1], "running": means}), idle


def _attempt_times(reader: RunReader, first: int, last: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the starts and the ends of the attempts around some steps. One without an end still runs.

    An attempt begins at most `max_staleness` steps before the one that trains on it, and a step more for the collection
    of the first of them.
    """
    index, staleness = reader.index, int(reader.options.get("max_staleness") or 0)
    earlier = index.get(first - staleness - 1)
    following = index.get(last + 1)  # the evaluation after a step comes before it
    until = None if following is None else following.position
    begun: dict[tuple[int, int], float] = {}
    ended: dict[tuple[int, int], float] = {}
    position = 0 if earlier is None else earlier.begins
    for _, event in reader.journal.read(position, kinds=(AttemptStarted, AttemptEnded), until=until):
        match event:
            case AttemptStarted(rollout=rollout, attempt=attempt, at=at) if at:
                begun[rollout, attempt] = at
            case AttemptEnded(rollout=rollout, attempt=attempt, at=at) if at:
                ended[rollout, attempt] = at
    never = float("inf")
    starts = np.array(list(begun.values()), np.float64)
    return starts, np.array([ended.get(key, never) for key in begun], np.float64)
