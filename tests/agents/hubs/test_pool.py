"""Guests: real processes that play environments, answer, hang, flood, break the protocol and die."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from etude.agents.hubs.pool import HubEnv, HubPool
from etude.agents.hubs.process import HubSpec
from etude.errors import ConfigError, EnvError, GuestLostError, HubError
from etude.protocols import Observation
from etude.records import Message, Task, ToolCall
from tests.waits import blocked_until, until

T = TypeVar("T")
ODD = f"{Path(__file__).with_name('odd_env.py')}:Odd"
TASK = Task(0, {"prompt": [{"role": "user", "content": "count"}], "seed": 3})


def spec_of(what: str = ODD, python: Path | str = sys.executable, **more: Any) -> HubSpec:
    return HubSpec("trl", what, Path(python), **{"options": {}, "max_turns": 4, **more})


def calling(name: str, **arguments: Any) -> Message:
    return Message("assistant", "", tool_calls=(ToolCall("c1", name, json.dumps(arguments)),))


def within(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(seconds):
            return await work

    return asyncio.run(bounded())


async def played(pool: HubPool, *answers: Message) -> list[Observation]:
    """Play one rollout, and close its environment."""
    await pool.wait_ready()
    env = pool.new_env()
    try:
        shown = [await env.reset(TASK)]
        for answer in answers:
            shown.append(await env.step(answer))
    finally:
        await env.close()
    return shown


def script(directory: Path, body: str) -> Path:
    """Write a guest that is no guest of ours, in place of the hub's Python."""
    file = directory / "guest"
    file.write_text(
        f"#!{sys.executable}\nimport json, os, sys, time\nfirst = json.loads(sys.stdin.readline())\n{body}\n"
    )
    file.chmod(0o755)
    return file


# -- environments that behave ------------------------------------------------------------------------------------------


def test_a_factory_of_trl_is_played_through_its_tools() -> None:
    with HubPool(spec_of(options={"start": 2}), 1) as pool:
        first, second, last = within(60, played(pool, calling("add", number=4, times=2), Message("assistant", "done")))
    assert first.content == [{"role": "user", "content": "count=5"}]
    schema = next(tool["function"] for tool in first.tools if tool["function"]["name"] == "add")
    assert schema["description"] == "Add a number." and schema["parameters"] == {
        "type": "object",
        "properties": {
            "number": {"type": "integer", "description": "the number"},
            "times": {"type": "integer", "description": "how often"},
        },
        "required": ["number"],
    }
    assert second.content == [{"role": "tool", "content": "13", "tool_call_id": "c1", "name": "add"}]
    assert last.done and last.reward == pytest.approx(1.3) and not last.truncated


def test_the_last_answer_that_is_allowed_gets_the_reward() -> None:
    with HubPool(spec_of(max_turns=2), 1) as pool:
        *_, last = within(60, played(pool, calling("add", number=1), calling("add", number=1)))
    assert last.truncated and not last.done and last.reward == pytest.approx(0.5)


def test_an_error_of_a_tool_is_shown_to_the_model() -> None:
    with HubPool(spec_of(), 1) as pool:
        _, raised, unknown = within(60, played(pool, calling("raise_error"), calling("fly")))
    assert raised.content[0]["content"].startswith("Error: `raise_error` raised ValueError")
    assert unknown.content[0]["content"].startswith("Error: there is no tool `fly`. The tools are: add, ")


def test_many_rollouts_share_a_few_guests() -> None:
    async def many(pool: HubPool) -> list[float | None]:
        answers = (calling("add", number=1), Message("assistant", ""))
        games = await asyncio.gather(*(played(pool, *answers) for _ in range(300)))
        return [game[-1].reward for game in games]

    with HubPool(spec_of(), 2) as pool:
        assert within(120, many(pool)) == [pytest.approx(0.4)] * 300


def test_what_an_environment_prints_is_no_part_of_the_protocol() -> None:
    with HubPool(spec_of(), 1) as pool:
        _, shown = within(60, played(pool, calling("flood")))
    assert shown.content[0]["content"] == "flooded"


# -- environments that fail --------------------------------------------------------------------------------------------


def test_a_value_that_is_no_json_fails_its_rollout_only() -> None:
    with HubPool(spec_of(), 1) as pool:
        with pytest.raises(HubError, match="the hub gave a value that is no JSON: Out of range float"):
            within(60, played(pool, calling("add", number=100), Message("assistant", "")))
        assert within(60, played(pool))[0].content


def test_a_task_that_is_no_json_fails_its_rollout_only() -> None:
    async def both(pool: HubPool) -> Observation:
        beside = pool.new_env()
        await beside.reset(TASK)
        wrong = pool.new_env()
        with pytest.raises(HubError, match="it was to be sent a value that is no JSON"):
            await wrong.reset(Task(1, {**TASK.fields, "seed": float("nan")}))
        await wrong.close()
        shown = await beside.step(calling("add", number=1))
        await beside.close()
        return shown

    with HubPool(spec_of(), 1) as pool:
        assert within(60, both(pool)).content[0]["content"] == "4"


def test_a_rollout_that_is_cancelled_as_it_begins_leaves_nothing_in_its_guest() -> None:
    """Its event loop was busy, so that it has not seen yet that it has a guest."""

    async def cancelled(pool: HubPool) -> None:
        beginning = asyncio.create_task(pool.new_env().reset(TASK))
        await asyncio.sleep(0)
        blocked_until(lambda: any(pool._sessions.values()))
        beginning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await beginning
        await until(lambda: not any(pool._sessions.values()))

    with HubPool(spec_of(), 1) as pool:
        within(60, cancelled(pool))


@pytest.mark.parametrize("way", ["hang", "spin"])
def test_a_call_that_hangs_ends_where_its_caller_gives_up(way: str) -> None:
    """Its guest plays on for its other rollouts, and takes no further ones."""

    async def both(pool: HubPool) -> tuple[HubEnv, HubEnv]:
        await pool.wait_ready()
        beside = pool.new_env()
        await beside.reset(TASK)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await played(pool, calling(way))
        later = pool.new_env()
        await later.reset(TASK)
        assert (await beside.step(calling("add", number=1))).content[0]["content"] == "4"
        return beside, later

    async def closed(pool: HubPool) -> None:
        beside, later = await both(pool)
        pids = [env._place[0]._process.pid for env in (beside, later)]
        assert pids[0] != pids[1]
        await beside.close()
        await until(lambda: not is_running(pids[0]))
        await later.close()

    with HubPool(spec_of(), 1) as pool:
        within(90, closed(pool))


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_guest_that_dies_is_replaced() -> None:
    with HubPool(spec_of(), 1) as pool:
        with pytest.raises(GuestLostError, match=r"ended \(exit code 7\)\. Its standard error ended with:\ndying now"):
            within(60, played(pool, calling("die")))
        assert within(60, played(pool))[0].content


def test_a_guest_has_no_more_memory_than_it_may_have() -> None:
    with HubPool(spec_of(memory_mb=600), 1) as pool:
        shown = within(60, played(pool, calling("grow", megabytes=100), calling("grow", megabytes=1000)))
    assert [each.content[0]["content"] for each in shown[1:]] == ["100", "Error: `grow` raised MemoryError: "]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (
            "print(json.dumps({'protocol': 0, 'ready': 'x'}), flush=True); time.sleep(60)",
            "speaks another protocol",
        ),
        ("print('hello', flush=True); time.sleep(60)", "wrote a line that is no JSON: 'hello'"),
        ("sys.exit(3)", r"ended \(exit code 3\)"),
        ("sys.stdout.write('x' * (70 << 20)); sys.stdout.flush(); time.sleep(60)", "a line of more than 32 MiB"),
    ],
)
def test_a_guest_that_never_begins_ends_the_run(tmp_path: Path, body: str, sentence: str) -> None:
    with pytest.raises(EnvError, match=sentence):
        HubPool(spec_of(python=script(tmp_path, body)), 1).__enter__()


TWICE = """
print(json.dumps({"protocol": 1, "ready": "x"}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if "id" in request:
        answer = json.dumps({"id": request["id"], "result": %s})
        print(answer, flush=True); time.sleep(0.1); print(answer, flush=True)
"""


def test_a_guest_that_answers_twice_is_killed(tmp_path: Path) -> None:
    guest = script(tmp_path, TWICE % '{"content": "x"}')
    with (
        HubPool(spec_of(python=guest), 1) as pool,
        pytest.raises(GuestLostError, match="that no request waits for"),
    ):
        within(60, played(pool, *[Message("assistant", "")] * 50))


def test_an_answer_without_a_number_is_no_answer(tmp_path: Path) -> None:
    body = TWICE.replace('"id": request["id"]', '"id": [request["id"]]') % "None"
    with (
        HubPool(spec_of(python=script(tmp_path, body)), 1) as pool,
        pytest.raises(GuestLostError, match="that no request waits for"),
    ):
        within(20, played(pool))


def test_an_answer_that_is_no_observation_is_a_failure(tmp_path: Path) -> None:
    guest = script(tmp_path, TWICE % '{"view": "x"}')
    with HubPool(spec_of(python=guest), 1) as pool, pytest.raises(HubError, match="which is no observation"):
        within(60, played(pool))


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("nowhere.py:Odd", "There is no file .*nowhere.py"),
        (ODD.replace(":Odd", ":Even"), "has no class or function `Even`"),
        ("no_such_module:Odd", "needs the package no_such_module, which .* does not have"),
    ],
)
def test_an_environment_that_is_not_there_is_refused(what: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        HubPool(spec_of(what), 1).__enter__()


def test_a_python_that_cannot_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be run \(No such file or directory\). Name a Python"):
        HubPool(spec_of(python=tmp_path / "python"), 1).__enter__()


def test_tasks_of_a_hub_that_has_none_are_refused() -> None:
    with HubPool(spec_of(), 1) as pool, pytest.raises(HubError, match="has no tasks"):
        pool.tasks(0, 3)


# -- the end -----------------------------------------------------------------------------------------------------------

PARENT = """
import sys, time
from tests.agents.hubs.test_pool import *
pool = HubPool(spec_of(), 2).__enter__()
async def busy():
    env = pool.new_env()
    await env.reset(TASK)
    print(*[guest._process.pid for guest in pool._sessions], flush=True)
    await env.step(calling("spin"))
asyncio.run(busy())
"""


@pytest.mark.slow
def test_guests_end_with_their_parent(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert pids
    time.sleep(0.5)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    blocked_until(lambda: not any(map(is_running, pids)))
