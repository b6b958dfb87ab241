"""Curves as blocks of text, and panels on a sheet."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from matplotlib.image import imread
from rich.console import Console

from etude.observe.plotting import ASCII_BLOCKS, BLOCKS, GOOD_COLOR, choose_blocks, make_figure, sparkline, style_panel


def test_a_sparkline_goes_from_its_lowest_to_its_highest_block() -> None:
    assert sparkline([0.0, 0.5, 1.0], 0.0, 1.0, 10) == "▁▅█"
    assert sparkline([0.0, 1.0], 0.0, 1.0, 10, ASCII_BLOCKS) == "_#"


def test_a_sparkline_is_no_wider_than_asked_and_keeps_both_ends() -> None:
    line = sparkline([step / 100 for step in range(101)], 0.0, 1.0, 8)
    assert line == BLOCKS


def test_values_outside_the_range_stay_at_its_edge() -> None:
    assert sparkline([-3.0, 7.0], 0.0, 1.0, 2) == "▁█"
    assert sparkline([0.5], 0.0, 1.0, 2) in BLOCKS


@pytest.mark.parametrize(("encoding", "blocks"), [("utf-8", True), ("ascii", False)])
def test_a_console_uses_characters_that_its_file_can_encode(encoding: str, blocks: bool) -> None:
    console = Console(file=io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    assert choose_blocks(console) == ((BLOCKS, "→") if blocks else (ASCII_BLOCKS, ">"))


@pytest.mark.parametrize(("count", "columns", "rows"), [(1, 1, 1), (3, 3, 1), (4, 2, 2), (7, 3, 3)])
def test_a_sheet_has_the_requested_panels(tmp_path: Path, count: int, columns: int, rows: int) -> None:
    figure, panels, actual_columns = make_figure(count, "a title", most_columns=3, panel=(2.0, 1.5))
    assert len(panels) == count and actual_columns == columns
    grid = panels[0].get_gridspec()
    assert grid is not None and grid.nrows == rows
    style_panel(panels[0], "reward", "0.5", GOOD_COLOR)
    figure.savefig(tmp_path / "sheet.png")
    assert imread(tmp_path / "sheet.png").std() > 0.01
