"""A signal that comes while something is written is heard when it is done."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from etude.store import TaskIssued, open_store
from etude.store.shield import undisturbed


def test_an_interrupt_waits_for_the_end() -> None:
    done: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), undisturbed():
        os.kill(os.getpid(), signal.SIGINT)
        done.append("written")
    assert done == ["written"] and signal.getsignal(signal.SIGINT) is before


def test_what_was_raised_within_is_not_lost() -> None:
    with pytest.raises(KeyboardInterrupt) as told, undisturbed():
        os.kill(os.getpid(), signal.SIGINT)
        raise ValueError("the disk is full")
    assert isinstance(told.value.__context__, ValueError)


def test_off_the_main_thread_nothing_is_touched() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen: list[object] = []

    def work() -> None:
        with undisturbed():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]


def test_a_journal_is_whole_wherever_it_is_interrupted(tmp_path: Path) -> None:
    """An alarm strikes at any step of the library's; the journal stays one that can be written."""
    store, heard = open_store(tmp_path / "journal.sqlite"), 0

    def strike(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGALRM, strike)
    try:
        for task in range(60):
            signal.setitimer(signal.ITIMER_REAL, 0.0001 + task * 0.00002)
            try:
                for again in range(20):
                    store.append([TaskIssued(100 * task + again, 0, "sums", {"prompt": "1+1="})])
            except KeyboardInterrupt:
                heard += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    store.append([TaskIssued(9999, 0, "sums", {"prompt": "1+1="})])
    known = len(store.tasks())
    assert store.position == known and heard > 30
    store.close()
    again = open_store(tmp_path / "journal.sqlite")
    assert len(again.tasks()) == known
    again.close()
