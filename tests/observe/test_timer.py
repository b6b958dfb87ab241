"""The timer, driven by a clock that the test moves."""

from __future__ import annotations

import pytest

from etude.observe import Timer
from tests.observe.clock import Clock


def test_phases_nest_add_up_and_have_a_share() -> None:
    clock = Clock()
    timer = Timer(clock)
    with timer("update"):
        clock.wait(1.0)
        for _ in range(2):
            with timer("forward"):
                clock.wait(2.0)
    with timer("publish"):
        clock.wait(3.0)
    clock.wait(2.0)
    assert timer.metrics().reduce() == {
        "time/step": 10.0,
        "time/update": 5.0,
        "share/update": 0.5,
        "time/update/forward": 4.0,
        "share/update/forward": 0.4,
        "time/publish": 3.0,
        "share/publish": 0.3,
    }


def test_a_phase_that_raises_is_still_counted() -> None:
    clock = Clock()
    timer = Timer(clock)
    with pytest.raises(RuntimeError, match="no memory"), timer("outer"), timer("inner"):
        clock.wait(4.0)
        raise RuntimeError("no memory")
    with timer("after"):
        clock.wait(1.0)
    values = timer.metrics().reduce()
    assert (values["time/outer"], values["time/outer/inner"], values["time/after"]) == (4.0, 4.0, 1.0)


def test_shares_of_several_steps_are_weighted_by_their_length() -> None:
    clock = Clock()
    merged = None
    for inside, outside in ((1.0, 0.0), (1.0, 8.0)):
        timer = Timer(clock)
        with timer("x"):
            clock.wait(inside)
        clock.wait(outside)
        metrics = timer.metrics()
        if merged is None:
            merged = metrics
        else:
            merged.merge(metrics)
    assert merged is not None
    assert merged.reduce() == {"time/step": 10.0, "time/x": 2.0, "share/x": 0.2}


def test_a_step_that_took_no_time_has_no_shares() -> None:
    timer = Timer(Clock())
    with timer("x"):
        pass
    assert timer.metrics().reduce() == {"time/step": 0.0, "time/x": 0.0}


def test_the_default_clock_runs() -> None:
    timer = Timer()
    with timer("x"):
        sum(range(10_000))
    values = timer.metrics().reduce()
    assert 0 < values["time/x"] <= values["time/step"] < 60


def test_phases_are_reported_as_they_begin() -> None:
    phases: list[str] = []
    timer = Timer(Clock(), phases.append)
    with timer("update"), timer("forward"):
        pass
    assert phases == ["update", "update/forward"]
