"""Rollouts that score the model: they are requested as those of a step are, and have `use` "val"."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from hashlib import blake2b
from itertools import takewhile
from typing import Any

from etude.errors import CollectionError
from etude.recipes.collect.player import TurnSeeds
from etude.recipes.collect.requested import RequestedRollouts
from etude.recipes.collect.rollouts import PlayedRollout
from etude.records import SamplingParams, Task
from etude.store import Journal, Phase, TaskDropped, TaskState
from etude.store.journal.events import EvaluationNumbered
from etude.store.queue.rollout_queue import RolloutPurpose, RolloutRequest

_FIRST_ORDINAL = 2**40
"""The first ordinal of the tasks that score the model, beyond those that a run can train on. Whether a task does is its
`use`; no other file knows this number."""
MOST_SAMPLES = 2**10
MOST_TASKS = 2**30
MOST_STEPS = 2**20
MAX_EVALUATIONS = 2**12
"""The most answers to one task, and answers in all, that score a step; the most steps; the number of distinct
evaluation ids."""
ADDED_FIELDS = ("prompt", "row", "ground_truth", "extra_info")
"""Fields that Etude adds to those of a task's file."""


def evaluated_answer(ordinal: int) -> tuple[int, int]:
    """Return the row of the tasks that score the model, and the number of the answer to it, of such an ordinal."""
    return divmod(ordinal % MOST_TASKS, MOST_SAMPLES)


def seed_number(rollout: int, use: RolloutPurpose) -> int:
    """Return the number that a rollout's seeds derive from. One that scores the model has the same at any step, so the
    same weights give the same answers when they are scored."""
    return rollout if use == "train" else _FIRST_ORDINAL + rollout % MOST_TASKS


def task_prompt(fields: Mapping[str, Any]) -> Any:
    """Return the prompt of a task, or all its own fields if it has none."""
    prompt = fields.get("prompt")
    return prompt if prompt is not None else {name: fields[name] for name in fields if name not in ADDED_FIELDS}


class EvaluationPlayer:
    """Makes the attempts that score the model as tasks of the run's journal, of use "val". They are closed afterwards,
    and no step trains on them.

    Attempts that a stop cut off continue under the same ids: an answer that exists is not sampled again.
    """

    def __init__(
        self,
        requested: RequestedRollouts,
        store: Journal,
        evaluation_id: str,
        on_start: Callable[[int], None] = lambda _: None,
    ) -> None:
        """evaluation_id: the way of scoring; another id requests other rollouts. on_start: called with each step that
        is scored, before its rollouts are requested."""
        self._requested = requested
        self._on_start = on_start
        self._store = store
        self._evaluation_id = evaluation_id
        self._number: int | None = None
        self._step = 0
        self._num_samples: Counter[int] = Counter()

    def start_scoring(self, step: int) -> None:
        """Use the attempts that follow to score this step."""
        self._on_start(step)
        self._step = step
        self._num_samples.clear()

    def end_scoring(self) -> None:
        """Drop the tasks of this step from training."""
        first = self._first_ordinal()
        ordinals = [first + row * MOST_SAMPLES + n for row, count in self._num_samples.items() for n in range(count)]
        with self._store.transaction() as writing:
            states = [writing.state(TaskState, ordinal) for ordinal in ordinals]
            writing.append(
                [
                    TaskDropped(state.id, self._step, "it was asked to score the model")
                    for state in states
                    if state is not None and state.phase is Phase.OPEN
                ]
            )

    async def store_images(self, task: Task) -> Task:
        """Store the images of a task for `play`, and return it without their bytes."""
        return await self._requested.store_images(task)

    def prompt_of(self, task: Task) -> object:
        """Return the prompt, or all fields of a task without one."""
        return task_prompt(task.fields)

    async def play(self, task: Task, sampling: SamplingParams, seeds: TurnSeeds) -> PlayedRollout:  # noqa: ARG002
        """Make one attempt. Its runner has the sampling parameters and the seeds."""
        if task.ordinal >= MOST_TASKS // MOST_SAMPLES:
            raise CollectionError(
                f"`data.val` has more than {MOST_TASKS // MOST_SAMPLES:,} tasks. Score on fewer: `evaluate.limit`."
            )
        sample = self._num_samples[task.ordinal]
        self._num_samples[task.ordinal] += 1
        ordinal = self._first_ordinal() + task.ordinal * MOST_SAMPLES + sample
        request = RolloutRequest(replace(task, ordinal=ordinal), 0, ordinal, "val")
        await self._requested.start([request])
        return await self._requested.result(request)

    def _first_ordinal(self) -> int:
        if self._number is None:
            self._number = evaluation_number(self._store, self._evaluation_id)
        return _FIRST_ORDINAL + (self._number * MOST_STEPS + self._step) * MOST_TASKS


def evaluation_number(store: Journal, evaluation_id: str) -> int:
    """Return the number of a way of scoring in a run, and record it if it is new.

    It follows from the id, so that a journal which was restored from an earlier copy gives the same one. The record
    keeps two ids with the same hash apart.
    """
    numbered = [event for _, event in store.read(kinds=(EvaluationNumbered,))]
    taken = {event.number: event.evaluation for event in numbered if isinstance(event, EvaluationNumbered)}
    if len(taken) >= MAX_EVALUATIONS and evaluation_id not in taken.values():
        raise CollectionError(
            f"The run was scored in {MAX_EVALUATIONS:,} ways, with other options, data or code each, and no run can be "
            "scored in more. Begin a new run."
        )
    number = int.from_bytes(blake2b(evaluation_id.encode(), digest_size=8).digest(), "big") % MAX_EVALUATIONS
    while taken.get(number, evaluation_id) != evaluation_id:
        number = (number + 1) % MAX_EVALUATIONS
    if number not in taken:
        store.append([EvaluationNumbered(evaluation_id, number)])
    return number


def find_evaluations(store: Journal) -> dict[int, int]:
    """Return the first ordinal of the tasks that scored each step, by step. Of several ways of scoring, the newest one
    counts."""
    numbered = [event for _, event in store.read(kinds=(EvaluationNumbered,))]
    ways = [event.number for event in numbered if isinstance(event, EvaluationNumbered)]
    found: dict[int, tuple[int, int]] = {}
    after = _FIRST_ORDINAL - 1
    while (task := next(store.iter_states(TaskState, after, use="val"), None)) is not None:
        first = task.id - task.id % MOST_TASKS
        number, step = divmod((first - _FIRST_ORDINAL) // MOST_TASKS, MOST_STEPS)
        age = ways.index(number) if number in ways else -1
        found[step] = max(found.get(step, (age, first)), (age, first))
        after = first + MOST_TASKS - 1
    return {step: first for step, (_, first) in found.items()}


def evaluation_tasks(store: Journal, first: int) -> list[TaskState]:
    """Return the tasks that scored a step, by row and by answer. first: their first ordinal."""
    tasks = store.iter_states(TaskState, first - 1, use="val")
    return list(takewhile(lambda task: task.id < first + MOST_TASKS, tasks))
