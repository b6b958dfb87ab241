"""A sink that fails, or never answers, does not stop a run."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from etude.observe import Sink
from etude.observe.sinks import BackgroundSink, RunInfo, SafeSink

RUN = RunInfo(name="demo", directory=Path("unused"))


class Recorder(Sink):
    """A sink that keeps its input, and fails where the test says."""

    name = "recorder"

    def __init__(self, fails_in: str = "") -> None:
        self.fails_in = fails_in
        self.calls: list[str] = []
        self.threads: set[str] = set()

    def _do(self, what: str) -> None:
        self.calls.append(what)
        self.threads.add(threading.current_thread().name)
        if what == self.fails_in:
            raise OSError(f"no space left for {what}")

    def open(self, run: RunInfo) -> None:
        self._do(f"open {run.name}")

    def log(self, step: int, values: Mapping[str, float], *, late: bool = False) -> None:
        self._do(f"log {step} {dict(values)}")

    def close(self) -> None:
        self._do("close")


def drive(sink: SafeSink) -> None:
    sink.open(RUN)
    sink.log(1, {"a": 1.0})
    sink.log(2, {"a": 2.0})
    sink.close()


ALL = ["open demo", "log 1 {'a': 1.0}", "log 2 {'a': 2.0}", "close"]


@pytest.mark.parametrize("fails_in", ALL)
def test_a_failing_sink_warns_once_and_is_left_out(fails_in: str, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder(fails_in)
    drive(SafeSink(recorder))
    failed = ALL.index(fails_in)
    assert recorder.calls == [*ALL[: failed + 1], "close"]
    warned = capsys.readouterr().err
    assert warned.count("WARNING") == 1
    doing = ["opening", "logging step 1", "logging step 2", "closing"][failed]
    assert f"The recorder sink failed while {doing} and is switched off" in warned
    assert f"OSError: no space left for {fails_in}" in warned


def test_a_working_sink_gets_all_calls_without_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder()
    drive(SafeSink(recorder))
    assert recorder.calls == ALL
    assert capsys.readouterr().err == ""


def test_a_background_sink_gets_the_same_calls_on_its_own_thread() -> None:
    recorder = Recorder()
    drive(SafeSink(BackgroundSink(recorder)))
    assert recorder.calls == ALL
    assert recorder.threads == {"etude-recorder"}


def test_values_are_copied_when_they_are_queued() -> None:
    recorder, values = Recorder(), {"a": 1.0}
    sink = BackgroundSink(recorder)
    sink.open(RUN)
    sink.log(1, values)
    values["a"] = 9.0
    sink.close()
    assert recorder.calls[1] == "log 1 {'a': 1.0}"


@pytest.mark.parametrize("fails_in", ALL)
def test_a_failure_in_the_background_is_reported_once(fails_in: str, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder(fails_in)
    drive(SafeSink(BackgroundSink(recorder)))
    warned = capsys.readouterr().err
    assert warned.count("WARNING") == 1
    assert f"OSError: no space left for {fails_in}" in warned
    assert recorder.calls == [*ALL[: ALL.index(fails_in) + 1], "close"]
    assert recorder.threads == {"etude-recorder"}


class Leaving(Recorder):
    """A library that exits the process where it should raise, and is slow to close."""

    def log(self, step: int, values: Mapping[str, float], *, late: bool = False) -> None:
        raise SystemExit("no licence")

    def close(self) -> None:
        time.sleep(0.3)
        super().close()


def test_a_library_that_exits_is_waited_for_and_warned_about(capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Leaving()
    sink = SafeSink(BackgroundSink(recorder))
    drive(sink)
    assert recorder.calls == ["open demo", "close"] and not sink.alive
    assert "SystemExit ended it: no licence" in capsys.readouterr().err


def test_a_failure_is_reported_even_if_closing_never_ends(
    release: threading.Event, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder(ALL[1])
    recorder.close = lambda: bool(release.wait()) and None  # type: ignore[assignment,method-assign]
    began = time.monotonic()
    drive(SafeSink(BackgroundSink(recorder, close_timeout=0.2)))
    assert time.monotonic() - began < 10
    assert f"OSError: no space left for {ALL[1]}" in capsys.readouterr().err


class Silent(Recorder):
    """A sink that does not return from `log` until the test lets it."""

    def __init__(self, release: threading.Event) -> None:
        super().__init__()
        self.release = release

    def log(self, step: int, values: Mapping[str, float], *, late: bool = False) -> None:
        super().log(step, values)
        self.release.wait()


@pytest.fixture
def release() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_a_sink_that_never_answers_costs_a_bounded_wait_at_the_end(
    release: threading.Event, capsys: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    drive(SafeSink(BackgroundSink(Silent(release), close_timeout=0.2)))
    assert 0.2 <= time.monotonic() - began < 10
    warned = capsys.readouterr().err
    assert warned.count("WARNING") == 1
    assert "did not finish within 0.2 s" in warned


def test_a_sink_that_never_answers_is_given_up_when_the_queue_is_full(
    release: threading.Event, capsys: pytest.CaptureFixture[str]
) -> None:
    sink = SafeSink(BackgroundSink(Silent(release), close_timeout=60.0, capacity=3))
    began = time.monotonic()
    sink.open(RUN)
    for step in range(1, 50):
        sink.log(step, {})
    sink.close()
    assert time.monotonic() - began < 10
    assert not sink.alive
    warned = capsys.readouterr().err
    assert warned.count("WARNING") == 1
    assert "3 calls are waiting for it" in warned


def test_a_sink_that_was_given_up_still_sends_what_waits_once_it_answers(release: threading.Event) -> None:
    recorder = Silent(release)
    sink = BackgroundSink(recorder, capacity=3)
    sink.open(RUN)
    taken = []
    with pytest.raises(TimeoutError):
        for step in range(1, 50):
            sink.log(step, {})
            taken.append(f"log {step} {{}}")
    release.set()
    sink._thread.join(10)
    assert recorder.calls == ["open demo", *taken, "close"]
