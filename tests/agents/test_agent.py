"""Agents as users write them: their parameters, their return values, and the errors before anything runs."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import etude
from etude.agents.agent import LLM, FunctionAgent, RolloutInfo, as_agent, load_agent
from etude.agents.execution.processes import _pickle_spec
from etude.agents.execution.runner_process import RunnerSpec
from etude.agents.runner import RunnerTimeouts
from etude.errors import AgentError, PluginError
from etude.records import Task
from etude.store.journal.states import Status
from tests.agents.rollout_queues import AWAY, ENDPOINT, played, wanted


@etude.agent
def named(task: Task) -> float:
    """An agent at the top level, so that other processes find it."""
    return float(task["n"])


class Counting(etude.Agent):
    """An agent that counts the calls of its methods."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def setup(self) -> None:
        self.calls.append("setup")

    async def run(self, task: Task) -> int:
        self.calls.append("run")
        return len(self.calls)

    def teardown(self) -> None:
        self.calls.append("teardown")


def test_a_function_is_given_what_its_parameters_name() -> None:
    seen: dict[str, Any] = {}

    @etude.agent
    def agent(task: Task, llm: LLM, rollout: RolloutInfo, resources: Mapping[str, Any], more: int = 3) -> None:
        seen.update(task=task, llm=llm, rollout=rollout, resources=resources, more=more)

    assert played(agent, wanted(1)).only.status is Status.SUCCEEDED
    assert dict(seen["task"]) == {"n": 0} and seen["task"].get("m", 7) == 7 and "n" in seen["task"]
    assert (seen["llm"].base_url, seen["llm"].model) == (ENDPOINT["base_url"], "policy")
    assert seen["llm"].api_key and seen["llm"].api_key not in repr(seen["llm"])
    assert seen["rollout"].attempt == 0 and seen["rollout"].use == "train"
    assert seen["resources"]["endpoint"] == ENDPOINT and seen["more"] == 3


def test_a_missing_task_field_is_named_in_the_error() -> None:
    with pytest.raises(KeyError, match=r"task 4 has no field 'question'; it has n, m"):
        Task(4, {"n": 1, "m": 2})["question"]


@pytest.mark.parametrize(
    ("returned", "reward"),
    [(None, None), (2, 2.0), (True, 1.0), (np.float32(0.5), 0.5), ({"right": 1, "short": 0.25}, 1.25)],
)
def test_the_returned_value_is_the_reward(returned: Any, reward: float | None) -> None:
    @etude.agent
    async def waits(task: Task) -> Any:
        return returned

    @etude.agent
    def threaded(task: Task) -> Any:
        return returned

    @etude.agent
    def lends(task: Task) -> Any:
        return waits(task)  # a coroutine that the agent did not await

    for agent in (waits, threaded, lends):
        result = played(agent, wanted(1))
        assert result.only.status is Status.SUCCEEDED and result.rewards == [reward]
        if isinstance(returned, dict):
            assert result.only.last is not None and result.only.last.parts == {"right": 1.0, "short": 0.25}


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (float("nan"), "returned nan; a reward is finite"),
        ("0.5", "returned '0.5' of type str"),
        ({}, "returned an empty mapping"),
        ({"a": float("inf")}, "the part `a`, inf"),
        ({1: 2.0}, "a part named 1"),
        ({"a": 1e308, "b": 1e308}, "parts that add up to"),
        ([1.0], "of type list"),
    ],
)
def test_an_invalid_reward_fails_the_attempt_with_a_sentence(returned: Any, message: str) -> None:
    @etude.agent
    async def agent(task: Task) -> Any:
        return returned

    result = played(agent, wanted(1))
    assert result.only.status is Status.FAILED and message in result.error, result.error


def test_a_class_is_set_up_once_and_torn_down() -> None:
    agent = Counting()
    assert played(agent, wanted(3), max_concurrency=1).rewards == [2.0, 3.0, 4.0]
    assert agent.calls == ["setup", "run", "run", "run", "teardown"]


def test_an_unknown_parameter_is_refused_at_definition() -> None:
    with pytest.raises(
        AgentError, match=r"takes `question`, which no runner provides\. An agent.s parameters are among task, llm"
    ):

        @etude.agent
        def asks(task: Task, question: str) -> None: ...

    with pytest.raises(AgentError, match="by position only"):

        @etude.agent(timeout_s=3)
        def placed(task: Task, /) -> None: ...

    with pytest.raises(AgentError, match="yields"):

        @etude.agent
        def yields(task: Task) -> Any:
            yield 1

    with pytest.raises(AgentError, match="max_concurrency=0"):

        @etude.agent(max_concurrency=0)
        def none(task: Task) -> None: ...

    class Asks(etude.Agent):
        def run(self, tasks: Any) -> None: ...

    with pytest.raises(AgentError, match=r"Asks.run takes `tasks`"):
        Asks()


def test_variadic_parameters_get_no_additional_values() -> None:
    @etude.agent
    def agent(task: Task, *rest: Any, **others: Any) -> int:
        return len(rest) + len(others)

    assert played(agent, wanted(1)).rewards == [0.0]


def test_a_decorated_function_can_still_be_called() -> None:
    assert named(Task(0, {"n": 4})) == 4.0 and named.__name__ == "named" and "top level" in str(named.__doc__)


def test_an_agent_is_found_by_its_name(tmp_path: Path) -> None:
    assert load_agent("tests.agents.test_agent:named") is named
    assert isinstance(load_agent("tests.agents.test_agent:Counting"), Counting)
    file = tmp_path / "mine.py"
    file.write_text("def plain(task):\n    return 1.0\nnumber = 3\n")
    assert isinstance(load_agent(f"{file}:plain"), FunctionAgent)
    with pytest.raises(AgentError, match=r"is of type int\. An agent is a function"):
        load_agent(f"{file}:number")
    with pytest.raises(PluginError, match="Did you mean plain"):
        load_agent(f"{file}:plan")
    with pytest.raises(AgentError, match=r"Derive it from etude\.Agent, or give it `reset`"):
        as_agent(Path, "pathlib:Path")


def test_an_agent_goes_to_other_processes_by_its_name() -> None:
    assert pickle.loads(pickle.dumps(named)) is named and copy.copy(named) is named

    @etude.agent
    def inner(task: Task) -> None: ...

    with pytest.raises(AgentError, match="top level of a file"):
        pickle.dumps(inner)


def test_agents_of_a_file_go_to_other_processes_by_that_file(tmp_path: Path) -> None:
    """A new process knows nothing of the modules that were loaded here."""
    (tmp_path / "mine.py").write_text(
        "import etude\n"
        "def plain(task):\n    return 1.0\n"
        "@etude.agent\nasync def decorated(task):\n    return 1.0\n"
        "class Kind(etude.Agent):\n    def run(self, task):\n        return 1.0\n"
        "made = Kind()\n"
    )
    result = [load_agent(f"{tmp_path}/mine.py:{name}") for name in ("plain", "decorated", "made", "Kind")]
    packed = b"".join(
        _pickle_spec(RunnerSpec(agent, "http://127.0.0.1:1", "key", "runner", 1, RunnerTimeouts())) for agent in result
    )
    code = "import pickle, sys\nfor _ in range(4): print(pickle.load(sys.stdin.buffer).agent.title)"
    done = subprocess.run(
        [sys.executable, "-c", code], input=packed, capture_output=True, cwd=tmp_path.parent, timeout=60
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().split("\n")[:-1] == [agent.title for agent in result]


def test_no_client_is_imported_before_it_is_used() -> None:
    code = "import etude, sys; etude.agent; etude.command; etude.emit; import etude.agents.runner; "
    code += "print(*({'openai', 'fastapi', 'sqlalchemy', 'rich', 'httpx2'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_the_prepared_client_has_the_attempts_key() -> None:
    llm = LLM("http://127.0.0.1:1/v1", "key-of-this", "policy")
    client, other = llm.client, LLM("http://127.0.0.1:1/v1", "another", "policy").client
    assert client.api_key == "key-of-this" and other.api_key == "another"
    assert str(client.base_url) == "http://127.0.0.1:1/v1/"
    with pytest.raises(AgentError, match=r"`llm\.client`"):
        _ = llm.async_client


def test_without_the_package_the_url_is_there_and_the_client_raises() -> None:
    code = """
import sys
sys.modules["openai"] = None
from etude.agents import LLM
llm = LLM("http://here/v1", "key", "policy")
assert llm.base_url == "http://here/v1" and llm.api_key == "key"
from etude.errors import MissingPackageError
try:
    llm.client
except MissingPackageError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'etude[agents]'" in done.stdout


def test_a_result_without_a_reachable_model_is_an_infrastructure_error() -> None:
    """An agent that handles every error ends well, with a reward, without one answer of the model."""

    @etude.agent
    async def handles(llm: LLM) -> float:
        return 0.0

    @etude.agent
    async def needs_none() -> float:
        return 0.0

    assert played(handles, wanted(1)).only.status is Status.SUCCEEDED
    result = played(handles, wanted(1), endpoint=AWAY)
    assert result.only.status is Status.INFRA_ERROR and "could not be reached" in result.error
    assert played(needs_none, wanted(1), endpoint=AWAY).only.status is Status.SUCCEEDED
