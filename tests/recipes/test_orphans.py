"""A command with agents at work may end in any way and leaves nothing: no runner, no program of a runner, and no child
of these."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.joined import LINGERS, LOOKER, Process, descendants, made, started
from tests.processes import gone

SOAK = pytest.mark.soak


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return made(tmp_path_factory.mktemp("world"))


def lingering(process: Process, pids: Path, within: float = 90.0) -> list[int]:
    """Return the processes once programs are at work: those they wrote down, and the processes between."""
    until = time.monotonic() + within
    while not (pids.exists() and len(pids.read_text().split()) >= 4):
        assert process.running.poll() is None and time.monotonic() < until, process.said
        time.sleep(0.05)
    return [*map(int, pids.read_text().split()), *descendants(process.running.pid)]


@pytest.mark.parametrize(
    ("strategy", "how"),
    [
        ("cs", "killed"),
        ("cs", "interrupted twice"),
        pytest.param("shm", "killed", marks=SOAK),
        pytest.param("shm", "interrupted twice", marks=SOAK),
    ],
)
def test_a_killed_run_leaves_no_process(strategy: str, how: str, options: list[str], tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    words = ["train", *options, f"agent.path={LINGERS}", f"agent.strategy={strategy}", f"directory={tmp_path / 'run'}"]
    with started(words, tmp_path / "log", PIDS=str(pids)) as train:
        processes = lingering(train, pids)
        if how == "killed":
            train.send_signal(signal.SIGKILL)
        else:
            train.send_signal()
            train.says("Ctrl-C|again|step is")
            train.send_signal()
        code = train.ends(60)
        assert code == (130 if how == "interrupted twice" else -9 if how == "killed" else code), train.said
        left = [pid for pid in [*processes, *map(int, pids.read_text().split())] if not gone(pid, within=15)]
        assert not left, train.said


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["cs", "shm"])
def test_an_interrupted_run_ends_its_step_and_leaves_no_process(
    strategy: str, options: list[str], tmp_path: Path
) -> None:
    words = ["train", *options, "steps=10000", f"agent.strategy={strategy}", f"directory={tmp_path / 'run'}"]
    with started(words, tmp_path / "log") as train:
        train.says("step +2/")
        processes = descendants(train.running.pid)
        train.send_signal()
        assert train.ends(60) == 130 and "Go on with" in train.said, train.said
        assert all(gone(pid) for pid in processes) and "Traceback" not in train.said


@pytest.mark.soak
@pytest.mark.parametrize("how", ["killed", "interrupted twice"])
def test_a_killed_runner_and_its_store_leave_no_process(how: str, options: list[str], tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    with started(["store", str(tmp_path / "store"), "--listen", "127.0.0.1:0"], tmp_path / "store.log") as store:
        url = store.says(r"is served at (http://\S+?)\. ")[1]
        store.says("A trainer:")
        admin, key = ((tmp_path / "store" / f"{who}.key").read_text() for who in ("admin", "runner"))
        words = ["train", *options, f"directory={tmp_path / 'run'}", f"agent.store={url}", "agent.runners=0"]
        with (
            started(
                ["runner", LINGERS, "--url", url], tmp_path / "runner.log", PIDS=str(pids), ETUDE_STORE_KEY=key
            ) as r,
            started(words, tmp_path / "train.log", ETUDE_STORE_KEY=admin),
        ):
            processes = lingering(r, pids)
            if how == "killed":
                r.send_signal(signal.SIGKILL)
            else:
                r.send_signal()
                time.sleep(0.5)
                r.send_signal()
            assert r.ends(60) == (-9 if how == "killed" else 0), r.said
            assert not [pid for pid in [*processes, *map(int, pids.read_text().split())] if not gone(pid, within=15)]


@pytest.mark.soak
def test_a_runner_waits_for_a_store_that_comes_back(options: list[str], tmp_path: Path) -> None:
    """The store is killed during a run, and started again at the same address: runner and trainer continue."""
    keep = ["store", str(tmp_path / "store"), "--listen"]
    with started([*keep, "127.0.0.1:0"], tmp_path / "store.log") as store:
        url = store.says(r"is served at (http://\S+?)\. ")[1]
        store.says("A trainer:")
        admin, key = ((tmp_path / "store" / f"{who}.key").read_text() for who in ("admin", "runner"))
        words = ["train", *options, "steps=6", f"directory={tmp_path / 'run'}", f"agent.store={url}", "agent.runners=0"]
        with (
            started(["runner", LOOKER, "--url", url], tmp_path / "runner.log", ETUDE_STORE_KEY=key) as runner,
            started(words, tmp_path / "train.log", ETUDE_STORE_KEY=admin) as train,
        ):
            train.says("step 1/6")
            store.send_signal(signal.SIGKILL)
            store.ends()
            with started([*keep, url.removeprefix("http://")], tmp_path / "again.log"):
                assert train.ends(120) == 0, train.said
                runner.send_signal()
                assert runner.ends(30) == 0, runner.said
