"""A crew of processes: asynchronous calls beside calls, and the faults of ranks."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from etude.data.partition import partition_rollouts
from etude.dispatch import CrewConfig, multi_rank_crew
from etude.dispatch.multi_rank_crew import CALL_LIMIT_TIMEOUTS, GRACE_SECONDS, MIN_CALL_LIMIT
from etude.dispatch.process_crew import ProcessCrew, ProcessRankHandle
from etude.errors import ConfigError, CrewError, TrainingError
from tests.dispatch.workers import CountingWorker, counted, refusing, stopping
from tests.processes import gone

SILENCE = 3.0


def crew_of(logs: Path, make: Callable[..., object] = counted, *args: Any, ranks: int = 2, **more: Any) -> ProcessCrew:
    config = CrewConfig(**{"heartbeat_timeout": 30.0, "timeout": 120.0, **more})
    return ProcessCrew(make, *args, ranks=ranks, share=partition_rollouts, logs=logs, config=config)


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCrew]:
    """A crew whose ranks no test ends."""
    with closing(crew_of(tmp_path_factory.mktemp("ranks"), heartbeat_timeout=SILENCE)) as made:
        yield made


# -- asynchronous calls -----------------------------------------------------------------------------------------------


def test_async_calls_run_concurrently_on_their_rank(crew: ProcessCrew) -> None:
    started: list[int] = []
    start = time.perf_counter()
    futures = [crew.submit(i % 2, CountingWorker.wonder, 0.5, on_start=partial(started.append, i)) for i in range(20)]
    results = [future.result(30) for future in futures]
    assert time.perf_counter() - start < 5
    assert results == [(i % 2, crew.pids[i % 2]) for i in range(20)] and sorted(started) == list(range(20))


def test_an_async_call_runs_beside_a_call_and_the_other_way_round(crew: ProcessCrew) -> None:
    future = crew.submit(1, CountingWorker.wonder, 0.3)
    crew.call(CountingWorker.work, 1.0)
    assert future.done() and future.result() == (1, crew.pids[1])
    future = crew.submit(0, CountingWorker.wonder, 60.0)
    assert crew.call(CountingWorker.add, 0) >= 10 and not future.done()
    future.cancel()


def test_an_abandoned_async_call_is_forgotten(crew: ProcessCrew) -> None:
    async def leave() -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(crew.submit(0, CountingWorker.wonder, 60.0)), 0.2)

    asyncio.run(leave())
    future = crew.submit(0, CountingWorker.wonder, 60.0)
    assert future.cancel()
    with pytest.raises(CancelledError):
        future.result(1)
    assert crew.submit(0, CountingWorker.wonder, 0.0).result(30)[0] == 0


def test_an_error_of_an_async_call_is_raised_in_its_caller(crew: ProcessCrew) -> None:
    with pytest.raises(ConfigError, match=r"Time goes on\."):
        crew.submit(1, CountingWorker.wonder, -1.0).result(30)
    with pytest.raises(CrewError, match=r"Rank 0 \(process \d+\) failed in CountingWorker.wonder: TypeError"):
        crew.submit(0, CountingWorker.wonder).result(30)


# -- calls ------------------------------------------------------------------------------------------------------------


def test_a_long_call_does_not_count_as_silence(crew: ProcessCrew) -> None:
    crew.call(CountingWorker.work, SILENCE + 1.5)


def test_values_that_cannot_be_pickled_are_named(crew: ProcessCrew) -> None:
    with pytest.raises(CrewError, match=r"failed in CountingWorker\.generator: TypeError: cannot pickle"):
        crew.call(CountingWorker.generator)
    with pytest.raises(ConfigError, match="cannot be sent to another process"):
        crew.call(CountingWorker.add, lambda: 1)
    assert crew.call(CountingWorker.add, 0) >= 10


def test_warnings_are_forwarded_and_equal_ones_of_all_ranks_once(
    crew: ProcessCrew, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "etude"):
        crew.call(CountingWorker.warn)
        crew.submit(0, CountingWorker.wonder, 0.0).result(30)
        crew.submit(1, CountingWorker.wonder, 0.0).result(30)
    messages = [record.message for record in caplog.records]
    assert {"rank 0: and here it is rank 0", "rank 1: and here it is rank 1"} < set(messages)
    assert len(messages) == 3 and sum(text.endswith("the weather is bad") for text in messages) == 1


def test_a_rank_computes_with_the_requested_threads(crew: ProcessCrew) -> None:
    assert crew.call(CountingWorker.threads) == [1, 1]


def test_no_other_machine_can_reach_the_ranks(crew: ProcessCrew) -> None:
    """Every socket on which a rank listens is on the loopback interface."""
    inodes = set()
    for pid in crew.pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                inodes.add(link.readlink().name)
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = [line for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in inodes]
    assert len(listening) >= 2 and all(line[1].startswith("0100007F:") for line in listening)


# -- faults of ranks --------------------------------------------------------------------------------------------------


def failing(crew: ProcessCrew, method: Callable[..., Any], *args: Any) -> tuple[str, float]:
    """Return the error of a call that ends the crew, and how long it took. Check that no process is left, and that the
    crew takes no more calls."""
    pids, future, start = crew.pids, crew.submit(0, CountingWorker.wonder, 600.0), time.perf_counter()
    with closing(crew):
        with pytest.raises((CrewError, TrainingError)) as raised:
            crew.call(method, *args)
        seconds = time.perf_counter() - start
        with pytest.raises(type(raised.value)):
            future.result(10)
        with pytest.raises(type(raised.value)):
            crew.call(CountingWorker.add, 1)
        assert all(gone(pid) for pid in pids)
    return str(raised.value), seconds


HOW = [
    pytest.param("kill", r"killed by SIGKILL, as the system does when memory runs out", 10),
    pytest.param("exit", r"exit code 3", 10, marks=pytest.mark.soak),
    pytest.param("crash", r"killed by SIGSEGV", 10, marks=pytest.mark.soak),
    pytest.param("stop", r"gave no sign of life for 3\.\d s .*: it was stopped by a signal", SILENCE + 10),
]


@pytest.mark.parametrize(("how", "sentence", "within"), HOW)
def test_a_lost_rank_ends_the_call_soon_and_is_named(how: str, sentence: str, within: float, tmp_path: Path) -> None:
    crew = crew_of(tmp_path, heartbeat_timeout=SILENCE)
    pid = crew.pids[1]
    error_text, seconds = failing(crew, CountingWorker.end, 1, how)
    assert error_text.startswith(f"Rank 1 (process {pid}) ") and "in CountingWorker.end" in error_text
    assert re.search(sentence, error_text), error_text
    assert (how == "crash" or "these are its last words" in error_text) and str(tmp_path / "rank-1.log") in error_text
    assert seconds < within


def test_a_rank_that_hangs_in_a_call_that_others_ended_is_named(tmp_path: Path) -> None:
    crew = crew_of(tmp_path, heartbeat_timeout=SILENCE)
    pid, crew._config = crew.pids[1], CrewConfig(timeout=2.0)  # ranks may have taken longer to start
    error_text, seconds = failing(crew, CountingWorker.hang, 1)
    assert error_text.startswith(
        f"Rank 1 (process {pid}) did not end CountingWorker.hang within `crew.timeout` = 2 s after another"
    )
    assert (
        f"at the end of {tmp_path / 'rank-1.log'}. Start the run again" in error_text
        and 2 + GRACE_SECONDS <= seconds < 20
    )
    assert "in hang" in (tmp_path / "rank-1.log").read_text() and "in hang" not in (tmp_path / "rank-0.log").read_text()


def test_callers_get_the_error_before_ranks_are_killed_in_parallel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of one rank, and any error of it, holds up neither the caller nor the other ranks."""
    released, together = threading.Event(), threading.Barrier(2, timeout=60)
    kill = ProcessRankHandle.kill

    def slow_kill(handle: ProcessRankHandle) -> None:
        assert released.wait(60)
        together.wait()
        kill(handle)
        raise OSError("and it cannot be ended")

    with closing(crew_of(tmp_path, heartbeat_timeout=60)) as crew:
        monkeypatch.setattr(ProcessRankHandle, "kill", slow_kill)
        pids = crew.pids
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(CrewError, match=r"Rank 1 .* ended while it was answering async calls"):
            crew.submit(0, CountingWorker.wonder, 600.0).result(60)
        assert not gone(pids[0], within=0)
        released.set()
    assert all(gone(pid, within=0) for pid in pids) and not together.broken


@pytest.mark.soak
def test_a_call_that_hangs_in_every_rank_ends_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MIN_CALL_LIMIT == 6 * 3600 and CALL_LIMIT_TIMEOUTS == 10, "as docs/guides/processes.md says"
    monkeypatch.setattr(multi_rank_crew, "MIN_CALL_LIMIT", 3.0)
    crew = crew_of(tmp_path)
    crew._config = CrewConfig(timeout=0.1)
    error_text, seconds = failing(crew, CountingWorker.hang, 0, 1)
    assert error_text.startswith(
        "No rank has ended CountingWorker.hang in 3.0 s. The stacks of their threads are at the end of"
    )
    assert "it may last 10 times that" in error_text and 3 <= seconds < 20
    assert all("in hang" in (tmp_path / f"rank-{rank}.log").read_text() for rank in (0, 1))


@pytest.mark.soak
def test_an_error_of_waiting_for_a_rank_names_that_rank_too(tmp_path: Path) -> None:
    """The waiting rank raises: here rank 0, whose exchange is given up."""
    crew = crew_of(tmp_path, timeout=25.0)
    pid = crew.pids[1]
    error_text, _ = failing(crew, CountingWorker.late, 1)
    assert error_text.startswith("Rank 0 (process ") and "failed in CountingWorker.late: RuntimeError" in error_text
    assert f"Rank 1 (process {pid}) had not ended it 3 s later." in error_text
    assert "in late" in (tmp_path / "rank-1.log").read_text()


@pytest.mark.soak
def test_an_error_on_one_rank_does_not_leave_the_others_waiting(tmp_path: Path) -> None:
    error_text, seconds = failing(crew_of(tmp_path), CountingWorker.stumble, 1)
    assert (
        error_text.startswith("Rank 1 (process ")
        and "failed in CountingWorker.stumble: ZeroDivisionError: a slip" in error_text
    )
    assert "workers.py:" in error_text and GRACE_SECONDS - 1 < seconds < GRACE_SECONDS + 10
    assert "a slip" in (tmp_path / "rank-1.log").read_text()


@pytest.mark.soak
def test_an_error_of_etude_keeps_its_type_also_on_one_rank(tmp_path: Path) -> None:
    with closing(crew_of(tmp_path, ranks=3)) as crew, pytest.raises(TrainingError) as raised:
        crew.call(CountingWorker.refuse, 2)
    assert str(raised.value) == "The gradient is not finite." and "Rank 2" in raised.value.__notes__[0]


@pytest.mark.soak
def test_a_worker_that_cannot_be_created_is_refused_with_its_own_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No worker can be made of this\."):
        crew_of(tmp_path, refusing, 1)


@pytest.mark.soak
def test_a_start_that_takes_too_long_is_ended_with_its_last_phase(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "etude"), pytest.raises(CrewError, match=r"Rank 1 .* did not start") as at:
        crew_of(tmp_path, stopping, 1, timeout=25.0)
    assert "it was building its worker" in str(at.value)
    assert any("rank 1 is building its worker" in record.message for record in caplog.records)


@pytest.mark.soak
def test_more_ranks_than_gpus_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="2 ranks need 2 GPUs, one each, and there are"):
        ProcessCrew(
            counted, ranks=2, share=partition_rollouts, logs=tmp_path, device="cuda", config=CrewConfig(timeout=120)
        )


@pytest.mark.soak
def test_a_closed_crew_takes_no_calls_and_leaves_no_process(tmp_path: Path) -> None:
    crew = crew_of(tmp_path)
    pids, pending = crew.pids, crew.submit(0, CountingWorker.wonder, 600.0)
    crew.close()
    crew.close()
    assert all(gone(pid, within=0) for pid in pids)
    with pytest.raises(CrewError, match="ended while calls were still under way"):
        pending.result(1)
    with pytest.raises(AssertionError, match="closed"):
        crew.call(CountingWorker.add, 1)


# -- faults of the controller -----------------------------------------------------------------------------------------

CONTROLLER = """
import json, sys
from pathlib import Path
from tests.dispatch.test_process_crew import crew_of
from tests.dispatch.workers import CountingWorker
crew = crew_of(Path(sys.argv[1]))
print(json.dumps(crew.pids), flush=True)
crew.call(CountingWorker.work, 600.0)
"""


@pytest.mark.parametrize("stopped", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["working", "stopped"])
def test_ranks_end_with_their_controller(stopped: bool, tmp_path: Path) -> None:
    """The controller is killed and cannot clean up. A stopped rank, which cannot notice, ends too."""
    if stopped and sys.platform != "linux":
        pytest.skip("only Linux ends a stopped process with its parent")
    process = subprocess.Popen([sys.executable, "-c", CONTROLLER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pids = json.loads(process.stdout.readline())
    if stopped:
        os.kill(pids[0], signal.SIGSTOP)
    process.kill()
    process.wait(30)
    assert all(gone(pid) for pid in pids)
