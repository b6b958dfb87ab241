"""Rules about single tasks, whose rewards are compared over the times that the run used them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from etude.recipes.diagnosis.evidence import Evidence, RunFinding, TaskRewards

FEWEST_TIMES, FEWEST_ANSWERS = 2, 16
"""Groups and answers of a task from which it counts."""
FEWEST_TASKS = 3
NEVER_SHARE, ALWAYS_SHARE = 0.1, 0.25
"""Shares of the tasks from which those that never earn, or always earn everything, are a finding."""
NAMED_TASKS = 3


def tasks_never_earn(evidence: Evidence) -> Iterator[RunFinding]:
    """Find tasks whose answers all had the lowest reward of their data source."""
    tasks = _repeated(evidence)
    never = [task for task in tasks if task.most == evidence.reward_ranges[task.source][0]]
    if len(never) < max(FEWEST_TASKS, NEVER_SHARE * len(tasks)):
        return
    what = (
        f"{_count(never, tasks)} have never earned more than {_rewards(task.most for task in never)}, in "
        f"{sum(task.answers for task in never)} answers: {_name(never)}."
    )
    remedy = (
        "Read them in `etude view RUN`. If an answer is right, correct the expected answer of its row, or the reward. "
        "If the model cannot do them, leave such rows out, give partial credit, or set `data.sampler=curriculum`."
    )
    yield _finding(evidence, what, remedy, 0.3 + 0.5 * len(never) / len(tasks))


def tasks_always_earn(evidence: Evidence) -> Iterator[RunFinding]:
    """Find tasks whose answers all had the highest reward of their data source."""
    tasks = _repeated(evidence)
    always = [task for task in tasks if task.least == evidence.reward_ranges[task.source][1]]
    if len(always) < max(FEWEST_TASKS, ALWAYS_SHARE * len(tasks)):
        return
    what = (
        f"{_count(always, tasks)} have earned {_rewards(task.least for task in always)} with each of their "
        f"{sum(task.answers for task in always)} answers, and teach nothing: {_name(always)}."
    )
    remedy = "`data.sampler=curriculum` lets such rows pause. Or leave them out, and add harder tasks."
    yield _finding(evidence, what, remedy, 0.2 + 0.4 * len(always) / len(tasks))


def _repeated(evidence: Evidence) -> list[TaskRewards]:
    """Return the tasks with enough answers, but those of data sources whose answers all had the same reward."""
    if not len(evidence.series("reward")):
        return []
    differ = {source for source, (least, most) in evidence.reward_ranges.items() if least < most}
    tasks = (task for task in evidence.tasks if task.source in differ)
    return [task for task in tasks if task.times >= FEWEST_TIMES and task.answers >= FEWEST_ANSWERS]


def _rewards(values: Iterable[float]) -> str:
    return " or ".join(f"{value:g}" for value in sorted(set(values)))


def _count(found: Sequence[TaskRewards], tasks: Sequence[TaskRewards]) -> str:
    return f"{len(found)} of {len(tasks)} tasks that came {FEWEST_TIMES} times or more"


def _name(found: Sequence[TaskRewards]) -> str:
    named = ", ".join(f"task {task.newest} (row {task.row})" for task in found[:NAMED_TASKS])
    return named + (", …" if len(found) > NAMED_TASKS else "")


def _finding(evidence: Evidence, what: str, remedy: str, severity: float) -> RunFinding:
    level = evidence.series("zero_variance_share")
    return evidence.series("reward").finding(what, remedy, severity, **({level.name: level.mean} if len(level) else {}))
