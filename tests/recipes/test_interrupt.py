"""Ctrl-C, by real signals: the first ends the step, saves, and says how to resume; the second ends the run at once."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from etude.cli import main
from etude.recipes.interrupt import Interrupt
from etude.store import Phase, open_store
from tests.recipes.rewards import planned
from tests.recipes.runs import Captured, options, same, step_metrics, weights

INT, TERM = signal.SIGINT, signal.SIGTERM
CODE = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
CODE += "from etude.cli import main; sys.exit(main())"


@pytest.mark.parametrize(("number", "again"), [(INT, "Press Ctrl-C once more"), (TERM, "Send the signal once more")])
def test_the_first_signal_is_recorded_and_the_second_raises(number: signal.Signals, again: str) -> None:
    messages: list[str] = []
    before = signal.getsignal(INT)
    with Interrupt(messages.append) as interrupt:
        assert not interrupt.stop_requested
        os.kill(os.getpid(), number)
        assert interrupt.stop_requested and len(messages) == 1 and f"{again} to stop at once." in messages[0]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), INT)
    assert signal.getsignal(INT) == before


def test_before_the_first_step_one_signal_is_enough() -> None:
    messages: list[str] = []
    with Interrupt(messages.append) as interrupt:
        interrupt.may_finish_step = False
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), INT)
        assert interrupt.stop_requested and messages == ["Stopping: no step has started yet."]


def test_outside_the_main_thread_no_signal_is_caught() -> None:
    before = signal.getsignal(INT)
    seen: list[object] = []

    def enter() -> None:
        with Interrupt(lambda _: None) as interrupt:
            seen.extend([signal.getsignal(INT), interrupt.stop_requested])

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [before, False]


@pytest.mark.parametrize("number", [INT, TERM])
def test_the_first_signal_ends_the_step_and_saves(
    number: signal.Signals, world: Path, whole: Path, tmp_path: Path, capsys: Captured
) -> None:
    words = ["train", *options(world, directory=tmp_path / "a run", steps=4)]
    with planned({30: number}):
        assert main(words) == 130
    message = capsys.readouterr().err
    assert "Stopping after this step" in message and "Traceback" not in message
    command = message.partition("Go on with: ")[2].splitlines()[0]
    assert "Stopped after step 3 of 4" in message and [step["step"] for step in step_metrics(tmp_path / "a run")] == [
        1,
        2,
        3,
    ]
    assert main(shlex.split(command)[1:]) == 0
    assert [step["step"] for step in step_metrics(tmp_path / "a run")] == [1, 2, 3, 4]
    assert not any(step["replayed"] for step in step_metrics(tmp_path / "a run"))
    assert same(weights(tmp_path / "a run"), weights(whole))


def test_the_second_signal_ends_the_run_now_with_the_journal_whole(
    world: Path, whole: Path, tmp_path: Path, capsys: Captured
) -> None:
    run = tmp_path / "run"
    with planned({30: INT, 31: TERM}):  # two signals of one kind at once are one to the system
        assert main(["train", *options(world, directory=run, steps=4)]) == 130
    message = capsys.readouterr().err
    assert "Stopped after" not in message and "Traceback" not in message and "never" not in message
    assert "Stopped at once, in step 3. No step was saved yet; the answers" in message and "train --resume" in message
    store = open_store(run / "journal.sqlite")
    assert store.admitted().keys() == {1, 2} and store.rollouts(Phase.RUNNING)
    assert {(s.kind, s.id): s for s in [*store.tasks(), *store.rollouts()]}.items() <= store.replay().items()
    store.close()
    assert main(["train", "--resume", str(run)]) == 0
    assert same(weights(run), weights(whole))


def test_a_signal_in_the_last_step_is_no_error(world: Path, tmp_path: Path, capsys: Captured) -> None:
    with planned({20: INT}):
        assert main(["train", *options(world, directory=tmp_path / "run", steps=2)]) == 0
    assert "Stopped after" not in capsys.readouterr().err and len(step_metrics(tmp_path / "run")) == 2


def test_a_stopped_sweep_starts_no_other_run(world: Path, tmp_path: Path) -> None:
    with planned({5: INT}):
        assert main(["train", "--multirun", *options(world, directory=tmp_path, seed="0,1")]) == 130
    assert [path.name for path in tmp_path.iterdir()] == ["0-seed-0"]


def test_a_separate_process_ends_as_a_shell_expects(world: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    running = subprocess.Popen(
        [sys.executable, "-c", CODE, "train", *options(world, directory=run, steps=100_000)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 120
        while running.poll() is None and time.monotonic() < deadline:
            if (run / "metrics.jsonl").exists() and step_metrics(run):
                break
            time.sleep(0.05)
        running.send_signal(INT)
        _, message = running.communicate(timeout=60)
    finally:
        running.kill()
    assert running.returncode == 130 and "Traceback" not in message
    assert f"etude train --resume {run}" in message.partition("Go on with: ")[2]
    assert len(list((run / "checkpoints").glob("step-*"))) == 1
    done = len(step_metrics(run))
    assert f"Stopped after step {done} of 100000" in message
