"""Hooks: a runner calls them around each attempt, as a part of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import etude
from etude.agents.agent import Agent, RolloutInfo, load_agent
from etude.agents.runner import Runner
from etude.errors import AgentError
from etude.records import Task
from etude.store import RolloutState
from etude.store.journal.states import Status
from etude.store.queue.local_queue import LocalRolloutQueue
from etude.store.queue.rollout_queue import AttemptId, RolloutLimits
from tests.agents.rollout_queues import Played, ends, play, wanted
from tests.store.made import turn

HOOKS = """
import etude

seen = []


@etude.on("attempt_start")
def begin(task, rollout, resources):
    seen.append(("start", task["n"], rollout.id, resources["prompt"]))


@etude.on("turn")
async def prefer_short(turn, index):
    seen.append(("turn", index, len(turn.completion.ids)))
    etude.emit.reward(-0.5, turn=index)


@etude.on("attempt_end")
class Ended:
    def __init__(self, report, resources):
        seen.append(("end", report.outcome, report.reward, resources["prompt"]))


@etude.agent
async def solve(task, rollout):
    seen.append(("run",))
    await record(rollout)
    return 1.0
"""


def hooked(path: Path, source: str) -> tuple[Agent, dict[str, Any]]:
    """Return the agent `solve` of a file, and the names of that file."""
    path.write_text(source)
    agent = load_agent(f"{path}:solve")
    namespace = agent.namespace()
    assert isinstance(namespace, dict)
    return agent, namespace


def test_hooks_see_the_attempt_its_turns_and_its_report(tmp_path: Path) -> None:
    agent, names = hooked(tmp_path / "my_agent.py", HOOKS)

    states: list[RolloutState] = []
    rewards: list[float | None] = []

    async def watch(queue: LocalRolloutQueue, _: Runner) -> None:
        async def record(rollout: RolloutInfo) -> None:
            for seed in range(2):
                await queue.record_turn(AttemptId(rollout.id, rollout.attempt), turn(seed))
            await queue.put_resource("prompt", "another")

        names["record"] = record
        await queue.put_resource("prompt", "first")
        await queue.enqueue(wanted(1))
        states.extend(await ends(queue, 1))
        rewards.extend(each.reward for each in await queue.turns(states[0].id))

    asyncio.run(play(agent, [], meanwhile=watch))
    (state,) = states
    assert state.status is Status.SUCCEEDED and rewards == [-0.5, -0.5]
    lengths = [len(turn(seed).completion.ids) for seed in range(2)]
    assert names["seen"] == [
        ("start", 0, state.id, "first"),
        ("run",),
        ("turn", 0, lengths[0]),
        ("turn", 1, lengths[1]),
        ("end", "succeeded", 1.0, "first"),
    ], "an attempt keeps the resources that it was claimed with"


def play_source(tmp_path: Path, source: str, limits: RolloutLimits | None = None) -> tuple[Played, dict[str, Any]]:
    """Play one attempt of the agent in this source."""
    agent, names = hooked(tmp_path / "my_agent.py", f"import etude\nimport time\nseen = []\n{source}")
    options: dict[str, Any] = {} if limits is None else {"limits": limits}
    return asyncio.run(play(agent, wanted(1, **options))), names


FAILING = """
@etude.on("{event}")
def hook():
    raise ValueError("no luck")

@etude.agent
def solve(task):
    seen.append("run")
    return 1.0
"""


@pytest.mark.parametrize(("event", "ran"), [("attempt_start", []), ("attempt_end", ["run"])])
def test_an_error_of_a_hook_fails_the_attempt(tmp_path: Path, event: str, ran: list[str]) -> None:
    result, names = play_source(tmp_path, FAILING.format(event=event))
    assert result.only.status is Status.FAILED and "ValueError: no luck" in result.error
    assert names["seen"] == ran


def test_the_agents_own_error_stays_the_cause(tmp_path: Path) -> None:
    result, _ = play_source(
        tmp_path, FAILING.format(event="attempt_end").replace("return 1.0", "raise OSError('mine')")
    )
    assert "OSError: mine" in result.error and "no luck" not in result.error


def test_a_hook_is_within_the_attempts_time_limit(tmp_path: Path) -> None:
    source = FAILING.format(event="attempt_end").replace('raise ValueError("no luck")', "time.sleep(3)")
    result, _ = play_source(tmp_path, source, RolloutLimits(timeout_s=0.3, max_attempts=1))
    assert result.only.status is Status.TIMED_OUT


def test_methods_of_an_agent_are_hooks() -> None:
    class Counts(etude.Agent):
        def __init__(self) -> None:
            self.ended: list[float | None] = []

        def run(self, task: Task) -> float:
            return 2.0

        @etude.on("attempt_end")
        async def count(self, report: Any) -> None:
            self.ended.append(report.reward)

    agent = Counts()
    asyncio.run(play(agent, wanted(2)))
    assert agent.ended == [2.0, 2.0]


def test_a_hook_that_no_runner_can_call_is_refused() -> None:
    with pytest.raises(AgentError, match="no event 'attempt_begin'"):
        etude.on("attempt_begin")  # type: ignore[arg-type]
    with pytest.raises(AgentError, match="neither"):
        etude.on("turn")(etude.agent(lambda task: None))

    class Asks(etude.Agent):
        def run(self, task: Task) -> None: ...

        @etude.on("attempt_start")
        def begin(self, report: Any) -> None: ...

    with pytest.raises(AgentError, match=r"begin, a hook of `attempt_start`, takes `report`"):
        Runner(LocalRolloutQueue.__new__(LocalRolloutQueue), Asks())
