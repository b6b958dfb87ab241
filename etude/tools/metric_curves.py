"""The curves of a run's metrics, the latest value of each, and the steps that they lack."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.errors import ConfigError, EtudeError
from etude.observe.jsonl import METRICS_FILE, LinePosition, parse_step_line, read_new_lines
from etude.observe.step_history import Curve, MetricsFile
from etude.recipes.run.directory import JOURNAL
from etude.recipes.run.resume.session_log import SESSIONS, Session, describe_wait, read_sessions
from etude.store import open_store

DEFAULT_METRICS = (
    "reward",
    "expected_reward",
    "eval/mean@*",
    "eval/maj@*",
    "loss",
    "eval/loss",
    "accuracy",
    "eval/accuracy",
    "margin",
    "eval/margin",
    "entropy",
    "policy_kl",
    "kl",
    "mismatch/k3",
    "mismatch/rollout_effective_sample_size",
    "zero_variance_share",
    "staleness/mean",
    "answer_length",
    "truncated",
    "grad_norm",
    "moe/load_max",
    "moe/router_entropy",
    "sampled_tokens_per_second",
    "trained_tokens_per_second",
    "time/step",
)
"""The metrics that are drawn by default, if the runs have them: names, with `*` for any characters."""
TAIL_BYTES = 2**16
"""Bytes at the end of a file in which the latest metrics are searched."""


@dataclass(frozen=True)
class RunCurves:
    """All curves of one run by metric name, in the order of their first step."""

    directory: Path
    curves: dict[str, Curve]
    problem: str
    """Sentences about files that are damaged; empty if there are none."""


def read_curves(directory: Path) -> RunCurves:
    """Read the metrics of a run directory."""
    path = directory / METRICS_FILE
    if not path.is_file():
        raise ConfigError(describe_missing(directory))
    file = MetricsFile(path)
    file.refresh()
    curves = {name: file.curve(name) for name in file.names if name != "time"}
    curves = {name: curve for name, curve in curves.items() if len(curve)}
    if not curves:
        advice = describe_wait(directory)
        raise ConfigError(
            f"The run in {directory} has not finished its first step yet. {advice} {file.problem}".rstrip()
        )
    problems = [*filter(None, [file.problem]), *check_steps(directory, file)]
    return RunCurves(directory, curves, " ".join(problems))


class LatestMetrics:
    """The latest value of each metric of a run, with `step` and `time` of its last line; empty without a step.

    The first refresh reads the end of the file alone, and each later one the lines that are new.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / METRICS_FILE
        self._known: tuple[LinePosition, dict[str, Any]] = LinePosition(), {}
        """The position after the lines that are read, and their values."""

    def refresh(self) -> dict[str, Any]:
        """Return the latest values. Any thread may call this."""
        known, latest = self._known
        try:
            lines, position, is_other = read_new_lines(self._path, known, TAIL_BYTES)
        except OSError:
            return {}
        latest = {} if is_other else dict(latest)
        for text in lines:
            line = parse_step_line(text) or {}
            late = bool(line.get("late"))
            latest |= {name: value for name, value in line.items() if not late or name not in ("step", "time")}
        latest.pop("nonfinite", None)
        latest.pop("late", None)
        self._known = position, latest
        return latest


def describe_missing(directory: Path) -> str:
    """Return the error sentence for a directory without metrics, with the runs to name instead."""
    if not directory.exists():
        return f"There is no run {directory} (seen from {Path.cwd()}). Name the directory that a run printed."
    if not directory.is_dir():
        return f"{directory} is a file. Name the directory of a run, which has a {METRICS_FILE}."
    runs = sorted(path.parent.name for path in directory.glob(f"*/{METRICS_FILE}"))
    if runs:
        listed = ", ".join(runs[:8]) + (", …" if len(runs) > 8 else "")
        return f"{directory} is not a run; it has {len(runs)} runs: {listed}. Name one of them, or {directory}/*."
    return f"{directory} has no {METRICS_FILE}: no run has started there. Name the directory of a run."


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
