"""The judge with real functions, threads and processes, and each way in which they fail."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from etude import call_task
from etude.errors import ConfigError, PluginError, RewardError
from etude.observe import configure_logging
from etude.records import Outcome, Task
from etude.rewards import (
    ExactMatch,
    FunctionReward,
    Gsm8k,
    Judge,
    JudgingConfig,
    Math,
    Regex,
    RewardFunction,
    RewardModelScore,
    Verdict,
    worker_pool,
)
from etude.rewards.judge import MAX_CONSECUTIVE_FAILURES
from tests.rewards import functions
from tests.rewards.tasks import task
from tests.waits import until

MISBEHAVES = FunctionReward(path="tests.rewards.functions:misbehaves")
WORKERS = {"thread": 0, "processes": 1}


def judged(judge: Judge, *answers: str) -> list[Verdict]:
    """Return the verdicts on some answers, judged all at once."""

    async def ask() -> Sequence[Verdict]:
        return await asyncio.gather(*(judge.judge(task(ordinal=i), answer) for i, answer in enumerate(answers)))

    return list(asyncio.run(ask()))


def ended(pid: int, within: float = 10.0) -> bool:
    """Return True if a process has ended, or is a zombie, within so many seconds."""
    until = time.monotonic() + within
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


ticked = threading.Event()


class Blocks(RewardFunction):
    """A user's reward without a declared executor."""

    def __call__(self, task: Any, answer: str) -> float:
        return float(ticked.wait(10))


class Waits(RewardFunction):
    """A user's reward that is a coroutine function."""

    async def __call__(self, task: Any, answer: str) -> float:
        await asyncio.sleep(float(answer))
        return 1.0


# -- where rewards are computed ---------------------------------------------------------------------------------------


def test_a_quick_reward_is_called_in_place() -> None:
    with Judge(ExactMatch()) as judge:
        right, wrong = judged(judge, "4", "5")
    assert (right.reward, wrong.reward) == (1.0, 0.0) and right.outcome is Outcome.SUCCEEDED and not right.error
    assert 0 <= right.seconds < 10


@pytest.mark.parametrize("reward", [functions.waited, Waits()], ids=["function", "config"])
def test_coroutine_functions_wait_side_by_side(reward: Any) -> None:
    with Judge(reward) as judge:
        began = time.perf_counter()
        verdicts = judged(judge, *["0.3"] * 40)
    assert time.perf_counter() - began < 12 and {verdict.reward for verdict in verdicts} == {1.0}
    assert all(0.2 < verdict.seconds < 12 for verdict in verdicts)


def test_a_function_runs_beside_the_event_loop() -> None:
    async def ticking(judge: Judge) -> Verdict:
        asyncio.get_running_loop().call_later(0.02, ticked.set)
        return await judge.judge(task(), "4")

    with Judge(Blocks()) as judge:
        verdict = asyncio.run(ticking(judge))
    assert verdict.reward == 1.0


def test_a_lambda_is_a_reward() -> None:
    with Judge(lambda task, answer: {"long": len(answer), "sure": answer.endswith("!")}) as judge:
        (verdict,) = judged(judge, "four!")
    assert verdict.reward == 6.0 and verdict.parts == {"long": 5.0, "sure": 1.0}


def test_processes_are_as_many_as_asked_for_and_are_kept() -> None:
    with Judge(FunctionReward(path="tests.rewards.functions:process"), JudgingConfig(workers=2)) as judge:
        pids = {verdict.reward for _ in range(3) for verdict in judged(judge, *"abcdefgh")}
    assert 1 <= len(pids) <= 2 and os.getpid() not in pids
    assert all(ended(int(pid)) for pid in pids)


def test_mathematics_and_patterns_have_processes_of_their_own() -> None:
    assert Math.default_workers == Regex.default_workers == 2
    with Judge(Regex(pattern=r"(\d)")) as judge:
        verdicts = judged(judge, "4", "5")
    assert [(verdict.reward, verdict.extracted_answer) for verdict in verdicts] == [(1.0, "4"), (0.0, "5")]


def test_a_process_awaits_coroutine_functions_too() -> None:
    with Judge(functions.Holder(0.5), JudgingConfig(workers=1)) as judge:
        assert judged(judge, "x")[0].reward == 0.5


# -- failures are outcomes --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[*WORKERS.values()], ids=[*WORKERS])
def shared(request: pytest.FixtureRequest) -> Iterator[Judge]:
    """One judge for all failures: each test also shows that it has survived the one before."""
    with Judge(MISBEHAVES, JudgingConfig(workers=request.param, timeout=0.5)) as judge:
        yield judge


def test_a_judge_serves_one_event_loop_after_another(shared: Judge) -> None:
    assert [judged(shared, "fine")[0].reward for _ in range(3)] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("answer", "message"), [("raise", "ValueError: no such luck (functions.py, line "), ("exit", "SystemExit: enough")]
)
def test_the_exception_of_a_function_is_reported(shared: Judge, answer: str, message: str) -> None:
    fine, raised = judged(shared, "fine", answer)
    assert fine.reward == 1.0
    assert raised.outcome is Outcome.FAILED and math.isnan(raised.reward) and message in raised.error
    assert raised.error.startswith("The reward tests.rewards.functions:misbehaves failed on task 1 of sums: ")


def test_a_call_that_takes_too_long_is_an_outcome(shared: Judge) -> None:
    late, fine = judged(shared, "sleep 5", "fine")
    assert late.outcome is Outcome.TIMED_OUT and late.seconds >= 0.5
    assert late.error.endswith("misbehaves took longer than `judging.timeout` = 0.5 seconds on task 0 of sums.")
    assert fine.reward == 1.0


@pytest.mark.parametrize("shared", [1], indirect=True, ids=["processes"])
@pytest.mark.parametrize(
    ("answer", "outcome", "message"),
    [
        pytest.param("loop", Outcome.TIMED_OUT, "took longer than", marks=pytest.mark.integration),
        ("hold", Outcome.TIMED_OUT, "took longer than"),
        ("die", Outcome.INFRA_ERROR, "ended its process (exit code 3) on task 0 of sums"),
        ("crash", Outcome.INFRA_ERROR, "ended its process (killed by SIGABRT) on task 0 of sums"),
    ],
)
def test_a_process_that_ends_or_hangs_is_an_outcome(shared: Judge, answer: str, outcome: Outcome, message: str) -> None:
    lost, fine = judged(shared, answer, "fine")
    assert lost.outcome is outcome and message in lost.error and fine.reward == 1.0


@pytest.mark.parametrize("reward", [functions.Holder(math.nan), functions.waited], ids=["nan", "raises"])
def test_a_failure_in_the_event_loop_is_reported(reward: Callable[..., Awaitable[float]]) -> None:
    with Judge(reward) as judge:
        (verdict,) = judged(judge, "not a number of seconds")
    assert verdict.outcome is Outcome.FAILED and "task 0 of sums" in verdict.error


@pytest.mark.parametrize("answer", ["nan", "none", "text", "nan part"])
def test_a_result_that_is_no_number_is_never_a_reward(answer: str) -> None:
    with Judge(functions.returned) as judge:
        (verdict,) = judged(judge, answer)
    assert verdict.outcome is Outcome.FAILED and math.isnan(verdict.reward)
    assert verdict.error.startswith("The reward returned cannot be used on task 0 of sums: it")


def test_a_coroutine_that_takes_too_long_is_an_outcome() -> None:
    with Judge(functions.waited, JudgingConfig(timeout=0.2)) as judge:
        late, fine = judged(judge, "5", "0")
    assert late.outcome is Outcome.TIMED_OUT and "took longer than" in late.error and "task 0 of sums" in late.error
    assert fine.reward == 1.0


@pytest.mark.kept
def test_a_process_that_dies_between_calls_costs_nothing() -> None:
    with Judge(FunctionReward(path="tests.rewards.functions:process"), JudgingConfig(workers=1)) as judge:
        first = int(judged(judge, "a")[0].reward)
        os.kill(first, signal.SIGKILL)
        assert ended(first)
        time.sleep(0.3)  # its other thread may still be on its way, and hold the pipe
        (again,) = judged(judge, "a")
    assert again.outcome is Outcome.SUCCEEDED and again.reward != first


def test_killing_a_process_ends_its_child_processes(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    with Judge(MISBEHAVES, JudgingConfig(workers=1, timeout=1.0)) as judge:
        (late,) = judged(judge, f"child {path}")
    assert late.outcome is Outcome.TIMED_OUT and ended(int(path.read_text()))


def test_a_hard_expression_ends_at_the_limit() -> None:
    with Judge(functions.LoadedMath(), JudgingConfig(workers=1, timeout=1.0)) as judge:
        hard, fine = judged(judge, "\\boxed{9^{9^{9^9}}}", "\\boxed{4}")
    assert fine.reward == 1.0 and hard.outcome is Outcome.TIMED_OUT


# -- the score of a failure -------------------------------------------------------------------------------------------


def test_a_failure_may_have_a_score_which_says_so() -> None:
    with Judge(functions.returned, JudgingConfig(on_error="score", error_score=-0.5)) as judge:
        (verdict,) = judged(judge, "nan")
    assert verdict.reward == -0.5 and verdict.outcome is Outcome.SUCCEEDED and "it returned nan" in verdict.error


def test_a_failure_may_stop_the_run() -> None:
    with (
        Judge(functions.returned, JudgingConfig(on_error="stop")) as judge,
        pytest.raises(RewardError, match=r"returned cannot be used on task 0 of sums.*`judging\.on_error` is stop"),
    ):
        judged(judge, "nan")


@pytest.mark.parametrize("judging", [JudgingConfig(), JudgingConfig(on_error="score", error_score=0.0)])
def test_a_reward_that_always_fails_stops_the_run(judging: JudgingConfig) -> None:
    with Judge(functions.returned, judging) as judge:
        judged(judge, *["nan"] * (MAX_CONSECUTIVE_FAILURES - 1), "true", *["nan"] * (MAX_CONSECUTIVE_FAILURES - 1))
        with pytest.raises(
            RewardError, match=rf"That was failure {MAX_CONSECUTIVE_FAILURES} in a row, so the run stops here"
        ):
            judged(judge, "nan")


def test_an_error_score_without_its_option_is_refused() -> None:
    for wrong in ({"error_score": 1.0}, {"on_error": "score"}, {"on_error": "score", "error_score": math.nan}):
        with pytest.raises(ConfigError):
            JudgingConfig(**wrong)  # type: ignore[arg-type]


def test_calls_that_hang_are_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info")
    with Judge(MISBEHAVES, JudgingConfig(timeout=0.05)) as judge:
        verdicts = judged(judge, *["sleep 3"] * 9)
    assert {verdict.outcome for verdict in verdicts} == {Outcome.TIMED_OUT}
    message = capsys.readouterr().err
    assert message.count("took longer than `judging.timeout` = 0.05 seconds on task") == 1
    assert "are only counted. Correct the reward, or choose what such answers get by `judging.on_error`. " in message


def test_each_cause_of_failures_is_logged_once(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info")
    with Judge(functions.misbehaves) as judge:
        judged(judge, *["raise", "exit", "raise", "exit", "raise"])
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all("This is logged once" in line for line in lines)


def test_a_coroutine_that_ignores_its_cancellation_is_an_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_task, "CANCEL_S", 0.05)
    with Judge(functions.stubborn, JudgingConfig(timeout=0.05)) as judge:
        (verdict,) = judged(judge, "idle")
    assert verdict.outcome is Outcome.TIMED_OUT and "took longer than `judging.timeout` = 0.05 seconds" in verdict.error


def test_a_function_that_waits_is_called_once_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.rewards.judge.QUEUE_CHECK_INTERVAL_S", 0.05)
    beside: list[int] = []

    def waits(task: Any, answer: str) -> float:
        beside.append(1)
        time.sleep(0.15)
        return float(len([beside.pop(), *beside]))

    with Judge(waits) as judge:
        assert {verdict.reward for verdict in judged(judge, "a", "b", "c")} == {1.0}


def test_a_function_that_computes_is_called_once_at_a_time_however_long_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("etude.rewards.judge.QUEUE_CHECK_INTERVAL_S", 0.05)
    monkeypatch.setattr(worker_pool, "HANG_SECONDS", 0.15)
    # Seconds of a processor, so that a thread which waits for one does not seem to hang.
    monkeypatch.setattr(worker_pool, "time", SimpleNamespace(**vars(time) | {"monotonic": time.process_time}))
    beside: list[int] = []

    def computes(task: Any, answer: str) -> float:
        beside.append(1)
        until = time.thread_time() + 0.25
        while time.thread_time() < until:
            pass
        return float(len([beside.pop(), *beside]))

    with Judge(computes) as judge:
        assert {verdict.reward for verdict in judged(judge, "a", "b")} == {1.0}


def test_calls_that_hang_do_not_hold_up_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("etude.rewards.judge.QUEUE_CHECK_INTERVAL_S", 0.05)
    monkeypatch.setattr(worker_pool, "HANG_SECONDS", 0.2)
    configure_logging("info")
    beside: list[int] = []
    three = threading.Event()

    def waits(task: Any, answer: str) -> float:
        beside.append(1)
        most = len(beside)
        if most == 3:
            three.set()
        assert three.wait(25)
        beside.pop()
        return float(most)

    with Judge(waits) as judge:
        assert sorted(verdict.reward for verdict in judged(judge, "a", "b", "c")) == [1, 2, 3]
        monkeypatch.setattr(worker_pool, "HANG_SECONDS", 25.0)
        assert {verdict.reward for verdict in judged(judge, *"def")} == {1.0}, "what stood in for them is gone"
    output = capsys.readouterr().err
    assert (
        output.count("A call of the reward") == 1
        and "`judging.workers=0`" in output
        and "`judging.workers=2`" in output
    )


def test_without_workers_a_function_is_called_once_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.rewards.judge.QUEUE_CHECK_INTERVAL_S", 0.05)
    beside: list[int] = []

    def waits(task: Any, answer: str) -> float:
        beside.append(1)
        time.sleep(0.15)
        return float(len([beside.pop(), *beside]))

    with Judge(waits, JudgingConfig(workers=0)) as judge:
        assert {verdict.reward for verdict in judged(judge, "a", "b", "c")} == {1.0}


@pytest.mark.parametrize(
    ("function", "answer", "message"),
    [
        (functions.lacks, "field", "KeyError: 'anser' (functions.py, line "),
        (functions.lacks, "item", "has no field 'anser'; it has prompt, ground_truth, extra_info"),
        (functions.lacks, "attribute", "has no attribute 'anser' (functions.py, line "),
        (functions.of_verl, "anser", "KeyError: 'anser' (functions.py, line "),
    ],
)
def test_a_missing_field_is_reported_with_those_that_exist(
    function: Callable[..., Any], answer: str, message: str
) -> None:
    with Judge(function, JudgingConfig(workers=0)) as judge:
        verdict = asyncio.run(judge.judge(task(extra_info={"split": "train", "index": 3}), answer))
    assert verdict.outcome is Outcome.FAILED and message in verdict.error
    if answer != "item":
        assert "The task has the fields prompt, ground_truth, extra_info, and its `extra_info` has split, index." in (
            verdict.error
        )


def test_other_failures_are_reported_without_the_fields() -> None:
    with Judge(functions.lacks) as judge:
        (verdict,) = judged(judge, "raises")
    assert "no such luck" in verdict.error and "The task has" not in verdict.error


STRANGE = {
    "huge": "it returned inf; a finite number is needed",
    "minus": "it returned -inf; a finite number is needed",
    "long": "xxx… of type str; a number is needed",
    "broken": "LookupError: shape",
    "unshown": "failed on task 0 of sums: Unshown (functions.py, line ",
}


@pytest.mark.parametrize("workers", WORKERS.values(), ids=WORKERS)
def test_whatever_a_function_returns_is_a_verdict_and_a_short_sentence(workers: int) -> None:
    with Judge(
        FunctionReward(path="tests.rewards.functions:strange"), JudgingConfig(workers=workers, timeout=5.0)
    ) as judge:
        for answer, message in STRANGE.items():
            failed, fine = judged(judge, answer, "fine")
            assert failed.outcome is Outcome.FAILED and message in failed.error and len(failed.error) < 400, answer
            assert fine.reward == 1.0, answer


# -- start and end ----------------------------------------------------------------------------------------------------


def test_a_function_that_cannot_be_loaded_is_refused_at_once() -> None:
    with pytest.raises(PluginError, match="there is no file nowhere"):
        Judge(FunctionReward(path="nowhere.py:f"))


def test_a_function_that_other_processes_cannot_find_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"<lambda> cannot be sent to another process.*`judging\.workers` to 0"):
        Judge(lambda task, answer: 0.0, JudgingConfig(workers=1))


def test_a_process_that_cannot_start_is_no_verdict(tmp_path: Path) -> None:
    path = tmp_path / "fickle.py"
    path.write_text("def score(task, answer):\n    return 1.0\n")
    with Judge(FunctionReward(path=f"{path}:score"), JudgingConfig(workers=1)) as judge:
        path.write_text("raise RuntimeError('gone')")
        with pytest.raises(RewardError, match=r"could not start: .*fickle\.py raised RuntimeError in line 1: gone"):
            judged(judge, "a")
        path.write_text("def score(task, answer):\n    return 1.0\n")
        assert judged(judge, "a")[0].reward == 1.0


@pytest.mark.parametrize("workers", WORKERS.values(), ids=WORKERS)
def test_closing_ends_running_and_waiting_calls(workers: int) -> None:
    async def closed_while_asked(judge: Judge) -> list[Verdict]:
        await judge.judge(task(), "fine")  # waits until a process is there
        calls = [asyncio.create_task(judge.judge(task(ordinal=i), "sleep 4")) for i in range(3)]
        await asyncio.sleep(0.3)
        await asyncio.to_thread(judge.close)
        return await asyncio.gather(*calls)

    verdicts = asyncio.run(closed_while_asked(Judge(MISBEHAVES, JudgingConfig(workers=workers, on_error="stop"))))
    assert [verdict.outcome for verdict in verdicts] == [Outcome.CANCELLED] * 3
    assert "was stopped on task 2 of sums, because the judge was closed" in verdicts[2].error


def test_a_cancelled_call_that_waits_is_not_made(tmp_path: Path) -> None:
    may_end = threading.Event()

    def noted(task: Any, answer: str) -> float:
        (tmp_path / answer).touch()
        return float(may_end.wait(10))

    async def cancelled(judge: Judge) -> None:
        first = asyncio.create_task(judge.judge(task(), "first"))
        second = asyncio.create_task(judge.judge(task(), "second"))
        await until((tmp_path / "first").exists)
        second.cancel()
        may_end.set()
        await first
        await judge.judge(task(), "third")

    with Judge(noted) as judge:
        asyncio.run(cancelled(judge))
    assert {path.name for path in tmp_path.iterdir()} == {"first", "third"}


SCRIPT = """
import asyncio, sys, time
from etude.records import Task
from etude.rewards import FunctionReward, Judge, JudgingConfig

judge = Judge(FunctionReward(path=sys.argv[2]), JudgingConfig(workers=1, timeout=60.0))
asyncio.run(judge.judge(Task(0, {}), sys.argv[1]))
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("answer", "module"),
    [
        pytest.param("idle", "functions", marks=pytest.mark.integration),
        pytest.param("loop", "functions", marks=pytest.mark.integration),
        ("hold", "short_timer"),
    ],
    ids=["idle", "loop", "hold"],
)
def test_processes_end_when_their_parent_does(answer: str, module: str) -> None:
    command = [sys.executable, "-c", SCRIPT, answer, f"tests.rewards.{module}:announced"]
    parent = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    assert parent.stderr is not None
    try:
        pid = int(parent.stderr.readline())  # the function prints it
        assert answer == "hold" or not ended(pid, within=0.2)
    finally:
        parent.kill()
        parent.wait()
        parent.stderr.close()
    assert ended(pid, within=60.0)


@pytest.fixture(scope="module")
def script() -> subprocess.CompletedProcess[str]:
    """A script that prints the reward of a function that prints, and then judges with a function of the script."""
    code = """
import asyncio
from etude.records import Task
from etude.rewards import FunctionReward, Judge, JudgingConfig
with Judge(FunctionReward(path="tests.rewards.functions:misbehaves"), JudgingConfig(workers=1)) as judge:
    print(asyncio.run(judge.judge(Task(0, {}), "print")).reward)
def mine(task, answer): return 1.0
Judge(mine, JudgingConfig(workers=1))
"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])


def test_prints_of_a_function_do_not_go_to_standard_output(script: subprocess.CompletedProcess[str]) -> None:
    assert script.stdout == "1.0\n" and "a word on standard output" in script.stderr


def test_a_function_of_the_script_itself_is_refused_in_processes(script: subprocess.CompletedProcess[str]) -> None:
    assert script.returncode and "The reward mine is defined in the script that was started" in script.stderr


def test_a_verdict_holds_the_extracted_answer() -> None:
    with Judge(Gsm8k()) as judge:
        verdict = asyncio.run(judge.judge(task("4"), "#### 4"))
    assert verdict.reward == 1.0 and verdict.extracted_answer == "4"


@pytest.mark.parametrize(("max_concurrency", "outcome"), [(8, Outcome.SUCCEEDED), (1, Outcome.TIMED_OUT)])
def test_answers_that_are_computed_together_share_their_time_limits(max_concurrency: int, outcome: Outcome) -> None:
    async def scored(task: Task, answer: str) -> float:
        await asyncio.sleep(0.3)  # as long as a model takes that reads eight answers at once
        return float(answer)

    reward = RewardModelScore(path=Path("my-judge"), max_concurrency=max_concurrency).with_scorer(scored)
    with Judge(reward, JudgingConfig(timeout=0.25)) as judge:
        assert {verdict.outcome for verdict in judged(judge, "0", "1", "2", "3")} == {outcome}
