"""The metrics of a run: curves, the time of each step by phase, and the table of steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
from numpy.typing import NDArray

from etude.observe.step_history import Curve, MetricsFile
from etude.tools.metric_curves import DEFAULT_METRICS
from etude.view.replies import Table
from etude.view.run_reader import RunReader

PHASES = ("collect", "annotate", "estimate", "update", "publish", "evaluate")
"""The phases of a step, in its order."""
MOST_POINTS = 2000
"""Points of a curve that are sent. A longer one is sent as the means of neighboring steps."""
TOKENS = ("trained_tokens", "tokens")
"""Metrics of the tokens of a step; the first one that a run has is summed."""
STEP_COLUMNS = (
    "reward",
    "group_std",
    "zero_variance_share",
    "answer_length",
    "truncated",
    "dropped_tasks",
    "failed_attempts",
    "staleness/mean",
    "policy_kl",
    "grad_norm",
    "time/step",
)


@dataclass(frozen=True)
class Curves:
    """Some curves of a run, and the names of all."""

    names: list[str]
    """All metrics of the run, in the order of their first step."""
    default: list[str]
    """The metrics that are drawn by default."""
    curves: dict[str, Curve]
    axes: Table
    """Steps, with the seconds of training and the tokens trained on up to each; also those of earlier sessions."""


def read_curves(reader: RunReader, patterns: Sequence[str] = ()) -> Curves:
    """Return the curves that match a pattern; without patterns, the default ones."""
    metrics = reader.metrics
    names = [name for name in metrics.names if name != "time"]
    default = select_names(names, DEFAULT_METRICS)
    selected = select_names(names, patterns) if patterns else default
    return Curves(names, default, {name: _thin_out(metrics.curve(name)) for name in selected}, _axes(metrics))


def _axes(metrics: MetricsFile) -> Table:
    """Return the other axes of curves, at `MOST_POINTS` steps at most."""
    count = len(metrics.steps)
    places = np.unique(np.linspace(0, count - 1, min(count, MOST_POINTS)).astype(np.int64))
    tokens = next((name for name in TOKENS if name in metrics.names), "")
    columns = {"time": metrics.values("time/step"), "tokens": metrics.values(tokens) if tokens else np.zeros(0)}
    sums = {name: np.nan_to_num(column).cumsum()[places] for name, column in columns.items() if column.any()}
    return Table({"step": np.array(metrics.steps, np.int64)[places], **sums})


def select_names(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Return the names that match a pattern, in the order of the patterns, each once."""
    return list(dict.fromkeys(name for pattern in patterns for name in names if fnmatchcase(name, pattern)))


def phase_times(reader: RunReader) -> Table:
    """Return the seconds of each phase of each step, and `other` for the rest of the step."""
    metrics = reader.metrics
    found = [name.removeprefix("time/") for name in metrics.names if name.startswith("time/")]
    phases = sorted({name for name in found if "/" not in name and name != "step"}, key=_place_of)
    columns = {name: np.nan_to_num(metrics.values(f"time/{name}")) for name in phases}
    total = metrics.values("time/step")
    rest = np.clip(total - sum(columns.values(), np.zeros(len(total))), 0.0, None)
    return Table({"step": metrics.steps, **columns, "other": rest, "total": total})


def list_steps(reader: RunReader) -> Table:
    """Return one row for each step that has metrics or trained on rollouts."""
    metrics = reader.metrics
    admitted = {entry.step: entry for entry in reader.index.admitted} if reader.has_journal else {}
    steps = sorted(set(metrics.steps) | admitted.keys())
    rollouts = [len(admitted[step].rollouts) if step in admitted else None for step in steps]
    versions = [admitted[step].version if step in admitted else None for step in steps]
    rows = np.searchsorted(np.array(steps, np.int64), np.array(metrics.steps, np.int64))
    columns = {name: _spread(metrics, name, rows, len(steps)) for name in STEP_COLUMNS if name in metrics.names}
    return Table({"step": steps, "rollouts": rollouts, "version": versions, **columns})


def _place_of(phase: str) -> tuple[int, str]:
    """Return the sort key of a phase; those of a supervised run come by name."""
    return (PHASES.index(phase) if phase in PHASES else len(PHASES), phase)


def _spread(metrics: MetricsFile, name: str, rows: NDArray[np.int64], count: int) -> NDArray[np.float64]:
    """Return a metric in the rows of a table that has more steps."""
    column = np.full(count, np.nan)
    column[rows] = metrics.values(name)
    return column


def _thin_out(curve: Curve) -> Curve:
    """Return a curve of at most `MOST_POINTS` points."""
    if len(curve) <= MOST_POINTS:
        return curve
    starts = np.linspace(0, len(curve), MOST_POINTS, endpoint=False).astype(np.int64)
    counts = np.diff(np.append(starts, len(curve)))
    return Curve(np.add.reduceat(curve.steps, starts) // counts, np.add.reduceat(curve.values, starts) / counts)
