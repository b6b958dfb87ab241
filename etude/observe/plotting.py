"""Curves, as every picture and every terminal of Etude's shows them: lines of blocks, and sheets of small panels."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from rich.console import Console

__all__ = [
    "ASCII_BLOCKS",
    "BAD_COLOR",
    "BLOCKS",
    "GOOD_COLOR",
    "GRID_COLOR",
    "TEXT_COLOR",
    "can_encode",
    "make_figure",
    "sparkline",
    "style_panel",
]

BLOCKS, ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.-~=+*#"
TEXT_COLOR, GOOD_COLOR, BAD_COLOR, GRID_COLOR = "#22313f", "#0f766e", "#c2410c", "#d5dbe3"


def sparkline(curve: Sequence[float], low: float, high: float, width: int, blocks: str = BLOCKS) -> str:
    """A curve as one line of blocks, `width` of them or one for each point; what leaves the range stays at its edge."""
    count = min(width, len(curve))
    points = [curve[round(i * (len(curve) - 1) / max(count - 1, 1))] for i in range(count)]
    heights = [min(max((value - low) / (high - low), 0.0), 1.0) for value in points]
    return "".join(blocks[round(height * (len(blocks) - 1))] for height in heights)


def can_encode(console: Console, text: str) -> bool:
    """Whether the console's file can carry these letters."""
    return text.encode(console.encoding, "replace").decode(console.encoding) == text


def make_figure(
    count: int, title: str, *, most_columns: int, panel: tuple[float, float], shared: bool = False
) -> tuple[Figure, list[Axes], int]:
    """A figure with so many panels, each about so wide and high in inches: the figure, the panels, and its columns.

    The panels run over steps; `shared` gives all of them the same axes.
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
    """What all panels have in common: the name on the left, the last value on the right, and little else."""
    panel.set_title(name, loc="left", fontsize=9, fontweight="bold", color=TEXT_COLOR)
    panel.set_title(value, loc="right", fontsize=9, color=colour)
    panel.tick_params(labelsize=7, colors=TEXT_COLOR, length=2, width=0.6)
    panel.grid(axis="y", color=GRID_COLOR, linewidth=0.4)
    panel.set_axisbelow(True)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        panel.spines[side].set_color(GRID_COLOR)
