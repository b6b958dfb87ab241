"""The running time of a process stands still while it is stopped, and with it every limit on work."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes import descendants
from tests.stopped_work import LIMIT_S

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_a_process_that_was_stopped_for_longer_than_its_limits_loses_no_work() -> None:
    """Its workers, which have sessions of their own, are stopped too, as by the pause of a container."""
    worker = subprocess.Popen([sys.executable, "-m", "tests.stopped_work"], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert worker.stdout is not None
    with worker.stdout:
        assert worker.stdout.readline() == "started\n"
        stopped = [worker.pid, *descendants(worker.pid)]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(LIMIT_S + 0.5)
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        outcomes = json.loads(worker.stdout.readline())
    assert worker.wait(30) == 0
    assert set(outcomes.values()) == {"succeeded"}, outcomes
