"""A signal during a write is handled after the write."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from etude.store import open_store
from etude.store.journal.deferred_signals import defer_signals


def test_an_interrupt_waits_for_the_end_of_the_block() -> None:
    done: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), defer_signals():
        os.kill(os.getpid(), signal.SIGINT)
        done.append("written")
    assert done == ["written"] and signal.getsignal(signal.SIGINT) is before


def test_each_signal_is_handled_as_often_as_it_came() -> None:
    handled: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda number, _: handled.append(number)) for number in numbers}
    try:
        with defer_signals():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
                os.kill(os.getpid(), number)
            assert not handled
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert sorted(handled) == [signal.SIGINT, signal.SIGINT, signal.SIGTERM]


def test_a_handler_that_raises_does_not_prevent_the_others() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def both() -> None:
        with defer_signals():
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)

    def stop(*_: object) -> None:
        raise InterruptedError

    signal.signal(signal.SIGTERM, stop)
    try:
        with pytest.raises(KeyboardInterrupt) as raised:
            both()
        assert isinstance(raised.value.__context__, InterruptedError) and signal.getsignal(signal.SIGTERM) is stop
        with pytest.raises(InterruptedError):
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_exception_of_the_block_is_not_lost() -> None:
    with pytest.raises(KeyboardInterrupt) as raised, defer_signals():
        os.kill(os.getpid(), signal.SIGINT)
        raise ValueError("the disk is full")
    assert isinstance(raised.value.__context__, ValueError)


def test_outside_the_main_thread_handlers_are_not_changed() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen: list[object] = []

    def work() -> None:
        with defer_signals():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]


STRUCK = """
import os, signal, sys
from pathlib import Path
from etude.store import TaskIssued, open_store

def strike(*_):
    os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGALRM, strike)
store, heard = open_store(Path(sys.argv[1])), 0
for task in range(60):
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0001 + task * 0.00002)
        for again in range(20):
            store.append([TaskIssued(100 * task + again, 0, "sums", {"prompt": "1+1="})])
    except KeyboardInterrupt:
        heard += 1
signal.setitimer(signal.ITIMER_REAL, 0)
store.append([TaskIssued(9999, 0, "sums", {"prompt": "1+1="})])
print(heard, store.position, len(store.tasks()))
store.close()
"""


def test_a_journal_is_whole_wherever_it_is_interrupted(tmp_path: Path) -> None:
    """An interrupt may come at any step within SQLAlchemy; the journal can still be written.

    It runs in a separate process, because coverage measurement does not survive an interrupt.
    """
    path = tmp_path / "journal.sqlite"
    done = subprocess.run([sys.executable, "-c", STRUCK, str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    interrupts, position, known = map(int, done.stdout.split())
    assert interrupts > 30 and position == known
    store = open_store(path)
    assert len(store.tasks()) == known
    store.close()
