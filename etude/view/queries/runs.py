"""All runs in one table. Of each only its options, its sessions and the end of its metrics are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from etude.view.catalog import RunCatalog
from etude.view.queries.status import Status, find_status, written_at
from etude.view.replies import Table
from etude.view.run_reader import RunReader

SCORES = ("eval/mean@", "eval/accuracy", "eval/loss")
"""Beginnings of the names of the score that is shown, the first one that a run has."""


@dataclass(frozen=True)
class RunSummary:
    """One run in the table of runs."""

    run: str
    status: Status
    recipe: str
    model: str
    """The last part of its path."""
    step: int | None
    """The last step with metrics."""
    steps: int | None
    """The steps that were asked for."""
    reward: float | None
    loss: float | None
    score: float | None
    score_name: str
    began_at: float | None
    written_at: float
    message: str
    """The error that ended it, or what could not be read."""


def summarize(reader: RunReader) -> RunSummary:
    """Return the summary of a run."""
    options, sessions = reader.options, reader.sessions
    line = reader.latest
    step = line.get("step")
    steps = options.get("steps") if isinstance(options.get("steps"), int) else None
    score_name = next((name for start in SCORES for name in line if name.startswith(start)), "")
    problems = reader.problems
    return RunSummary(
        reader.name,
        find_status(reader.directory, sessions, step, steps),
        str(options.get("recipe", "")),
        _model_name(options),
        step,
        steps,
        line.get("reward"),
        line.get("loss"),
        line.get(score_name),
        score_name,
        sessions[0].began_at if sessions else None,
        written_at(reader.directory, sessions),
        (sessions[-1].message if sessions else "") or (problems[0] if problems else ""),
    )


def list_runs(catalog: RunCatalog) -> Table:
    """Return the summaries of all runs, the one that was written last first."""
    summaries = []
    for name in catalog.directories():
        with catalog.reader(name, briefly=True) as reader:
            summaries.append(summarize(reader))
    summaries.sort(key=lambda summary: -summary.written_at)
    names = [field.name for field in fields(RunSummary)]
    return Table({name: [getattr(summary, name) for summary in summaries] for name in names})


def _model_name(options: Mapping[str, Any]) -> str:
    model = options.get("model")
    path = model.get("path") if isinstance(model, Mapping) else None
    return Path(str(path)).name if path else ""
