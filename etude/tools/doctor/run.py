"""`etude doctor RUN`: find the reasons why a run does not learn, with their evidence and the options that help."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from rich.text import Text

from etude.config.env import etude_command
from etude.errors import EtudeError
from etude.observe import format_number, make_console
from etude.observe.jsonl import METRICS_FILE
from etude.observe.step_history import MetricsFile
from etude.recipes.diagnosis import RULES, Evidence, RunFinding, diagnose
from etude.recipes.diagnosis.evidence import TaskRewards
from etude.recipes.run.directory import JOURNAL, OPTIONS, read_options
from etude.recipes.run.resume.session_log import read_sessions
from etude.store import Journal, RolloutState, TaskState, open_store
from etude.tools.doctor.finding import count
from etude.tools.metric_curves import check_steps
from etude.tools.rollout_reader import RewardGetter, reward_of_options
from etude.tools.run_images import missing_images

SEVERE = 0.75
"""The severity from which a finding is printed in red."""


@dataclass(frozen=True)
class ExaminedRun:
    """A run with its findings, the worst first."""

    directory: Path
    steps: int
    """The steps that have metrics."""
    findings: list[RunFinding]
    problems: list[str]
    """The sentences about files that could not be read in full."""
    failure: str = ""
    """The error that ended the run; empty if none did."""

    @property
    def is_healthy(self) -> bool:
        """True if no error ended the run, and no rule found anything."""
        return not self.findings and not self.failure

    def page(self, finding: RunFinding) -> str:
        """Return the viewer's page with the curves of a finding, behind the address that `etude view` prints."""
        metrics = ",".join(finding.numbers)
        return f"run?{urlencode({'run': self.directory.resolve().name, 'metrics': metrics})}"

    def to_dict(self) -> dict[str, Any]:
        """Return the findings as plain data."""
        findings = [asdict(finding) | {"page": self.page(finding)} for finding in self.findings]
        return {
            "run": str(self.directory),
            "steps": self.steps,
            "healthy": self.is_healthy,
            "failure": self.failure,
            "findings": findings,
            "problems": self.problems,
        }


def is_run(directory: Path) -> bool:
    """Return whether a directory holds a run."""
    return any((directory / name).is_file() for name in (OPTIONS, METRICS_FILE))


def examine(directory: Path) -> ExaminedRun:
    """Apply all rules to a run, as far as its files can be read."""
    metrics = MetricsFile(directory / METRICS_FILE)
    metrics.refresh()
    problems = [*filter(None, [metrics.problem]), *check_steps(directory, metrics)]
    options: Mapping[str, Any] = {}
    try:
        options = read_options(directory)
    except (EtudeError, OSError) as error:
        problems.append(f"Rules that need an option find nothing: {error}")
    if options.get("recipe") == "train" and metrics.last_step and not (directory / JOURNAL).is_file():
        problems.append(f"{JOURNAL} is missing, which held the rollouts of the run.")
    tasks, damage = _read_journal(directory / JOURNAL, options)
    problems += damage
    steps = sum(step > 0 for step in metrics.steps)
    if not steps:
        problems.append(f"{METRICS_FILE} has no step, so no rule could find anything.")
    sessions = read_sessions(directory)
    failure = sessions[-1].message if sessions and sessions[-1].how == "failed" else ""
    return ExaminedRun(directory, steps, diagnose(Evidence(metrics, options, tasks)), problems, failure)


def _read_journal(path: Path, options: Mapping[str, Any]) -> tuple[list[TaskRewards], list[str]]:
    """Return the rewards of each row, and the sentences about images that are missing and about damage."""
    if not path.is_file():
        return [], []
    try:
        with closing(open_store(path, read_only=True)) as store:
            return read_task_rewards(store, reward_of_options(options)), _find_missing_images(store)
    except EtudeError as error:
        return [], [f"The tasks and the images of {JOURNAL} cannot be checked: {error}"]


def _find_missing_images(store: Journal) -> list[str]:
    missing = missing_images(store)
    if not missing:
        return []
    digest, place = next(iter(missing.items()))
    return [
        f"{JOURNAL} lacks {count(len(missing), 'image')} that it names, the first {digest} of {place}: such rollouts "
        "can be neither trained on again nor replayed. Bring the file back from a copy, with its -wal file."
    ]


def read_task_rewards(store: Journal, reward_of: RewardGetter) -> list[TaskRewards]:
    """Return the rewards of each row that training used as a task, by row. Rollouts without a reward do not count."""
    rows = {task.id: (task.source, task.row) for task in store.iter_states(TaskState, use="train")}
    rewards: dict[tuple[str, int], list[float]] = defaultdict(list)
    tasks: dict[tuple[str, int], set[int]] = defaultdict(set)
    for state in store.iter_states(RolloutState, use="train"):
        reward = reward_of(state)
        if reward is not None:
            rewards[rows[state.task]].append(reward)
            tasks[rows[state.task]].add(state.task)
    return [
        TaskRewards(*row, max(tasks[row]), len(tasks[row]), len(earned), min(earned), max(earned))
        for row, earned in sorted(rewards.items())
    ]


def show_examined(examined: ExaminedRun) -> None:
    """Print each finding with its evidence, its remedy and its page."""
    console = make_console()
    if examined.failure:
        console.print(Text.assemble("The run ended with an error: ", (examined.failure, "bold red")), soft_wrap=True)
    for problem in examined.problems:
        console.print(Text(problem, "yellow"), soft_wrap=True)
    for finding in examined.findings:
        style = "bold red" if finding.severity >= SEVERE and not finding.cause else "yellow"
        console.print(Text.assemble((finding.rule, style), ": ", finding.what), soft_wrap=True)
        numbers = ", ".join(f"{name} {format_number(value)}" for name, value in finding.numbers.items())
        console.print(Text(f"    evidence: steps {finding.first} to {finding.last}: {numbers}"), soft_wrap=True)
        console.print(Text(f"    remedy:   {finding.remedy}"), soft_wrap=True)
        console.print(Text(f"    page:     {examined.page(finding)}"), soft_wrap=True)
    counted = f"{len(RULES)} rules, {count(examined.steps, 'step')}"
    if not examined.findings:
        if examined.steps:
            console.print(Text(f"No finding: {counted}."), soft_wrap=True)
        return
    found = f"\n{count(len(examined.findings), 'finding')}, causes before their consequences: {counted}."
    viewer = f"`{etude_command()} view {examined.directory}` shows the pages."
    console.print(Text(f"{found} {viewer}"), soft_wrap=True)
