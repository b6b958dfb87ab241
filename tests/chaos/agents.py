"""A short run of agents that is killed again and again: its trainer, with rollout queue and endpoint, or its runners.
It must equal a run without kills in what an agent run promises: every task is trained once, with the weights of its
step, and no acknowledged write is lost.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

import etude
from etude.agents import LLM
from etude.agents.agent import RolloutInfo
from etude.records import Task
from etude.store import Journal, Phase, RolloutsAdmitted, RolloutState, Status, TaskIssued, TurnRecorded, open_store
from etude.store.states import TaskState
from tests.chaos.scenario import Life, Theatre, reached
from tests.processes import gone
from tests.worlds import make_tasks

TASKS, GROUP, STEPS = 3, 4, 6
POINTS = ("calling", "judging", "admitted", "updated", "published", "evaluated", "checkpoint.renaming", "saved")
"""Where a life of the trainer may end. At `calling` and `judging` it is amid a rollout: an agent on a thread of the
trainer's has had an answer, or one that gave itself no reward is judged."""
ANSWERS = ".answers"
"""Beside a run's directory: the answers that its agents were given."""
WHOLE = Life()
BEGUN_S, LONG = 60.0, 600.0
"""How long a life may take to its first answer, and an attempt to its end."""


@etude.agent
async def asks(task: Task, llm: LLM, rollout: RolloutInfo) -> float | None:
    """Has the model go on with what it said, two or three times, and writes down each answer that it was given."""
    said, headers = str(task["prompt"]), {"authorization": f"Bearer {llm.api_key}"}
    async with httpx2.AsyncClient(headers=headers, timeout=30, trust_env=False) as client:
        for turn in range(2 + rollout.id % 2):
            asked = {"model": llm.model, "prompt": said, "max_tokens": 4}
            answer = await client.post(f"{llm.base_url}/completions", json=asked)
            answer.raise_for_status()
            text = answer.json()["choices"][0]["text"]
            _noted(task, rollout, turn, text)
            said += f"{text}:"
    return _paid(said, rollout)


@etude.agent
async def asks_openai(task: Task, llm: LLM, rollout: RolloutInfo) -> float | None:
    """The same by OpenAI's own client, which asks again where nobody answers."""
    text, client = str(task["prompt"]), llm.async_client.with_options(max_retries=8)
    for turn in range(2 + rollout.id % 2):
        answer = await client.completions.create(model=llm.model, prompt=text, max_tokens=4)
        _noted(task, rollout, turn, answer.choices[0].text)
        text += f"{answer.choices[0].text}:"
    return _paid(text, rollout)


def _noted(task: Task, rollout: RolloutInfo, turn: int, text: str) -> None:
    line = {"pid": os.getpid(), "rollout": rollout.id, "attempt": rollout.attempt, "turn": turn, "text": text}
    with Path(task["answers"]).open("a") as file:  # one write, which is whole or not there
        file.write(json.dumps(line) + "\n")
    reached("calling")


def _paid(said: str, rollout: RolloutInfo) -> float | None:
    """What it earned; every third leaves that to the run's own judge."""
    return None if rollout.id % 3 == 0 else digits_of(said)


def digits_of(text: str) -> float:
    """The share of digits in a text."""
    return sum(letter.isdigit() for letter in text) / max(len(text), 1)


def judges(task: Task, answer: str) -> float:
    """The reward of those that gave themselves none."""
    reached("judging")
    return digits_of(answer)


@dataclass(frozen=True)
class Act:
    """One life of the trainer. Seconds count from the first answer that an agent is given in it."""

    end: Life | float = WHOLE
    """At a point, or after so many seconds; by default with the run."""
    falls: tuple[float, ...] = ()
    """When a runner is killed, while the trainer goes on."""


@dataclass(frozen=True)
class Played:
    """What came of a run of agents that is done."""

    kills: int
    """Of the trainer."""
    falls: int
    """Of runners, while the trainer went on."""
    rows: dict[int, int]
    """The row that each task is."""
    steps: dict[int, tuple[int, ...]]
    """The tasks that each step trained on, in order."""
    attempts: Counter[str]
    """How attempts ended."""
    seconds: float
    """How long its last life took."""


class Company(Theatre):
    """Plays runs of agents."""

    def perform(
        self, directory: Path, world: Path, acts: Sequence[Act], elsewhere: Sequence[int] = (), **changes: Any
    ) -> Played:
        """The run with these acts, and then let go on to its end; held against its laws. elsewhere: the processes of
        runners that are not the trainer's, and outlive it."""
        kills, falls, seconds = 0, 0, 0.0
        for act in [*acts, Act()]:
            began = time.perf_counter()
            life, after = (act.end, None) if isinstance(act.end, Life) else (Life(), act.end)
            seen = _Seen(act, after, directory.with_suffix(ANSWERS), elsewhere)
            options = options_of(directory, world, LONG + kills, **changes)
            whole = self.live(directory, world, life, after and BEGUN_S + after, seen.watch, **options)
            seconds = time.perf_counter() - began
            falls += seen.falls
            left = seen.runners | {line["pid"] for line in recorded_answers(directory)}
            assert all(gone(pid) for pid in left - {*elsewhere, os.getpid()}), "a runner outlived its trainer"
            if whole:
                break
            kills += 1
        else:
            raise AssertionError("the last life of the run did not come to its end")
        return examined(directory, kills, falls, seconds)


class _Seen:
    """What is seen of a life from outside, and done to it."""

    def __init__(self, act: Act, after: float | None, answers: Path, elsewhere: Sequence[int]) -> None:
        self._act, self._after, self._answers, self._elsewhere = act, after, answers, elsewhere
        self._before = self._size()
        self.runners: set[int] = set()
        self.falls = 0

    def watch(self, trainer: int) -> None:
        """Kill runners at their times, and the trainer at its own; times are from its first answer on."""
        if not self._act.falls and self._after is None:
            return
        _until(lambda: self._size() > self._before or not _alive(trainer), BEGUN_S)
        began = time.monotonic()
        for after in sorted(self._act.falls):
            _until(lambda: not _alive(trainer), began + after - time.monotonic())
            there = [pid for pid in (*children_of(trainer), *self._elsewhere) if _alive(pid)]
            for pid in there[:1] if _alive(trainer) else []:
                self.runners.add(pid)
                self.falls += _killed(pid)
        if self._after is not None:
            _until(lambda: not _alive(trainer), began + self._after - time.monotonic())
            self.runners.update(children_of(trainer))
            _killed(trainer)

    def _size(self) -> int:
        return self._answers.stat().st_size if self._answers.exists() else 0


def _until(true: Callable[[], bool], within: float) -> None:
    end = time.monotonic() + within
    while not true() and time.monotonic() < end:
        time.sleep(0.01)


def _killed(pid: int) -> bool:
    """Kill -9; whether there was anybody."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        return True
    return False


def _alive(pid: int) -> bool:
    """Whether a process runs."""
    return not gone(pid, 0.0)


def children_of(pid: int) -> list[int]:
    """The runner processes that a trainer has now."""
    result = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if (
                int(parent) == pid
                and state != "Z"
                and b"execution.runner_process" in (stat.parent / "cmdline").read_bytes()
            ):
                result.append(int(stat.parent.name))
    return sorted(result)


def recorded_answers(directory: Path) -> list[dict[str, Any]]:
    """The answers that agents were given, as they wrote them down."""
    file = directory.with_suffix(ANSWERS)
    return [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")] if file.exists() else []


def options_of(directory: Path, world: Path, timeout: float, **changes: Any) -> dict[str, Any]:
    """The options of a run of agents; `agent.timeout` may be another in each life."""
    tasks = directory.with_suffix(".jsonl")
    if not tasks.exists():
        rows = [json.loads(line) for line in make_tasks(tasks, 24).read_text().splitlines()]
        answers = str(directory.with_suffix(ANSWERS))
        tasks.write_text("".join(json.dumps(row | {"answers": answers}) + "\n" for row in rows))
    return {
        "data.train": f"[{tasks}]",
        "data.val": f"[{tasks}]",
        "data.sampler": "shuffled",
        "evaluate.every": 3,
        "evaluate.limit": 3,
        "reward.path": f"{__name__}:judges",
        "collect.tasks": TASKS,
        "collect.group_size": GROUP,
        "collect.refill": 0,
        "collect.retries": 9,
        "checkpoint.every": 2,
        "steps": STEPS,
        "agent.path": f"{__name__}:asks",
        "agent.runners": 2,
        "agent.max_concurrency": 4,
        "agent.heartbeat_timeout": 3.0,
        "agent.timeout": timeout,
        **changes,
    }


def examined(directory: Path, kills: int, falls: int, seconds: float) -> Played:
    """What the journal says of a run that is done, held against what every such run has to keep."""
    store = open_store(directory / "journal.sqlite", read_only=True)
    try:
        admitted = store.admitted()
        assert sorted(admitted) == list(range(1, STEPS + 1)), "each step trained"
        assert sum(1 for _ in store.read(kinds=(RolloutsAdmitted,))) == STEPS, "and once"
        assert not store.rollouts(Phase.QUEUED, Phase.RUNNING), "nothing is left open"
        for step, ids in admitted.items():
            for id in ids:
                _trained_on(store, step, store.rollout(id))
        _every_answer_is_written(store, directory)
        derived = store.replay()
        assert [*store.rollouts()] == [state for state in _ordered(derived) if isinstance(state, RolloutState)]
        assert [*store.tasks()] == [state for state in _ordered(derived) if isinstance(state, TaskState)]
        attempts = Counter(str(each.status) for state in store.rollouts() for each in state.attempts)
        issued = [event for _, event in store.read(kinds=(TaskIssued,)) if isinstance(event, TaskIssued)]
        rows = {event.task: event.row for event in issued if event.task < 2**40}
        trained = {step: tuple(sorted({store.rollout(id).task for id in ids})) for step, ids in admitted.items()}
    finally:
        store.close()
    steps = [json.loads(line)["step"] for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert sorted(set(steps)) == steps, "each step is told of once"
    return Played(kills, falls, rows, trained, attempts, seconds)


def _ordered(derived: dict[tuple[str, int], Any]) -> list[Any]:
    return [state for _, state in sorted(derived.items())]


def _trained_on(store: Journal, step: int, state: RolloutState) -> None:
    """A rollout that a step trained on was played to its end with the weights of that step."""
    last = state.last
    assert last is not None and last.status is Status.SUCCEEDED and last.reward is not None and state.sealed
    turns = store.turns(state.id)
    assert [turn.index for turn in turns] == list(range(2 + state.id % 2)), "every answer, once and in order"
    assert {int(version) for turn in turns for version in turn.completion.version} == {step - 1}


def _every_answer_is_written(store: Journal, directory: Path) -> None:
    """Every answer that an agent was given is in the journal, word for word."""
    written = {
        (event.rollout, event.attempt, event.turn.index): event.turn.completion.text
        for _, event in store.read(kinds=(TurnRecorded,))
        if isinstance(event, TurnRecorded)
    }
    answers = recorded_answers(directory)
    assert answers
    for line in answers:
        assert written[line["rollout"], line["attempt"], line["turn"]] == line["text"]


def some_acts(count: int, seed: int, whole: Played, *, falls: bool) -> list[Act]:
    """Lives that end at any time and at points, in turn, each soon enough that many fit into one run. falls: runners
    are killed too."""
    chance = random.Random(seed)
    acts = []
    for number in range(count):
        after = chance.uniform(0.0, 0.2) * whole.seconds
        fallen = (chance.uniform(0.0, 0.2) * whole.seconds,) if falls else ()
        acts.append(Act(Life(POINTS[(number // 2 + seed) % len(POINTS)]) if number % 2 else after, fallen))
    return acts
