"""The benchmark of growth: its arithmetic, and one point of it at a tiny size."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from bench.common import precision
from bench.growth import LINES, STATE, TOKENS, Point, ratios, shown, specification, timed


def measured(line: str, sizes: list[int], seconds: list[float], memory: list[int]) -> list[Point]:
    points = [Point(line, size, 64) if line == "tokens" else Point(line, TOKENS, size) for size in sizes]
    for point, time, more in zip(points, seconds, memory, strict=True):
        point.seconds, point.parameters, point.highest = [time, time, 9 * time], 10, 10 * STATE[precision()] + more
    return points


def test_growth_is_1_where_it_is_linear() -> None:
    tokens = measured("tokens", [100, 200, 400], [1.0, 2.0, 5.0], [10, 20, 20])
    assert ratios(tokens) == {"tokens: time": pytest.approx(1.25), "tokens: memory": 2.0}
    words = measured("vocabulary", [100, 200, 300, 500], [1.0, 1.5, 2.0, 4.0], [10, 10, 10, 15])
    assert ratios(words) == {"vocabulary: time": pytest.approx(2.0), "vocabulary: memory": 1.5}


def test_the_lines_go_as_far_as_they_say() -> None:
    assert [point.tokens for point in LINES["tokens"]][-1] == 256 * 2**10
    assert [point.vocabulary for point in LINES["vocabulary"]][-1] == 150_000
    assert all(point.tokens % TOKENS == 0 for line in LINES.values() for point in line)


def test_a_point_is_measured_in_a_process_of_its_own(tmp_path: Path) -> None:
    point, console = Point("tokens", TOKENS, 64), Console(file=io.StringIO(), width=120)
    assert specification(point, tmp_path)["groups"] == 1
    timed([point], 1, tmp_path, console)
    assert len(point.seconds) == 1 and 0 < point.state < point.highest
    console.print(shown([point]))
    assert isinstance(console.file, io.StringIO) and "1,024" in console.file.getvalue()
