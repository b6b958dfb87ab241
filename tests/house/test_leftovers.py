"""A test that leaves a process group, a thread or a process is named, and fixtures may own what they start."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.leftovers import Leftovers

TESTS = """
import subprocess, threading, time
import pytest
import torch.distributed as dist

OVER = threading.Event()

def start_thread():
    threading.Thread(target=OVER.wait, args=(2,), name="etude-waiting", daemon=True).start()

def start_process():
    return subprocess.Popen(["sleep", "2"])

@pytest.fixture(scope="session")
def kept():
    start_thread(), start_process()

@pytest.fixture(scope="module")
def server():
    child, over = start_process(), threading.Event()
    thread = threading.Thread(target=over.wait, name="etude-server")
    thread.start()
    yield
    child.kill(), child.wait(), over.set(), thread.join()

def test_of_the_session(kept): pass
def test_with_a_server(request): request.getfixturevalue("server")
def test_quick(): pass
def test_thread(): start_thread()
def test_process(server): start_process()
def test_group(): dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
def test_group_again(): dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
def test_last():
    OVER.wait(0.05)
"""
CLEAN = "def test_clean(): pass"
"""A second file: the first is over before the session is, and what the session's fixture started still runs."""


@pytest.mark.slow  # it loads torch
def test_the_test_that_leaves_something_is_named(tmp_path: Path) -> None:
    (tmp_path / "test_leaving.py").write_text(TESTS)
    (tmp_path / "test_leaving_nothing.py").write_text(CLEAN)
    errors = Errors()
    plain = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-p",
        "no:cov",
        f"--rootdir={tmp_path}",
        "--import-mode=importlib",
    ]
    pytest.main([*plain, str(tmp_path)], plugins=[Leftovers(patience_s=0), errors])
    assert list(errors.texts) == ["test_group", "test_group_again", "test_last"], errors.texts
    assert errors.texts["test_group"] == "test_leaving.py::test_group leaves the default process group."
    thread, process = sorted(errors.texts["test_last"].splitlines(), reverse=True)
    assert thread == "test_leaving.py::test_thread leaves the thread 'etude-waiting'."
    assert process.startswith("test_leaving.py::test_process leaves the process ") and process.endswith(" (sleep 2).")


class Errors:
    """The plug-in that notes the errors of teardowns, by test."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        assert report.when != "call" or report.passed, report.longreprtext
        if report.when == "teardown" and report.failed:
            self.texts[report.nodeid.partition("::")[2]] = report.longreprtext
