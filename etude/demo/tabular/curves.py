"""The output of the algorithms demo: live curves in the terminal, plain lines elsewhere, and a PNG.

In the terminal each run is a sparkline, from its start (lowest block) to the optimum (highest). The PNG has a panel for
each run, on the same axes, with the other runs in grey behind it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from matplotlib.axes import Axes
from rich.box import ASCII2, SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from etude.demo.tabular.compare import ComparedRun
from etude.observe import format_seconds
from etude.observe.plotting import (
    BAD_COLOR,
    BLOCKS,
    GOOD_COLOR,
    GRID_COLOR,
    TEXT_COLOR,
    choose_blocks,
    make_figure,
    sparkline,
    style_panel,
)

WIDEST = 40
REDRAW = 0.1
"""Seconds between two redraws of the terminal."""

MOST_COLUMNS = 5
TITLE = "Expected reward J, known exactly, after each step. Dashed: the optimum."


class LiveTable:
    """The table of the runs: live on a terminal; elsewhere one line for each finished run."""

    def __init__(self, console: Console, entries: Sequence[ComparedRun]) -> None:
        self._console = console
        self._entries = entries
        self._blocks, self._arrow = choose_blocks(console)
        self._drawn = 0.0
        self._live = None
        if console.is_interactive:
            self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *raised: object) -> None:
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
            self._live.stop()

    def on_step(self) -> None:
        """Redraw the table after a step of a run."""
        if self._live is not None and time.monotonic() - self._drawn > REDRAW:
            self._drawn = time.monotonic()
            self._live.update(self._table(), refresh=True)

    def on_finish(self, entry: ComparedRun) -> None:
        """Print the line of a finished or refused run."""
        if self._live is None:
            name = entry.name.ljust(max(len(other.name) for other in self._entries))
            line = Text("  ").join([Text(name), *self._cells(entry, WIDEST)])
            self._console.print(line, soft_wrap=True)

    def _table(self) -> Table:
        box = SIMPLE_HEAD if self._blocks is BLOCKS else ASCII2
        table = Table(box=box, pad_edge=False, header_style="dim")
        names = max(len(entry.name) for entry in self._entries)
        width = max(8, min(WIDEST, self._console.width - min(names, 20) - 40))
        table.add_column("trained by", no_wrap=True, overflow="ellipsis")
        table.add_column("J, step by step", no_wrap=True, overflow="crop")
        for title, figures in (("J", 13), ("gained", 6), ("time", 6)):  # on a narrow screen the other columns shrink
            table.add_column(title, justify="right", no_wrap=True, min_width=figures)
        for entry in self._entries:
            if entry.curve or entry.refused:
                table.add_row(Text(entry.name), *self._cells(entry, width))
        return table

    def _cells(self, entry: ComparedRun, width: int) -> list[Text]:
        if entry.refused:
            return [Text("refused, see below", "dim")]
        curve, low = entry.curve, entry.curve[0]
        # While it trains, the line grows to its final width.
        total = (entry.run.steps if entry.run is not None else 0) + 1
        length = max(1, round(min(width, total) * len(curve) / total))
        style = "green" if entry.learnt else "yellow"
        return [
            Text(sparkline(curve, low, entry.optimum, length, self._blocks), "cyan"),
            Text(f"{low:.3f} {self._arrow} {curve[-1]:.3f}"),
            Text(f"{entry.share:4.0%}", style),
            Text(format_seconds(entry.seconds), "dim"),
        ]


def draw_curves(entries: Sequence[ComparedRun], path: Path) -> None:
    """Draw the PNG with every run that was not refused."""
    drawn = [entry for entry in entries if not entry.refused]
    figure, panels, columns = make_figure(len(drawn), TITLE, most_columns=MOST_COLUMNS, panel=(2.35, 1.75), shared=True)
    for index, (panel, entry) in enumerate(zip(panels, drawn, strict=True)):
        for other in drawn:
            panel.plot(other.curve, color=GRID_COLOR, linewidth=0.7, zorder=1)
        _panel(panel, entry)
        panel.tick_params(labelbottom=index + columns >= len(drawn))
    figure.savefig(path)


def _panel(panel: Axes, entry: ComparedRun) -> None:
    colour = GOOD_COLOR if entry.learnt else BAD_COLOR
    panel.axhline(entry.optimum, color=TEXT_COLOR, linewidth=0.8, linestyle=(0, (4, 3)), zorder=2)
    panel.plot(entry.curve, color=colour, linewidth=1.8, zorder=3, solid_capstyle="round")
    panel.plot(len(entry.curve) - 1, entry.curve[-1], "o", color=colour, markersize=3.5, zorder=4, clip_on=False)
    panel.set_ylim(0, entry.optimum * 1.06)
    panel.set_xlim(0, len(entry.curve) - 1)
    style_panel(panel, entry.name, f"{entry.curve[-1]:.3f}", colour)
