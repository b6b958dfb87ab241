"""RunLog: steps in, one line of numbers per step out, also if sinks fail."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from etude.observe import Sink
from etude.observe.log import configure_logging
from etude.observe.metrics import Last, Mean, Metrics, Sum
from etude.observe.run_log import RunLog
from etude.observe.sinks import RunInfo
from tests.observe.clock import Clock


class Table(Sink):
    """A sink that keeps the rows it is given."""

    name = "table"

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}
        self.closed = 0

    def open(self, run: RunInfo) -> None:
        self.run = run

    def log(self, step: int, values: Mapping[str, float], *, late: bool = False) -> None:
        assert step not in self.rows
        self.rows[step] = dict(values)

    def close(self) -> None:
        self.closed += 1


class Broken(Table):
    """A sink that fails at every step."""

    name = "broken"

    def log(self, step: int, values: Mapping[str, float], *, late: bool = False) -> None:
        raise ConnectionError(f"no route for step {step} with {sorted(values)}")


def run(steps: int | None = None) -> RunInfo:
    return RunInfo(name="demo", directory=Path("unused"), steps=steps)


def test_a_step_is_reduced_once_and_reaches_every_sink() -> None:
    clock, tables = Clock(), [Table(), Table()]
    with RunLog(tables, run(), clock=clock) as log, log.step(3) as at:
        with at.timer("update"):
            clock.wait(1.5)
        at.add(Metrics({"loss": Mean.over(2.0, 4)}))
        at.add({"loss": Mean.over(1.0, 1), "tokens": Sum.of(10)})
        clock.wait(0.5)
    row = {"loss": 0.6, "tokens": 10.0, "time/step": 2.0, "time/update": 1.5, "share/update": 0.75}
    assert tables[0].rows == tables[1].rows == {3: row}
    assert tables[0].run.name == "demo"


def test_a_step_that_raises_is_not_logged_and_the_exception_passes() -> None:
    table = Table()
    with pytest.raises(RuntimeError, match="out of memory"), RunLog([table], run()) as log:
        with log.step(1) as at:
            at.add({"loss": Mean.of(1.0)})
        with log.step(2) as at:
            at.add({"loss": Mean.of(99.0)})
            raise RuntimeError("out of memory")
    assert list(table.rows) == [1]
    assert table.closed == 1


def test_the_option_every_merges_steps_and_loses_none() -> None:
    table = Table()
    with RunLog([table], run(), every=3, clock=Clock()) as log:
        for step in range(1, 9):
            with log.step(step) as at:
                at.add({"loss": Mean.of(step), "tokens": Sum.of(step), "lr": Last.of(step)})
    rows = {step: (row["loss"], row["tokens"], row["lr"]) for step, row in table.rows.items()}
    assert rows == {3: (2.0, 6.0, 3.0), 6: (5.0, 15.0, 6.0), 8: (7.5, 15.0, 8.0)}


def test_the_last_step_is_written_without_waiting_for_the_close() -> None:
    table = Table()
    log = RunLog([table], run(steps=2), every=10)
    for step in (1, 2):
        with log.step(step) as at:
            at.add({"tokens": Sum.of(1)})
    assert table.rows[2]["tokens"] == 2.0
    log.close()
    assert list(table.rows) == [2]


def test_closing_twice_closes_once() -> None:
    table = Table()
    log = RunLog([table], run())
    log.close()
    log.close()
    assert table.closed == 1
    assert table.rows == {}


def test_a_broken_sink_takes_nothing_from_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    broken, table = Broken(), Table()
    with RunLog([broken, table], run()) as log:
        for step in (1, 2, 3):
            with log.step(step):
                pass
    assert list(table.rows) == [1, 2, 3]
    warned = capsys.readouterr().err
    assert warned.count("WARNING") == 1
    assert "The broken sink failed while logging step 1" in warned
    assert "ConnectionError: no route for step 1 with ['time/step']" in warned


def test_nan_is_logged_and_warned_about_once(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table()
    with RunLog([table], run()) as log:
        for step in (1, 2):
            with log.step(step) as at:
                at.add({"loss": Mean.of(math.nan), "kl": Mean.of(-math.inf)})
    assert math.isnan(table.rows[2]["loss"])
    assert table.rows[2]["kl"] == -math.inf
    warned = capsys.readouterr().err
    assert warned.count("WARNING") == 2
    assert "The metric 'loss' is nan at step 1" in warned
    assert "The metric 'kl' is -inf at step 1" in warned


def test_pending_steps_can_be_written_early() -> None:
    table = Table()
    with RunLog([table], run(), every=5, clock=Clock()) as log:
        for step in (1, 2):
            with log.step(step) as at:
                at.add({"tokens": Sum.of(step)})
        log.flush()
        log.flush()
        assert [(step, row["tokens"]) for step, row in table.rows.items()] == [(2, 3.0)]


def test_a_logged_step_is_not_written_again() -> None:
    table = Table()
    with RunLog([table], run(), clock=Clock(), last_written_step=2) as log:
        for step in (0, 1, 2, 3):
            with log.step(step) as at:
                at.add({"tokens": Sum.of(step)})
    assert [(step, row["tokens"]) for step, row in table.rows.items()] == [(3, 3.0)]


class Shown:
    """A display that records its calls."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def show_phase(self, step: int, name: str) -> None:
        self.calls.append((step, name))

    @contextmanager
    def progress(self, description: str, total: float | None) -> Iterator[Shown]:
        self.calls.append((description, total))
        yield self

    def advance(self, amount: float = 1.0) -> None:
        self.calls.append(amount)


def test_a_display_gets_the_phase_and_progress_of_a_step() -> None:
    shown = Shown()
    with (
        RunLog([], run(), display=shown) as log,
        log.step(3) as at,
        at.timer("collect"),
        log.progress("answers", 8) as bar,
    ):
        bar.advance(2)
    assert shown.calls == [(3, "collect"), ("answers", 8), 2]


def test_a_run_works_without_a_display() -> None:
    with RunLog([], run()) as log, log.progress("answers", 8) as bar:
        bar.advance()


@pytest.mark.parametrize("part", ["phase", "progress", "enter", "advance", "exit"])
def test_a_display_that_fails_disturbs_nothing(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    class Failing(Shown):
        def fail(self, at: str) -> None:
            if at == part:
                raise OSError(28, "No space left on device")

        def show_phase(self, step: int, name: str) -> None:
            self.fail("phase")

        def progress(self, description: str, total: float | None) -> Any:
            self.fail("progress")
            return self.shown()

        @contextmanager
        def shown(self) -> Iterator[Shown]:
            self.fail("enter")
            yield self
            self.fail("exit")

        def advance(self, amount: float = 1.0) -> None:
            self.fail("advance")

    configure_logging("info")
    done = []
    with RunLog([], run(), display=Failing()) as log, log.step(1) as at, at.timer("collect"):
        for _ in range(2):
            with log.progress("answers", 8) as bar:
                bar.advance()
                done.append(bar)
    assert len(done) == 2
    assert capsys.readouterr().err.count("The display failed and is switched off") == 1


def test_an_exception_passes_through_a_progress_bar() -> None:
    log = RunLog([], run(), display=Shown())
    with pytest.raises(RuntimeError, match="out of memory"), log.progress("answers", 8):
        raise RuntimeError("out of memory")
