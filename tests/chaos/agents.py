"""A short run of agents whose trainer or runners are killed again and again. The trainer has the rollout queue and the
endpoint.

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
from etude.store.journal.states import TaskState
from tests.chaos.scenario import KillPoint, RunKiller, reached
from tests.processes import gone
from tests.worlds import make_tasks

TASKS, GROUP, STEPS = 3, 4, 6
POINTS = ("calling", "judging", "admitted", "updated", "published", "evaluated", "checkpoint.renaming", "saved")
"""The points at which a process of the trainer may be killed. `calling` and `judging` are within a rollout: an agent on
a thread of the trainer has had an answer, or a rollout without a reward of its agent is judged."""
ANSWERS = ".answers"
"""The suffix of the file beside a run's directory with the answers that its agents were given."""
NO_KILL = KillPoint()
FIRST_ANSWER_S, LONG = 60.0, 600.0
"""Seconds that a process may take to its first answer, and an attempt to its end."""


@etude.agent
async def asks(task: Task, llm: LLM, rollout: RolloutInfo) -> float | None:
    """Have the model continue its own text, two or three times, and write down each answer."""
    text_so_far, headers = str(task["prompt"]), {"authorization": f"Bearer {llm.api_key}"}
    async with httpx2.AsyncClient(headers=headers, timeout=30, trust_env=False) as client:
        for turn in range(2 + rollout.id % 2):
            request = {"model": llm.model, "prompt": text_so_far, "max_tokens": 4}
            answer = await client.post(f"{llm.base_url}/completions", json=request)
            answer.raise_for_status()
            text = answer.json()["choices"][0]["text"]
            _noted(task, rollout, turn, text)
            text_so_far += f"{text}:"
    return _reward(text_so_far, rollout)


@etude.agent
async def asks_openai(task: Task, llm: LLM, rollout: RolloutInfo) -> float | None:
    """Do the same with OpenAI's client, which repeats calls that get no answer."""
    text, client = str(task["prompt"]), llm.async_client.with_options(max_retries=8)
    for turn in range(2 + rollout.id % 2):
        answer = await client.completions.create(model=llm.model, prompt=text, max_tokens=4)
        _noted(task, rollout, turn, answer.choices[0].text)
        text += f"{answer.choices[0].text}:"
    return _reward(text, rollout)


def _noted(task: Task, rollout: RolloutInfo, turn: int, text: str) -> None:
    line = {"pid": os.getpid(), "rollout": rollout.id, "attempt": rollout.attempt, "turn": turn, "text": text}
    with Path(task["answers"]).open("a") as file:  # one write, which is whole or not there
        file.write(json.dumps(line) + "\n")
    reached("calling")


def _reward(text: str, rollout: RolloutInfo) -> float | None:
    """Return the reward; for every third rollout none, which leaves it to the run's judge."""
    return None if rollout.id % 3 == 0 else digits_of(text)


def digits_of(text: str) -> float:
    """Return the share of digits in a text."""
    return sum(letter.isdigit() for letter in text) / max(len(text), 1)


def judges(task: Task, answer: str) -> float:
    """Return the reward of rollouts without one."""
    reached("judging")
    return digits_of(answer)


@dataclass(frozen=True)
class KillPlan:
    """The kills within one process of the trainer. Seconds count from the first answer that an agent is given in it."""

    end: KillPoint | float = NO_KILL
    """The end of the process: at a point, after so many seconds, or by default with the run."""
    runner_kills: tuple[float, ...] = ()
    """The times at which a runner is killed while the trainer goes on."""


@dataclass(frozen=True)
class AgentRunResult:
    """The result of a finished run of agents."""

    kills: int
    """Kills of the trainer."""
    runner_kills: int
    """Kills of runners while the trainer went on."""
    rows: dict[int, int]
    """The row of each task."""
    steps: dict[int, tuple[int, ...]]
    """The tasks that each step trained on, in order."""
    attempts: Counter[str]
    """The number of attempts by status."""
    seconds: float
    """Seconds that its last process took."""


class AgentRunKiller(RunKiller):
    """Runs agents, and kills their trainer and runners."""

    def run_agents(
        self,
        directory: Path,
        world: Path,
        plans: Sequence[KillPlan],
        external_runners: Sequence[int] = (),
        **changes: Any,
    ) -> AgentRunResult:
        """Start the run with these plans, one after the other, then let it finish, and check it. external_runners: the
        ids of runner processes that outlive the trainer."""
        kills, runner_kills, seconds = 0, 0, 0.0
        for plan in [*plans, KillPlan()]:
            began = time.perf_counter()
            kill, after = (plan.end, None) if isinstance(plan.end, KillPoint) else (KillPoint(), plan.end)
            watcher = _Watcher(plan, after, directory.with_suffix(ANSWERS), external_runners)
            options = options_of(directory, world, LONG + kills, **changes)
            finished = self.run_once(directory, world, kill, after and FIRST_ANSWER_S + after, watcher.watch, **options)
            seconds = time.perf_counter() - began
            runner_kills += watcher.runner_kills
            left = watcher.runners | {line["pid"] for line in recorded_answers(directory)}
            assert all(gone(pid) for pid in left - {*external_runners, os.getpid()}), "a runner outlived its trainer"
            if finished:
                break
            kills += 1
        else:
            raise AssertionError("the last process did not finish the run")
        return check_run(directory, kills, runner_kills, seconds)


class _Watcher:
    """Watches a trainer's process from outside, and kills it and its runners."""

    def __init__(self, plan: KillPlan, after: float | None, answers: Path, external_runners: Sequence[int]) -> None:
        self._plan, self._after, self._answers, self._external_runners = plan, after, answers, external_runners
        self._before = self._size()
        self.runners: set[int] = set()
        self.runner_kills = 0

    def watch(self, trainer: int) -> None:
        """Kill runners at their times, and the trainer at its own. Times count from its first answer."""
        if not self._plan.runner_kills and self._after is None:
            return
        _until(lambda: self._size() > self._before or not _alive(trainer), FIRST_ANSWER_S)
        began = time.monotonic()
        for after in sorted(self._plan.runner_kills):
            _until(lambda: not _alive(trainer), began + after - time.monotonic())
            runners = [pid for pid in (*children_of(trainer), *self._external_runners) if _alive(pid)]
            for pid in runners[:1] if _alive(trainer) else []:
                self.runners.add(pid)
                self.runner_kills += _killed(pid)
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
    """Kill a process with SIGKILL; return whether it existed."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        return True
    return False


def _alive(pid: int) -> bool:
    """Return whether a process runs."""
    return not gone(pid, 0.0)


def children_of(pid: int) -> list[int]:
    """Return the runner processes that a trainer has now."""
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
    """Return the answers that agents were given, as they wrote them down."""
    file = directory.with_suffix(ANSWERS)
    return [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")] if file.exists() else []


def options_of(directory: Path, world: Path, timeout: float, **changes: Any) -> dict[str, Any]:
    """Return the options of a run of agents; `agent.timeout` may differ in each process."""
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


def check_run(directory: Path, kills: int, runner_kills: int, seconds: float) -> AgentRunResult:
    """Check the journal of a finished run against the promises of every run."""
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
        attempts = Counter(str(attempt.status) for state in store.rollouts() for attempt in state.attempts)
        issued = [event for _, event in store.read(kinds=(TaskIssued,)) if isinstance(event, TaskIssued)]
        rows = {event.task: event.row for event in issued if event.use == "train"}
        trained = {step: tuple(sorted({store.rollout(id).task for id in ids})) for step, ids in admitted.items()}
    finally:
        store.close()
    steps = [json.loads(line)["step"] for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert sorted(set(steps)) == steps, "each step has one line"
    return AgentRunResult(kills, runner_kills, rows, trained, attempts, seconds)


def _ordered(derived: dict[tuple[str, int], Any]) -> list[Any]:
    return [state for _, state in sorted(derived.items())]


def _trained_on(store: Journal, step: int, state: RolloutState) -> None:
    """Check that a rollout was played to its end with the weights of the step that trained on it."""
    last = state.last
    assert last is not None and last.status is Status.SUCCEEDED and last.reward is not None and state.sealed
    turns = store.turns(state.id)
    assert [turn.index for turn in turns] == list(range(2 + state.id % 2)), "every answer, once and in order"
    assert {int(version) for turn in turns for version in turn.completion.version} == {step - 1}


def _every_answer_is_written(store: Journal, directory: Path) -> None:
    """Check that every answer that an agent was given is in the journal, word for word."""
    written = {
        (event.rollout, event.attempt, event.turn.index): event.turn.completion.text
        for _, event in store.read(kinds=(TurnRecorded,))
        if isinstance(event, TurnRecorded)
    }
    answers = recorded_answers(directory)
    assert answers
    for line in answers:
        assert written[line["rollout"], line["attempt"], line["turn"]] == line["text"]


def random_plans(count: int, seed: int, uninterrupted: AgentRunResult, *, kill_runners: bool) -> list[KillPlan]:
    """Return plans that end at a random time and at a point, in turn, each soon enough that many fit into one run.
    kill_runners: kill runners too."""
    chance = random.Random(seed)
    plans = []
    for number in range(count):
        after = chance.uniform(0.0, 0.2) * uninterrupted.seconds
        runner_kills = (chance.uniform(0.0, 0.2) * uninterrupted.seconds,) if kill_runners else ()
        plans.append(
            KillPlan(KillPoint(POINTS[(number // 2 + seed) % len(POINTS)]) if number % 2 else after, runner_kills)
        )
    return plans
