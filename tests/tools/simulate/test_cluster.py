"""Engines that divide their time: requests end when a simulation of each single token would say."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.tools.simulate.cluster import NEVER, Cluster, Engines


def cluster(engines: int = 1, slots: int = 4) -> Cluster:
    """Engines that draw a token in a tenth of a second, and a hundredth more for each request."""
    return Cluster(engines, slots, lambda running: 0.1 + 0.01 * running, lambda step, tokens: 0.0)


def ends(engines: Engines) -> dict[int, float]:
    """The time at which each request ends, if nothing else comes."""
    result: dict[int, float] = {}
    while engines.next_end < NEVER:
        now = engines.next_end
        result[engines.end(now)] = now
    return result


def test_requests_on_one_engine_slow_each_other_down() -> None:
    engines = Engines(cluster(), lambda request: None)
    engines.submit(0.0, 1, 100)
    engines.submit(0.0, 2, 50)
    assert ends(engines) == {2: pytest.approx(50 * 0.12), 1: pytest.approx(50 * 0.12 + 50 * 0.11)}


def test_a_request_goes_to_the_engine_with_the_fewest_and_waits_where_all_are_full() -> None:
    started: list[int] = []
    engines = Engines(cluster(engines=2, slots=1), started.append)
    for request in range(4):
        engines.submit(0.0, request, 100 if request == 0 else 10)
    assert started == [0, 1] and len(engines.line) == 2
    assert ends(engines) == {
        0: pytest.approx(11.0),
        1: pytest.approx(1.1),
        2: pytest.approx(2.2),
        3: pytest.approx(3.3),
    }


def test_an_engine_that_is_lost_gives_its_requests_back_and_they_begin_anew() -> None:
    started: list[int] = []
    engines = Engines(cluster(engines=2, slots=1), started.append)
    for request in range(3):
        engines.submit(0.0, request, 10)
    engines.lose(0, 0.5)
    assert [request for request, _ in engines.line] == [0, 2] and not engines.is_up(0)
    engines.restore(0, 0.7)
    assert started == [0, 1, 0] and ends(engines) == pytest.approx({1: 1.1, 0: 1.8, 2: 2.2})


@given(st.integers(0, 10**9))
@settings(max_examples=40)
def test_ends_are_those_of_a_plain_simulation(seed: int) -> None:
    """A plain one keeps what is left of each request, and moves all of them at every event."""
    chance = random.Random(seed)
    shape = cluster(engines=1, slots=chance.randint(1, 4))
    engines = Engines(shape, lambda request: None)
    arrivals = sorted((round(chance.uniform(0, 20), 2), chance.randint(1, 60)) for _ in range(20))
    running: dict[int, float] = {}
    line: list[int] = []
    now = 0.0
    expected: dict[int, float] = {}
    found: dict[int, float] = {}
    left = dict(enumerate(work for _, work in arrivals))
    coming = list(enumerate(at for at, _ in arrivals))
    while coming or running:
        token_s = shape.token_s(len(running)) if running else NEVER
        first = min(running, key=lambda request: running[request], default=-1)
        end = now + running[first] * token_s if running else NEVER
        at = min(end, coming[0][1] if coming else NEVER)
        for request in running:
            running[request] -= (at - now) / token_s
        now = at
        if at == end:
            del running[first]
            expected[first] = now
            found[engines.end(engines.next_end)] = now
            if line:
                request = line.pop(0)
                running[request] = left[request]
        else:
            request, _ = coming.pop(0)
            engines.submit(now, request, left[request])
            if len(running) < shape.slots:
                running[request] = left[request]
            else:
                line.append(request)
        assert len(engines.line) == len(line)
        assert engines.next_end == pytest.approx(
            min((now + rest * shape.token_s(len(running)) for rest in running.values()), default=NEVER)
        )
    assert found == pytest.approx(expected)


def test_the_work_that_was_done_is_counted() -> None:
    engines = Engines(cluster(engines=3), lambda request: None)
    for request in range(5):
        engines.submit(0.0, request, 20 + request)
    last = max(ends(engines).values())
    engines.count(last)
    assert engines.drawn == pytest.approx(sum(range(20, 25))) and 0 < engines.busy_s <= 3 * last
