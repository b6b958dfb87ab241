"""Curves in a shared style: sparklines for the terminal, and figures with small panels."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from rich.console import Console

BLOCKS, ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.-~=+*#"
TEXT_COLOR = "#22313f"
GOOD_COLOR = "#0f766e"
BAD_COLOR = "#c2410c"
GRID_COLOR = "#d5dbe3"
TITLE_CHARACTERS = 33
"""The characters above a panel from which the name is smaller, so that it does not reach the value."""


def sparkline(curve: Sequence[float], low: float, high: float, width: int, blocks: str = BLOCKS) -> str:
    """Return a curve as one line of at most `width` blocks. Values outside the range are drawn at its edge."""
    count = min(width, len(curve))
    points = [curve[round(i * (len(curve) - 1) / max(count - 1, 1))] for i in range(count)]
    heights = [min(max((value - low) / (high - low), 0.0), 1.0) for value in points]
    return "".join(blocks[round(height * (len(blocks) - 1))] for height in heights)


def choose_blocks(console: Console) -> tuple[str, str]:
    """Return the blocks of a sparkline, and an arrow, in characters that the console can encode."""
    text = BLOCKS + "→"
    is_encoded = text.encode(console.encoding, "replace").decode(console.encoding) == text
    return (BLOCKS, "→") if is_encoded else (ASCII_BLOCKS, ">")


def make_figure(
    count: int, title: str, *, most_columns: int, panel: tuple[float, float], shared: bool = False
) -> tuple[Figure, list[Axes], int]:
    """Return a figure with `count` panels, the panels, and the number of columns.

    panel: the width and height of a panel, in inches. shared: whether all panels have the same axes. The x axis is the
    step.
    """
    rows = math.ceil(count / most_columns)
    columns = math.ceil(count / rows)
    width, height = panel
    figure = Figure(
        figsize=(max(width * columns, 6.0), max(height * rows, 2.6) + 0.95),
        dpi=150,
        layout=ConstrainedLayoutEngine(h_pad=0.09, w_pad=0.07),
        facecolor="white",
    )
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, color=TEXT_COLOR)
    figure.supxlabel("step", fontsize=8, color=TEXT_COLOR)
    panels = list(figure.subplots(rows, columns, sharex=shared, sharey=shared, squeeze=False).ravel())
    for unused in panels[count:]:
        unused.remove()
    return figure, panels[:count], columns


def style_panel(panel: Axes, name: str, value: str, colour: str) -> None:
    """Style a panel: the name on the left, the last value on the right, and thin axes."""
    size = 9.0 * min(1.0, TITLE_CHARACTERS / (len(name) + len(value)))
    panel.set_title(name, loc="left", fontsize=size, fontweight="bold", color=TEXT_COLOR)
    panel.set_title(value, loc="right", fontsize=9, color=colour)
    panel.tick_params(labelsize=7, colors=TEXT_COLOR, length=2, width=0.6)
    panel.grid(axis="y", color=GRID_COLOR, linewidth=0.4)
    panel.set_axisbelow(True)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        panel.spines[side].set_color(GRID_COLOR)
