"""Agents that score the model: their rollouts are tasks with ordinals of their own range."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from etude.recipes.collect.agent_source import AgentSource
from etude.recipes.collect.player import TurnSeeds
from etude.recipes.collect.rollouts import PlayedRollout, WantedRollout
from etude.records import SamplingParams, Task
from etude.store import Journal, Phase, TaskDropped, TaskState

FIRST_EVALUATION_ORDINAL = 2**40
"""From this ordinal on tasks are used only to score the model; no step trains on them."""
MOST_SAMPLES = 2**10
MOST_TASKS = 2**30
MOST_STEPS = 2**20
MAX_EVALUATIONS = 2**12
"""The most answers to one task, and answers in all, that score a step; the most steps; the number of distinct
evaluation ids."""
ADDED_FIELDS = ("prompt", "row", "ground_truth", "extra_info")
"""Fields that Etude adds to those of a task's file."""


def seed_ordinal(rollout: int) -> int:
    """Return the number that a rollout's seeds derive from. It is the same at any step, so the same weights give the
    same answers when they are scored."""
    return (
        rollout
        if rollout < FIRST_EVALUATION_ORDINAL
        else FIRST_EVALUATION_ORDINAL + (rollout - FIRST_EVALUATION_ORDINAL) % MOST_TASKS
    )


def task_prompt(fields: Mapping[str, Any]) -> Any:
    """Return the prompt of a task, or all its own fields if it has none."""
    prompt = fields.get("prompt")
    return prompt if prompt is not None else {name: fields[name] for name in fields if name not in ADDED_FIELDS}


class AgentPlayer:
    """Makes the attempts that score the model, as tasks with ordinals of their own range, dropped from training
    afterwards.

    Attempts that a stop cut off continue under the same ids: an answer that exists is not sampled again.
    """

    def __init__(self, agents: AgentSource, store: Journal, evaluation_id: str) -> None:
        """evaluation_id: the way of scoring; another id requests other rollouts."""
        self._agents = agents
        self._store = store
        self._edition = int.from_bytes(blake2b(evaluation_id.encode(), digest_size=8).digest(), "big") % MAX_EVALUATIONS
        self._step = 0
        self._num_samples: Counter[int] = Counter()

    def start_scoring(self, step: int) -> None:
        """Use the attempts that follow to score this step."""
        self._step = step
        self._num_samples.clear()

    def prompt_of(self, task: Task) -> object:
        """Return the prompt, or all fields of a task without one."""
        return task_prompt(task.fields)

    async def play(self, task: Task, sampling: SamplingParams, seeds: TurnSeeds) -> PlayedRollout:  # noqa: ARG002
        """Make one attempt. The endpoint decides its sampling parameters."""
        sample = self._num_samples[task.ordinal]
        self._num_samples[task.ordinal] += 1
        offset = task.ordinal * MOST_SAMPLES + sample
        ordinal = FIRST_EVALUATION_ORDINAL + (self._edition * MOST_STEPS + self._step) * MOST_TASKS + offset
        named = replace(task, ordinal=ordinal)
        wanted = WantedRollout(ordinal, named, 0)
        await self._agents.start([wanted], "val")
        played = await self._agents.result(wanted)
        with self._store.transaction() as writing:
            known = writing.state(TaskState, ordinal)
            if known is not None and known.phase is Phase.OPEN:
                writing.append([TaskDropped(ordinal, self._step, "it was asked to score the model")])
        return played
