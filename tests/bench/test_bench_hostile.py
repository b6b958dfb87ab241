"""The table of hostile clients: its arithmetic, and two shapes beside a well-behaved client."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from bench.hostile import AIM_MS, Figure, measure, shown
from bench.hostile_client import SHAPES


def test_a_shape_that_keeps_others_waiting_is_marked() -> None:
    good = Figure("header", 1.0, AIM_MS, 200.0, 5.0, 100, {"431": 3}, 1.0)
    bad = Figure("note", 1.0, AIM_MS + 1, 200.0, 5.0, 100, {"413": 3, "none": 1}, 1.0)
    assert good.met and not bad.met
    console = Console(file=io.StringIO(), width=160)
    console.print(shown([good, bad]))
    assert isinstance(console.file, io.StringIO)
    output = console.file.getvalue()
    assert output.count("misses") == 1 and "413 × 3, none × 1" in output


@pytest.mark.slow
def test_others_are_answered_beside_a_hostile_client(tmp_path: Path) -> None:
    done: list[None] = []
    figures = measure(["header", "note"], 1.0, tmp_path, lambda: done.append(None))
    assert len(done) == 2 and set(figures[0].answers) <= {"431", "none"} and set(figures[1].answers) <= {"413", "none"}
    assert all(figure.requests > 0 and figure.longest < 10_000 for figure in figures)
    assert set(SHAPES) > {figure.name for figure in figures}
