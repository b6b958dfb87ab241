"""The steps that `metrics.jsonl` lacks, compared with the journal and the sessions of its run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from etude.errors import EtudeError
from etude.observe.jsonl import METRICS_FILE
from etude.observe.step_history import MetricsFile
from etude.recipes.run.directory import JOURNAL
from etude.recipes.run.session_log import SESSIONS, Session, read_sessions
from etude.store import open_store


def check_steps(directory: Path, metrics: MetricsFile) -> list[str]:
    """Return a sentence for each problem of a run's journal, and for steps that the metrics lack."""
    file, admitted = directory / JOURNAL, 0
    problems: list[str] = []
    if file.is_file():
        try:
            with closing(open_store(file, read_only=True)) as journal:
                admitted = max(journal.admitted(), default=0)
        except EtudeError as error:  # the metrics do not need the journal
            problems.append(str(error))
    missing = describe_missing_steps(metrics, admitted, read_sessions(directory))
    return [*problems, missing] if missing else problems


def describe_missing_steps(metrics: MetricsFile, admitted: int, sessions: Sequence[Session]) -> str:
    """Return a sentence if a run has finished steps that are not in its metrics; otherwise an empty text.

    admitted: the last step in the journal. Its metrics are written when it ends, so it may be the next step.
    """
    finished = (sessions[-1].last_step or 0) if sessions else 0
    if metrics.last_step >= max(admitted - 1, finished):
        return ""
    source, steps = (JOURNAL, admitted) if admitted >= finished else (SESSIONS, finished)
    return f"{METRICS_FILE} ends at step {metrics.last_step}; {source} has {steps} steps."
