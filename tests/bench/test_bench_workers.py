"""The processes of a benchmark end with it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bench.workers import ROOT, Worker
from tests.processes import gone

TALKS = """
import json, os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(json.dumps([os.getpid(), child.pid]), flush=True)
time.sleep(600)
"""
BENCHMARK = f"""
import sys, time
from pathlib import Path
from bench.workers import Worker
worker = Worker("the peer", [sys.executable, "-c", {TALKS!r}], Path(sys.argv[1]))
print(*worker.hear(), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_a_benchmark_that_is_killed(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-c", BENCHMARK, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT) as benchmark:
        try:
            assert benchmark.stdout is not None
            started = [int(pid) for pid in benchmark.stdout.readline().split()]
        finally:
            benchmark.send_signal(number)
    assert len(started) == 2 and all(gone(pid) for pid in started)


def test_a_worker_that_is_closed_leaves_nothing(tmp_path: Path) -> None:
    ends = TALKS.replace("time.sleep(600)\n", "sys.stdin.read()\n")
    worker = Worker("the peer", [sys.executable, "-c", ends], tmp_path / "log")
    started = worker.hear()
    worker.close()
    assert all(gone(int(pid)) for pid in started)
