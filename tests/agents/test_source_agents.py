"""An agent for each data source: each plays its own tasks, with its own hooks, set-up and limits."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest

from etude.agents.agent import Agent, load_agent
from etude.agents.execution.processes import ProcessRunners
from etude.agents.runner import Runner
from etude.agents.source_agents import (
    AGENTS_RESOURCE,
    SourceAgents,
    describe_agents,
    join_names,
    load_agents,
    split_names,
)
from etude.errors import AgentError
from etude.records import Task
from etude.store import open_store
from etude.store.http.server import serve
from etude.store.journal.states import Status
from etude.store.queue.local_queue import LocalRolloutQueue
from etude.store.queue.rollout_queue import RolloutLimits, RolloutQuery, RolloutRequest
from tests.agents.execution.test_threads import through
from tests.agents.rollout_queues import ONCE, QUICK, played

SHOP = """
import etude

seen = []


@etude.on("attempt_start")
def begin(task):
    seen.append(("start", task.source))


class Shop(etude.Agent):
    max_concurrency = 2
    timeout_s = 0.3

    def setup(self):
        seen.append(("setup",))

    def run(self, task):
        return {"bought": 2.0}

    async def teardown(self):
        seen.append(("teardown",))
"""
SLOW = """
import asyncio


async def solve(task):
    await asyncio.sleep(task.fields.get("s", 0))
    return 3.0
"""


def tasks(*sources: str, **fields: Any) -> list[RolloutRequest]:
    return [RolloutRequest(Task(n, {"n": n, **fields}, source), limits=ONCE) for n, source in enumerate(sources)]


def write_agents(directory: Path) -> dict[str, str]:
    """Write two agents, and return their names by data source."""
    for name, source in (("shop", SHOP), ("slow", SLOW)):
        (directory / f"{name}.py").write_text(source)
    return {
        "shop": f"{directory}/shop.py:Shop",
        "mall": f"{directory}/shop.py:Shop",
        "talk": f"{directory}/slow.py:solve",
    }


def test_each_agent_plays_its_tasks_with_its_own_hooks_and_limits(tmp_path: Path) -> None:
    names = write_agents(tmp_path)
    agent = load_agents(None, names)
    assert agent is not None and agent.title == "shop=Shop, mall=Shop, talk=solve"
    (shop, talk, _) = agent.members()
    assert agent.max_concurrency == 2
    result = played(agent, tasks("shop", "talk", "mall", s=0.5))
    assert result.rewards == [2.0, 3.0, 2.0], "the limit of the shop is not that of the talk"
    assert shop.namespace()["seen"] == [("setup",), ("start", "shop"), ("start", "mall"), ("teardown",)]
    assert talk.title == "solve"


def test_each_runner_has_its_own_agents(tmp_path: Path) -> None:
    agent = load_agents(None, write_agents(tmp_path))
    assert agent is not None
    copied = copy.copy(agent)
    assert copied.members()[0] is not agent.members()[0] and len(copied.members()) == 3
    assert copied.of_task(Task(0, {}, "shop")) is copied.of_task(Task(0, {}, "mall")) is copied.members()[0]


def test_other_tasks_go_to_the_agent_without_a_source_or_are_answered_once(tmp_path: Path) -> None:
    names = write_agents(tmp_path)
    agent = load_agents(names.pop("talk"), names)
    assert agent is not None and played(agent, tasks("maths")).rewards == [3.0]
    alone = load_agents(None, names)
    assert alone is not None
    result = played(alone, tasks("maths"))
    assert result.only.status is Status.FAILED
    assert "A task of the data source `maths` is answered once, and has no prompt" in result.error


def test_a_set_up_that_fails_tears_down_those_before_it(tmp_path: Path) -> None:
    class Broken(Agent):
        def setup(self) -> None:
            raise OSError("no index")

        def run(self) -> float:
            return 0.0

    shop = load_agent(write_agents(tmp_path)["shop"])
    with pytest.raises(AgentError, match="The agent Broken could not be set up: OSError: no index"):
        played(SourceAgents({"shop": shop, "maths": Broken()}), tasks("shop"))
    assert shop.namespace()["seen"] == [("setup",), ("teardown",)]


@pytest.mark.slow
def test_agents_of_files_play_in_other_processes(tmp_path: Path) -> None:
    agent = load_agents(None, write_agents(tmp_path))
    assert agent is not None
    queue = LocalRolloutQueue(open_store())
    with (
        serve(queue, queue.keyring) as server,
        ProcessRunners(agent, server.url, queue.keyring.runner, logs=tmp_path / "logs", timeouts=QUICK) as runners,
    ):
        states = through(queue, tasks("shop", "talk"))
        runners.check()
    assert [state.last.total for state in states if state.last] == [2.0, 3.0]
    asyncio.run(queue.close())


def test_a_runner_without_an_agent_of_the_run_gives_its_tasks_back_and_ends(tmp_path: Path) -> None:
    names = write_agents(tmp_path)

    async def refuse(queue: LocalRolloutQueue, path: str | None, sources: dict[str, str], message: str) -> None:
        agent = load_agents(path, sources)
        assert agent is not None
        with pytest.raises(AgentError, match=message):
            await Runner(queue, agent, timeouts=QUICK).run()

    async def refuse_all() -> None:
        queue = LocalRolloutQueue(open_store())
        await queue.put_resource(AGENTS_RESOURCE, describe_agents(names, others=True))
        (id,) = await queue.enqueue([RolloutRequest(Task(0, {}, "shop"), limits=RolloutLimits(max_attempts=1))])
        lacking = "has an agent for the data source `shop`, and this runner has none"
        await refuse(queue, names["talk"], {}, lacking)
        shown = r"for the data source `mall`.*`etude runner shop=… mall=… talk=…`"
        await refuse(queue, names["talk"], {name: names[name] for name in ("shop", "talk")}, shown)
        await refuse(queue, None, names, "an agent for all other data sources, and this runner has none")
        await queue.put_resource(AGENTS_RESOURCE, describe_agents(["digits"], others=False, only_here=True))
        await refuse(queue, names["talk"], names, "A hub's program plays tasks of the run's mix, which its own runners")
        (state,) = (await queue.find(RolloutQuery(ids=(id,)))).rollouts
        assert state.status is Status.QUEUED and len(state.attempts) == 4
        await queue.close()

    asyncio.run(refuse_all())


def test_the_words_of_a_command_name_agents_and_their_sources(tmp_path: Path) -> None:
    (tmp_path / "x=1.py").touch()
    alone = f"{tmp_path}/x=1.py:other"
    words = ["shop=a.py:solve", "openai/gsm8k=b.py:Game", alone]
    assert split_names(words) == (alone, {"shop": "a.py:solve", "openai/gsm8k": "b.py:Game"})
    assert split_names(join_names(*split_names(words))) == split_names(words)
    with pytest.raises(AgentError, match=r"Two agents are given, a\.py:b and c\.py:d, and no data source"):
        split_names(["a.py:b", "c.py:d"])
