"""Commands as agents: programs in any language, their limits, and the end of all their processes."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import etude
from etude.agents.command import Command
from etude.agents.runner import Runner
from etude.errors import AgentError
from etude.store.journal.states import Status
from etude.store.queue.local_queue import LocalRolloutQueue
from etude.store.queue.rollout_queue import AttemptId, Claim, RolloutLimits
from tests.agents.rollout_queues import AWAY, ENDPOINT, Played, played, wanted
from tests.processes import gone
from tests.waits import skip_time, until


def ran(
    line: str | list[str],
    *,
    count: int = 1,
    fields: dict[str, Any] | None = None,
    endpoint: Mapping[str, str] = ENDPOINT,
    meanwhile: Callable[[LocalRolloutQueue, Runner], Awaitable[None]] | None = None,
    **options: Any,
) -> Played:
    """Play a command."""
    program, rollouts = etude.command(line, **options), wanted(count, fields=fields)
    return played(program, rollouts, endpoint=endpoint, meanwhile=meanwhile)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_shell_command_line_is_an_agent() -> None:
    result = ran("""read -r task; echo "saw $task"; echo '{"reward": {"a": 0.5, "b": 0.25}}'""", count=3)
    assert [state.status for state in result.states] == [Status.SUCCEEDED] * 3
    assert result.rewards == [0.75] * 3
    assert result.events[2][0]["name"] == "output"
    assert result.events[2][0]["data"]["stdout"].startswith('saw {"n": 2}\n')


@pytest.mark.parametrize(
    ("task", "reads"),
    [
        ("stdin", "json.load(sys.stdin)"),
        ("file", "json.load(open(os.environ['ETUDE_TASK_FILE']))"),
        ("env", "json.loads(os.environ['ETUDE_TASK'])"),
    ],
)
def test_a_program_gets_its_task_and_its_attempt(task: Any, reads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETUDE_STORE_KEY", "not for programs")
    code = f"""
import json, os, sys
task = {reads}
if {task!r} != "stdin":
    assert sys.stdin.read() == ""
names = ("ETUDE_", "OPENAI_", "ANTHROPIC_", "MINE")
variables = {{name: value for name, value in os.environ.items() if name.startswith(names)}}
print(json.dumps(variables))
print(json.dumps({{"reward": len(task["question"])}}))
"""
    result = ran(python(code), task=task, fields={"question": "wörtlich\n"}, environment={"MINE": "1"})
    assert result.only.status is Status.SUCCEEDED, result.error
    assert result.rewards == [9.0]
    variables = json.loads(result.events[0][0]["data"]["stdout"].splitlines()[0])
    expected = {"ETUDE_ROLLOUT", "ETUDE_ATTEMPT", "ETUDE_MODEL", "MINE"}
    expected |= {f"{maker}_{what}" for maker in ("OPENAI", "ANTHROPIC") for what in ("BASE_URL", "API_KEY")}
    assert set(variables) - {"ETUDE_TASK", "ETUDE_TASK_FILE"} == expected
    assert variables["OPENAI_BASE_URL"] == ENDPOINT["base_url"] == variables["ANTHROPIC_BASE_URL"] + "/v1"
    if "ETUDE_TASK_FILE" in variables:
        assert not Path(variables["ETUDE_TASK_FILE"]).exists()


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Mapping[str, str]]:
    """An endpoint whose port accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield {"base_url": f"http://127.0.0.1:{listening.getsockname()[1]}/v1", "model": "policy"}


def test_a_program_that_fails_without_a_reachable_model_is_an_infrastructure_error(endpoint: Mapping[str, str]) -> None:
    result = ran("exit 1", endpoint=AWAY)
    assert result.only.status is Status.INFRA_ERROR and "could not be reached. The command" in result.error
    assert ran("exit 0", endpoint=AWAY).only.status is Status.INFRA_ERROR, "it may handle all errors"
    assert ran("exit 1", endpoint=endpoint).only.status is Status.FAILED


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "echo 'error 400'; echo 'it broke' >&2; exit 3",
            "exit code 3. Its standard output ended with:\nerror 400\nIts standard error ended with:\nit broke",
        ),
        ("echo 'error 400'; exit 1", "exit code 1. Its standard output ended with:\nerror 400"),
        ("echo $OPENAI_API_KEY; exit 1", "exit code 1. Its standard output ended with:\n…"),
        ("kill -9 $$", "the signal SIGKILL"),
        ("exit 1", "It wrote nothing to standard output or standard error."),
        ("""echo '{"reward": NaN}'""", "a reward is finite"),
        ("""echo '{"reward": "much"}'""", "'much' of type str"),
    ],
)
def test_a_program_that_fails_says_how(line: str, message: str, endpoint: Mapping[str, str]) -> None:
    result = ran(line, endpoint=endpoint)
    assert result.only.status is Status.FAILED and message in result.error, result.error


@pytest.mark.parametrize("line", ["true", "echo 0.5", "echo '{\"score\": 1}'", "echo '{\"reward\": 1'", "echo '[1]'"])
def test_a_last_line_without_a_reward_gives_none(line: str) -> None:
    result = ran(line)
    assert result.only.status is Status.SUCCEEDED and result.rewards == [None]


def test_output_is_kept_within_bounds_and_its_end_is_read() -> None:
    code = "import sys; sys.stdout.write('x' * 3_000_000 + '\\n{\"reward\": 1}\\n'); sys.stderr.write('e' * 300_000)"
    result = ran(python(code), output_kb=8)
    assert result.rewards == [1.0], result.error
    output = result.events[0][0]["data"]
    assert len(output["stdout"]) == len(output["stderr"]) == 8 << 10
    assert output["stdout_dropped_bytes"] == 3_000_000 + 1 + 13 + 1 - (8 << 10)


def test_a_program_that_reads_nothing_of_a_long_task_succeeds() -> None:
    result = ran("true", fields={"text": "x" * 500_000})
    assert result.only.status is Status.SUCCEEDED
    result = ran("true", task="env", fields={"text": "x" * 500_000})
    assert result.only.status is Status.FAILED and "the most that an environment variable holds" in result.error


def stopped_at_its_limit(file: Path, limit_s: float) -> Callable[[LocalRolloutQueue, Runner], Awaitable[None]]:
    """Return what lets the time limit of a program pass once it has written a file and is known to run."""

    async def meanwhile(queue: LocalRolloutQueue, runner: Runner) -> None:
        await until(lambda: file.exists() and queue.journal.rollout(0).attempts[0].status is Status.RUNNING)
        await until(lambda: runner._asked_at is None)  # the time of a reply would not count
        skip_time(limit_s)

    return meanwhile


def test_the_time_of_a_program_is_bounded_and_all_its_processes_end(tmp_path: Path) -> None:
    pids, ready = tmp_path / "pids", tmp_path / "ready"
    line = f"""trap '' TERM; sleep 60 & echo $! >> {pids}; echo $$ >> {pids}; echo said; touch {ready}; wait; wait"""
    result = ran(line, timeout_s=15, grace_s=0.2, meanwhile=stopped_at_its_limit(ready, 15))
    assert result.only.status is Status.TIMED_OUT
    assert result.events[0][0]["data"]["stdout"] == "said\n"
    assert result.error == "It did not end within 15 s. Its standard output ended with:\nsaid"
    assert all(gone(int(pid)) for pid in pids.read_text().split())


def test_a_program_that_takes_longer_than_its_rollout_allows_says_how_far_it_came(tmp_path: Path) -> None:
    """The runner stops it, and the queue waits for the runner's report."""
    ready = tmp_path / "ready"
    program = etude.command(f"echo asking; echo waits >&2; touch {ready}; sleep 60")
    limits = RolloutLimits(timeout_s=15, max_attempts=1)
    result = played(program, wanted(1, limits), meanwhile=stopped_at_its_limit(ready, 15))
    assert result.only.status is Status.TIMED_OUT
    ends = "Its standard output ended with:\nasking\nIts standard error ended with:\nwaits"
    assert result.error == f"It did not end within 15 s. {ends}"


def test_an_agent_may_bound_the_time_of_a_program_itself(tmp_path: Path) -> None:
    """`asyncio.timeout` recognizes its own cancellation by the plain exception type."""
    ready = tmp_path / "ready"
    program = etude.command(f"echo asking; touch {ready}; sleep 60")

    @etude.agent
    async def bounded(task: Any) -> float:
        async def end() -> None:
            await until(ready.exists)
            limit.reschedule(0.0)

        ending = asyncio.create_task(end())
        try:
            async with asyncio.timeout(None) as limit:
                await program.run(Claim(AttemptId(0, 0), task, "train", RolloutLimits(), {}, "", ""), "")
        except TimeoutError as error:
            await ending
            assert isinstance(error.__cause__, asyncio.CancelledError)
            return float("Its standard output ended with:\nasking" in error.__cause__.__notes__)
        return 0.0

    result = played(bounded, wanted(1))
    assert result.only.status is Status.SUCCEEDED and result.rewards == [1.0], result.error


def test_a_terminated_program_may_clean_up(tmp_path: Path) -> None:
    log, ready = tmp_path / "log", tmp_path / "ready"
    line = f"trap 'echo tidied > {log}; exit 0' TERM; touch {ready}; sleep 60 & wait"
    result = ran(line, timeout_s=15, meanwhile=stopped_at_its_limit(ready, 15))
    assert result.only.status is Status.TIMED_OUT and log.read_text() == "tidied\n"


def test_child_processes_of_a_program_end_with_it(tmp_path: Path) -> None:
    result = ran(f"sleep 60 & echo $! > {tmp_path}/pid")
    assert result.only.status is Status.SUCCEEDED
    assert gone(int((tmp_path / "pid").read_text()))


def test_memory_and_cpu_time_are_bounded(endpoint: Mapping[str, str]) -> None:
    result = ran(python("x = bytearray(1 << 30)"), endpoint=endpoint, memory_mb=300)
    assert result.only.status is Status.FAILED and "MemoryError" in result.error
    result = ran(python("while True: pass"), endpoint=endpoint, cpu_s=1)
    assert result.only.status is Status.FAILED and "its limit of cpu_s=1 CPU seconds" in result.error, result.error
    assert ran(python("x = bytearray(1 << 26)"), memory_mb=300, cpu_s=5).only.status is Status.SUCCEEDED


def test_a_cancelled_rollout_ends_its_program(tmp_path: Path) -> None:
    place = tmp_path / "pid"

    async def meanwhile(queue: LocalRolloutQueue, runner: Runner) -> None:
        while not (place.exists() and place.read_text().strip()):
            await asyncio.sleep(0.02)
        await queue.cancel([0], "no more")

    agent = etude.command(f"echo $$ > {place}; sleep 60")
    result = played(agent, wanted(1), meanwhile=meanwhile)
    assert result.only.status is Status.CANCELLED and gone(int(place.read_text()))


def test_many_programs_run_at_once(tmp_path: Path) -> None:
    started, may_end = tmp_path / "started", tmp_path / "may_end"
    started.touch()

    async def meanwhile(queue: LocalRolloutQueue, runner: Runner) -> None:
        await until(lambda: len(started.read_text()) == 12)
        may_end.touch()

    program = etude.command(f"printf x >> {started}; until [ -e {may_end} ]; do sleep 0.05; done")
    result = played(program, wanted(12), max_concurrency=12, meanwhile=meanwhile)
    assert {state.status for state in result.states} == {Status.SUCCEEDED}


def test_invalid_arguments_are_refused(tmp_path: Path) -> None:
    for line in ("", " ", []):
        with pytest.raises(AgentError, match="no program to run"):
            etude.command(line)
    with pytest.raises(AgentError, match="one of stdin, file, env"):
        etude.command("true", task="pipe")  # type: ignore[arg-type]
    with pytest.raises(AgentError, match="cpu_s must be above 0"):
        etude.command("true", cpu_s=0)
    with pytest.raises(AgentError, match="output_kb must be at most"):
        etude.command("true", output_kb=1 << 20)
    with pytest.raises(AgentError, match="ETUDE_ are set by Etude"):
        etude.command("true", environment={"ETUDE_REWARD_KEY": "mine"})
    for agent, message in (
        (etude.command(["no-such-program-at-all"]), "no-such-program-at-all was not found"),
        (etude.command("true", directory=tmp_path / "nowhere"), "does not exist"),
    ):
        with pytest.raises(AgentError, match=message):
            played(agent, wanted(1))


def test_a_key_to_write_rewards_needs_a_server_to_write_them_to() -> None:
    limits = RolloutLimits(timeout_s=20)
    result = played(etude.command("true", reward_key=True), wanted(1, limits))
    assert result.only.status is Status.INFRA_ERROR and "the store has no server" in result.error


def test_the_working_directory_can_be_chosen(tmp_path: Path) -> None:
    (tmp_path / "agent.sh").write_text('#!/bin/sh\necho "{\\"reward\\": 2}"\n')
    (tmp_path / "agent.sh").chmod(0o700)
    assert ran(["./agent.sh"], directory=tmp_path).rewards == [2.0]


def test_a_command_can_be_pickled_and_compared() -> None:
    agent = etude.command("true", cpu_s=3)
    assert pickle.loads(pickle.dumps(agent)) == agent == replace(agent) and isinstance(agent, Command)


def test_a_runner_that_is_killed_leaves_no_program(tmp_path: Path) -> None:
    """After kill -9 the process that plays cannot clean up."""
    code = f"""
import asyncio, etude
from tests.agents.rollout_queues import play, wanted
agent = etude.command("echo $$ >> {tmp_path}/pids; sleep 60 & echo $! >> {tmp_path}/pids; wait")
asyncio.run(play(agent, wanted(3), max_concurrency=3))
"""
    (tmp_path / "pids").touch()
    process = os.posix_spawn(sys.executable, [sys.executable, "-c", code], os.environ)
    try:
        until = time.monotonic() + 20
        while len((tmp_path / "pids").read_text().split()) < 6:
            assert time.monotonic() < until
            time.sleep(0.05)
    finally:
        os.kill(process, 9)
        os.waitpid(process, 0)
    assert all(gone(int(pid)) for pid in (tmp_path / "pids").read_text().split())
