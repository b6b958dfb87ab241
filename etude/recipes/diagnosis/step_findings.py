"""The worst new finding of a run, for the line under the line of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from etude.observe import RunInfo, get_logger
from etude.observe.jsonl import METRICS_FILE
from etude.observe.step_history import MetricsFile, StepHistory
from etude.recipes.diagnosis import Evidence, diagnose

WORSE = 0.2
"""Increase of the severity from which a finding is shown again."""
GONE_STEPS = 20
"""Steps without a finding after which it is shown again."""


class StepFindings:
    """The rules of `etude doctor RUN`, applied to each step.

    A finding is shown when it begins, and again when it gets worse. Of several, each step shows the worst one that is
    new. One that follows from another is not shown. An error in a rule is logged, and no rule is applied from then on.
    """

    def __init__(self) -> None:
        self._history: StepHistory = StepHistory()
        self._options: Mapping[str, Any] = {}
        self._shown: dict[str, float] = {}
        """The severity of each finding when it was last shown."""
        self._seen: dict[str, int] = {}
        """The last step with each finding."""
        self._failed = False

    def open(self, run: RunInfo) -> None:
        """Read the steps of earlier starts of the run."""
        self._options = run.config
        self._history = MetricsFile(run.directory / METRICS_FILE)
        self._history.refresh()

    def note(self, step: int, values: Mapping[str, float], *, late: bool = False) -> str:
        """Add the values of a step, and return the worst new finding as a sentence; empty if there is none."""
        if self._failed:
            return ""
        try:
            self._history.add(step, values, late=late)
            return self._worst_new()
        except Exception as error:  # a rule must not end the console's output
            self._failed = True
            get_logger("recipes").warning(
                "The rules of `etude doctor` failed, and are not applied to steps: %s.", error
            )
            return ""

    def _worst_new(self) -> str:
        worst, step = None, self._history.steps[-1]
        findings = diagnose(Evidence(self._history, self._options))
        for finding in (finding for finding in findings if not finding.cause):
            if step - self._seen.get(finding.rule, step) > GONE_STEPS:
                del self._shown[finding.rule]
            shown = self._shown.get(finding.rule)
            if worst is None and (shown is None or finding.severity >= shown + WORSE):
                worst = finding
                self._shown[finding.rule] = finding.severity
            if finding.rule in self._shown:
                self._seen[finding.rule] = step
        return f"{worst.rule}: {worst.what} Try: {worst.remedy}" if worst else ""
