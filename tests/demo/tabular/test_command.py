"""The demonstration restores the state of the process, and shows no secret anywhere."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from etude.cli import main
from etude.demo.tabular import command as module
from etude.demo.tabular.command import run_demo
from etude.demo.tabular.compare import ComparedRun
from tests.components import require

SHORT = ["loss=ppo", "steps=1", "groups=2", "group_size=4", "mini_batches=2"]


@pytest.fixture(autouse=True)
def log_as_it_was() -> Iterator[None]:
    """Restore Python's logging after each test."""
    root = logging.getLogger("etude")
    before = (list(root.handlers), root.level, root.propagate)
    yield
    root.handlers, root.level, root.propagate = before


def test_one_thread_is_used_and_the_number_is_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used, train = [], module.train_run  # type: ignore[attr-defined]

    def watched(entry: ComparedRun, directory: Path, stepped: object) -> None:
        used.append(torch.get_num_threads())
        train(entry, directory, lambda: None)

    monkeypatch.setattr(module, "train_run", watched)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        run_demo([*SHORT, f"directory={tmp_path}"])
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert used == [1]


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_the_log_shows_the_chosen_level(level: str, tmp_path: Path) -> None:
    run_demo([*SHORT, f"directory={tmp_path}", f"observe.level={level}"])
    assert logging.getLogger("etude").level == getattr(logging, level.upper())


def test_a_secret_is_shown_nowhere(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It is neither printed, nor in the warning of a tracker that repeats its address, nor in any file."""
    require("mlflow")
    secret = [
        "observe.mlflow.enabled=true",
        "observe.mlflow.uri='nosuch://me:hunter2pass@h/x','nosuch://me:hunter2pass@h/y'",
    ]
    assert main(["demo", "algorithms", *SHORT, f"directory={tmp_path}", *secret, "--multirun", "--json"]) == 0
    done = capfd.readouterr()
    assert "The mlflow sink failed" in done.err and "nosuch://me:***@h/x" in done.err
    assert "hunter2pass" not in done.out + done.err
    single = [secret[0], secret[1].partition(",")[0]]
    for form in ([], ["--yaml"]):
        assert main(["config", "show", *single, *form]) == 0
        shown = capfd.readouterr()
        assert "nosuch://me:***@h/x" in shown.out and "hunter2pass" not in shown.out + shown.err
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"run.yaml", "metrics.jsonl"} <= {path.name for path in files}
    for path in files:
        assert b"hunter2pass" not in path.read_bytes() and "hunter2pass" not in str(path)


def test_a_ctrl_c_that_a_library_swallows_is_handled_at_the_next_step() -> None:
    before = signal.getsignal(signal.SIGINT)
    with module._checking_interrupt() as check:
        check()
        with suppress(KeyboardInterrupt):  # as modules do that try to import another, and continue after any exception
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            check()
    assert signal.getsignal(signal.SIGINT) == before
