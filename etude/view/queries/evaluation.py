"""One evaluation: the scores of a step by data source, and the answers that were scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etude.errors import NotFoundError
from etude.recipes.collect.evaluation_player import evaluation_tasks, find_evaluations
from etude.store import PolicyEvaluated, RolloutState, TaskState
from etude.view.queries.step import first_prompts, rollout_rows, rollout_table
from etude.view.replies import Table
from etude.view.run_reader import RunReader

MOST_ANSWERS = 200
"""Answers in one reply."""
ALL = "all"
"""The name of all data sources together."""


OF_TRAINING = ("task", "sample", "in_batch", "advantage", "staleness", "why")
"""Columns of rollouts that those of an evaluation do not need."""


@dataclass(frozen=True)
class EvaluationPage:
    """The scores of a step, and some of the answers that were scored."""

    step: int
    steps: list[int]
    """The evaluated steps before and after it, where they exist."""
    scores: Table
    """A row for all answers and, of several data sources, one for each; empty until all answers are scored."""
    sources: list[str]
    count: int
    """The answers, of the data source that was asked for."""
    first: int
    """The place of the first answer of the table among them."""
    answers: Table


def read_evaluation(reader: RunReader, step: int | None = None, source: str = "", first: int = 0) -> EvaluationPage:
    """Return the evaluation of a step, by default of the last one. source: only the answers to its tasks. first: the
    place where the answers begin."""
    found = find_evaluations(reader.journal)
    steps = sorted(found)
    if not steps:
        raise NotFoundError(f"The run '{reader.name}' has no evaluation yet. `data.val` names the tasks to score on.")
    chosen = steps[-1] if step is None else step
    if chosen not in found:
        listed = ", ".join(map(str, steps[-20:]))
        raise NotFoundError(f"The run '{reader.name}' has no evaluation of step {chosen}; it has those of {listed}.")
    tasks = evaluation_tasks(reader.journal, found[chosen])
    sources = list(dict.fromkeys(task.source for task in tasks))
    wanted = [task for task in tasks if source in ("", task.source)]
    position = steps.index(chosen)
    return EvaluationPage(
        chosen,
        [*steps[max(0, position - 1) : position], *steps[position + 1 : position + 2]],
        _score_table(_read_scores(reader, chosen), tasks),
        sources,
        len(wanted),
        first,
        _answer_table(reader, wanted[first : first + MOST_ANSWERS]),
    )


def _read_scores(reader: RunReader, step: int) -> Mapping[str, float]:
    """Return the scores of a step as they were measured last; empty until then."""
    events = [event for _, event in reader.journal.read(kinds=(PolicyEvaluated,))]
    found = [event.scores for event in events if isinstance(event, PolicyEvaluated) and event.step == step]
    return found[-1] if found else {}


def _score_table(scores: Mapping[str, float], tasks: Sequence[TaskState]) -> Table:
    """Return a row for each source that has scores. scores: by `eval/NAME` and `eval/SOURCE/NAME`."""
    named = [(path.removeprefix("eval/").rpartition("/"), value) for path, value in scores.items()]
    rows: dict[str, dict[str, float]] = {}
    for (source, _, name), value in named:
        rows.setdefault(source, {})[name] = value
    asked = {source: [task for task in tasks if source in ("", task.source)] for source in rows}
    names = dict.fromkeys(name for _, _, name in (path for path, _ in named))
    return Table(
        {
            "source": [source or ALL for source in rows],
            "tasks": [len({task.row for task in asked[source]}) for source in rows],
            "answers": [len(asked[source]) for source in rows],
            **{name: [row.get(name) for row in rows.values()] for name in names},
        }
    )


def _answer_table(reader: RunReader, tasks: Sequence[TaskState]) -> Table:
    by_id = {task.id: task for task in tasks}
    states = reader.journal.load_states(RolloutState, [id for task in tasks for id in task.rollouts])
    rollouts = [states[id] for task in tasks for id in task.rollouts if id in states]
    rows = rollout_rows(reader, rollouts, by_id, None, whole=True)
    prompts = first_prompts(reader, rows, by_id)
    known = {name: values for name, values in rollout_table(rows).columns.items() if name not in OF_TRAINING}
    asked: dict[str, Sequence[Any]] = {
        "row": [by_id[row.state.task].row for row in rows],
        "source": [by_id[row.state.task].source for row in rows],
        "prompt": [prompts[row.state.task] for row in rows],
    }
    return Table({"rollout": known.pop("rollout"), **asked, **known})
