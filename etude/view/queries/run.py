"""One run: its summary, its sessions, its checkpoints, its evaluations, and its options."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from etude.checkpoint.names import BEST, list_paths, step_of
from etude.errors import EtudeError
from etude.observe.step_history import MetricsFile
from etude.recipes.diagnosis import Evidence, RunFinding, diagnose
from etude.recipes.run.directory import CHECKPOINTS
from etude.recipes.run.resume.resume_command import describe_resume
from etude.recipes.run.resume.session_log import Session
from etude.tools.metric_curves import describe_missing_steps
from etude.view.queries.options import compare_options, find_preset
from etude.view.queries.runs import RunSummary, summarize
from etude.view.replies import Table
from etude.view.run_reader import RunReader

EVALUATED = ("eval/accuracy", "eval/loss")
"""The scores of supervised runs."""
ENDED_EARLY = ("killed", "stopped", "failed")


@dataclass(frozen=True)
class Mark:
    """An event that the curves show at a step."""

    step: int
    kind: str
    """`checkpoint`, `evaluation`, `resumed`, `stopped`, `failed` or `killed`."""
    text: str = ""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in the run's directory."""

    name: str
    step: int
    is_best: bool


@dataclass(frozen=True)
class RunPage:
    """The page of one run."""

    summary: RunSummary
    directory: Path
    preset: str
    """The preset that the run was started from, else the one whose options it has; empty if there is none."""
    options: Table
    sessions: list[Session]
    checkpoints: list[Checkpoint]
    marks: list[Mark]
    rollouts: int | None
    """The rollouts that steps trained on; None without a journal."""
    problems: list[str]
    """Sentences about files that could not be read."""
    findings: list[RunFinding]
    """The findings of `etude doctor RUN`, causes before what follows from them."""
    resume: str
    """A sentence that tells how to continue a run that has ended early; empty for any other."""


def read_run(reader: RunReader) -> RunPage:
    """Return the page of a run."""
    checkpoints = _checkpoints(reader.directory)
    rollouts = None
    sessions = reader.sessions
    problems: list[str] = []
    admitted = 0
    if reader.has_journal:
        try:
            rollouts = sum(len(step.rollouts) for step in reader.index.admitted)
            admitted = max((step.step for step in reader.index.admitted), default=0)
        except EtudeError as error:  # the rest of the page does not need the journal
            problems.append(str(error))
    if missing := describe_missing_steps(reader.metrics, admitted, sessions):
        problems.append(missing)
    preset = (sessions[0].preset if sessions else "") or find_preset(reader.options)
    summary = summarize(reader)
    return RunPage(
        summary,
        Path(reader.name) if reader.database else reader.directory,
        preset,
        compare_options(reader.options, preset),
        sessions,
        checkpoints,
        _marks(reader),
        rollouts,
        [*reader.problems, *problems],
        diagnose(Evidence(reader.metrics, reader.options)),
        _resume(reader) if summary.status in ENDED_EARLY and summary.recipe else "",
    )


def _resume(reader: RunReader) -> str:
    agent = reader.options.get("agent") or {}
    agents = [*filter(None, [agent.get("path")]), *(agent.get("sources") or {}).values()]
    directory = shlex.quote(str(reader.directory.absolute()))
    recipe = str(reader.options["recipe"])
    return describe_resume(recipe, directory, agents, has_store=bool(agent.get("store")))


def _checkpoints(directory: Path) -> list[Checkpoint]:
    """Return the checkpoints that exist, the oldest first."""
    folder = directory / CHECKPOINTS
    try:
        best = str(json.loads((folder / BEST).read_text(encoding="utf-8"))["name"])
    except (OSError, ValueError, KeyError, TypeError):
        best = ""
    return [Checkpoint(path.name, step_of(path), path.name == best) for path in list_paths(folder)]


def _marks(reader: RunReader) -> list[Mark]:
    """Return the events of a run by step: evaluations, saves, and the starts and ends of its sessions.

    Most checkpoints are removed again. The metrics of the step after a save have its seconds.
    """
    metrics, marks = reader.metrics, list[Mark]()
    steps = np.array(metrics.steps, np.int64)
    scores = [metrics.values(name) for name in metrics.names if name.startswith("eval/mean@") or name in EVALUATED]
    if scores:
        marks += [Mark(int(step), "evaluation") for step in steps[np.isfinite(np.stack(scores)).any(0)]]
    marks += [Mark(int(step) - 1, "checkpoint") for step in steps[np.isfinite(metrics.values("save_seconds"))]]
    sessions = reader.sessions
    for number, session in enumerate(sessions):
        if session.how in ("stopped", "failed"):
            marks.append(Mark(session.last_step or 0, session.how, session.message))
        elif session.how is None and number + 1 < len(sessions):
            marks.append(Mark(_last_step_before(metrics, sessions[number + 1].began_at), "killed"))
        if number + 1 < len(sessions):
            marks.append(Mark(sessions[number + 1].first_step, "resumed"))
    return sorted(marks, key=lambda mark: mark.step)


def _last_step_before(metrics: MetricsFile, at: float) -> int:
    """Return the last step whose metrics were written before a time; 0 if there is none."""
    earlier = np.flatnonzero(metrics.values("time") < at)
    return metrics.steps[earlier[-1]] if len(earlier) else 0
