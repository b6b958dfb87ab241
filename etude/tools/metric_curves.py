"""The metrics of a run, read from `metrics.jsonl`.

A run that was killed and resumed may have written steps twice. If the step number goes back, the later lines replace
the earlier ones from that step on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.errors import ConfigError
from etude.observe.jsonl import NON_METRIC_FIELDS, read_steps

__all__ = ["Curve", "RunCurves", "read_curves"]

FILE = "metrics.jsonl"


@dataclass(frozen=True)
class Curve:
    """One metric of one run, at the steps where it is finite."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True)
class RunCurves:
    """All curves of one run by metric name, in the order of their first step."""

    directory: Path
    curves: dict[str, Curve]


def read_curves(directory: Path) -> RunCurves:
    """Read the metrics of a run directory."""
    path = directory / FILE
    if not path.is_file():
        raise ConfigError(_missing(directory))
    lines: list[dict[str, Any]] = []
    for line in read_steps(path):
        while lines and lines[-1]["step"] >= line["step"]:
            lines.pop()
        lines.append(line)
    names = dict.fromkeys(name for line in lines for name in line if name not in NON_METRIC_FIELDS)
    curves = {name: _curve(name, lines) for name in names}
    curves = {name: curve for name, curve in curves.items() if len(curve)}
    if not curves:
        raise ConfigError(f"{path} has no metrics yet. Wait until the run has finished its first step.")
    return RunCurves(directory, curves)


def _curve(name: str, lines: Sequence[dict[str, Any]]) -> Curve:
    points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
    steps, values = zip(*points, strict=True) if points else ((), ())
    return Curve(np.array(steps, np.int64), np.array(values, np.float64))


def _missing(directory: Path) -> str:
    """Return the error sentence for a directory without metrics, with the runs to name instead."""
    if not directory.exists():
        return f"There is no run {directory} (seen from {Path.cwd()}). Name the directory that a run printed."
    if not directory.is_dir():
        return f"{directory} is a file. Name the directory of a run, which has a {FILE}."
    runs = sorted(path.parent.name for path in directory.glob(f"*/{FILE}"))
    if runs:
        listed = ", ".join(runs[:8]) + (", …" if len(runs) > 8 else "")
        return f"{directory} is not a run; it has {len(runs)} runs: {listed}. Name one of them, or {directory}/*."
    return f"{directory} has no {FILE}: no run has begun there. Name the directory of a run."
