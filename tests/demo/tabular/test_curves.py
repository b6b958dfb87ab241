"""The curves of a comparison: as blocks, as lines of text, and as a picture."""

from __future__ import annotations

import io
from pathlib import Path

from matplotlib.image import imread
from rich.console import Console

from etude.config.compose import compose
from etude.demo.tabular.compare import ComparedRun
from etude.demo.tabular.curves import LiveTable, draw_curves
from etude.demo.tabular.run import DemoRun

RUN = compose(DemoRun, ["steps=4"])


def entry(name: str = "ppo", top: float = 0.95) -> ComparedRun:
    return ComparedRun(name, RUN, curve=[0.1, 0.3, 0.2, 0.6, top], optimum=1.0, seconds=1.5)


def test_the_share_counts_from_the_start_to_the_optimum() -> None:
    assert abs(entry(top=0.55).share - 0.5) < 1e-12 and not entry(top=0.55).learnt
    assert entry().learnt
    assert entry(top=0.0).share < 0


def test_without_a_terminal_a_finished_entry_is_one_line() -> None:
    output = io.StringIO()
    entries = [entry(), ComparedRun("dppo", refused="It cannot be.")]
    with LiveTable(Console(file=output, width=80), entries) as screen:
        screen.on_step()
        assert output.getvalue() == ""
        for one in entries:
            screen.on_finish(one)
    first, second = output.getvalue().splitlines()
    assert first.startswith("ppo ") and "0.100 → 0.950" in first and "94%" in first and "1.5 s" in first
    assert second.split() == ["dppo", "refused,", "see", "below"]


def test_on_a_terminal_the_table_grows() -> None:
    output = io.StringIO()
    with LiveTable(Console(file=output, width=100, force_terminal=True, force_interactive=True), [entry()]) as screen:
        screen.on_step()
    shown = output.getvalue()
    assert "trained by" in shown and "ppo" in shown and "▁" in shown


def test_the_picture_has_a_panel_for_each(tmp_path: Path) -> None:
    draw_curves([entry()], tmp_path / "one.png")
    draw_curves([entry(str(i), 0.1 * i) for i in range(7)], tmp_path / "seven.png")
    one, seven = imread(tmp_path / "one.png"), imread(tmp_path / "seven.png")
    assert one.std() > 0.01  # something is drawn on it
    assert seven.shape[0] > one.shape[0] and seven.shape[1] > one.shape[1]
