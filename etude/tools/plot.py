"""`etude plot RUN…`: the curves of one or several runs, as a PNG and in the terminal.

The PNG has a panel for each metric and a color for each run; raw values are faint, smoothed values strong. The
terminal has a sparkline for each metric and run, from the lowest value (lowest block) to the highest.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from os.path import commonpath
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from etude.config.suggestions import suggest_name
from etude.errors import ConfigError
from etude.observe import format_number, make_console
from etude.observe.plotting import GOOD_COLOR, TEXT_COLOR, choose_blocks, make_figure, sparkline, style_panel
from etude.observe.step_history import Curve
from etude.tools.metric_curves import DEFAULT_METRICS, RunCurves, read_curves

PICTURE = "plot.png"
COLOURS = (GOOD_COLOR, "#c2410c", "#4338ca", "#b45309", "#be185d", "#0369a1", "#4d7c0f", "#57534e")
MOST_RUNS = len(COLOURS)
MOST_COLUMNS = 3
WINDOWS = 30
"""The smoothing window of a curve is about its length divided by this number."""
SPARSE = 30
"""A curve of at most this many points is drawn with markers."""


def plot(
    runs: Sequence[Path], metrics: Sequence[str] = (), console: Console | None = None, into: Path | None = None
) -> Path:
    """Plot runs as a PNG and on the console, and return the path of the PNG.

    metrics: names, with `*` for any characters; empty is `DEFAULT_METRICS`. into: the PNG; None writes to the directory
    of a single run, and to the current directory for several runs.
    """
    console = make_console() if console is None else console
    if len(runs) > MOST_RUNS:
        raise ConfigError(f"{len(runs)} runs were named, and one plot has colors for {MOST_RUNS}. Name fewer.")
    histories = [read_curves(run) for run in dict.fromkeys(runs)]
    selected = _select_metrics(histories, metrics)
    names = _run_names([history.directory for history in histories])
    path = into or (histories[0].directory / PICTURE if len(histories) == 1 else Path(PICTURE))
    path.parent.mkdir(parents=True, exist_ok=True)
    draw(histories, names, selected, path)
    for history in filter(lambda history: history.problem, histories):
        console.print(Text(f"{history.directory}: {history.problem}", "yellow"), soft_wrap=True)
    console.print(_table(histories, names, selected, console))
    console.print(Text.assemble(("picture  ", "dim"), str(path)), soft_wrap=True)
    return path


def draw(histories: Sequence[RunCurves], names: Sequence[str], metrics: Sequence[str], path: Path) -> None:
    """Draw the PNG: a panel for each metric, a color for each run."""
    title = names[0] if len(names) == 1 else ""
    steps = [curve.steps for history in histories for name, curve in history.curves.items() if name in metrics]
    first, last = min(int(curve_steps[0]) for curve_steps in steps), max(int(curve_steps[-1]) for curve_steps in steps)
    figure, panels, _ = make_figure(len(metrics), title, most_columns=MOST_COLUMNS, panel=(3.3, 2.1))
    for panel, metric in zip(panels, metrics, strict=True):
        curves = [history.curves.get(metric) for history in histories]
        for curve, colour in zip(curves, COLOURS, strict=False):
            if curve is not None:
                _draw_curve(panel, curve, colour)
        single = curves[0] if len(curves) == 1 else None
        style_panel(
            panel, metric, "" if single is None else format_number(smooth_values(single.values)[-1]), COLOURS[0]
        )
        panel.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        panel.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
        panel.margins(y=0.1)
        panel.set_xlim(first - 0.02 * (last - first), last + 0.02 * (last - first) + (last == first))
    if len(names) > 1:
        _legend(figure, names)
    figure.savefig(path)


def smooth_values(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Smooth values by a weighted mean of their neighbors, with larger weights for nearer ones."""
    reach = len(values) // WINDOWS
    weights = 1.0 + reach - np.abs(np.arange(-reach, reach + 1))
    mean: NDArray[np.float64] = np.convolve(values, weights, "same") / np.convolve(
        np.ones_like(values), weights, "same"
    )
    return mean


def _draw_curve(panel: Axes, curve: Curve, colour: str) -> None:
    smooth = smooth_values(curve.values)
    dots = {"marker": "o", "markersize": 2.5} if len(curve) <= SPARSE else {}
    if not dots:
        panel.plot(curve.steps, curve.values, color=colour, linewidth=0.7, alpha=0.28, zorder=2)
    panel.plot(curve.steps, smooth, color=colour, linewidth=1.7, zorder=3, solid_capstyle="round", **dots)  # type: ignore[arg-type]
    panel.plot(curve.steps[-1], smooth[-1], "o", color=colour, markersize=3.8, zorder=4, clip_on=False)


def _legend(figure: Figure, names: Sequence[str]) -> None:
    lines = [Line2D([], [], color=colour, linewidth=2.2) for colour, _ in zip(COLOURS, names, strict=False)]
    figure.legend(
        lines,
        names,
        loc="outside upper left",
        ncols=min(len(names), 4),
        frameon=False,
        fontsize=8,
        labelcolor=TEXT_COLOR,
    )


def _table(histories: Sequence[RunCurves], names: Sequence[str], metrics: Sequence[str], console: Console) -> Table:
    """Return the console table, with a sparkline for each metric of each run."""
    blocks, arrow = choose_blocks(console)
    several = len(names) > 1
    label_width = max(map(len, metrics)) + (max(map(len, names)) + 2 if several else 0) + 26
    width = max(8, min(48, console.width - label_width))
    table = Table(box=None, pad_edge=False, show_header=False)
    for metric in metrics:
        curves = {name: history.curves.get(metric) for name, history in zip(names, histories, strict=True)}
        smoothed = {name: smooth_values(curve.values) for name, curve in curves.items() if curve is not None}
        low, high = min(map(np.min, smoothed.values())), max(map(np.max, smoothed.values()))
        top = high if high > low else low + 1.0
        for index, (name, values) in enumerate(smoothed.items()):
            cells = [Text(metric if index == 0 else "", "bold")]
            cells += [Text(name, "dim")] if several else []
            cells.append(Text(sparkline(values.tolist(), float(low), float(top), width, blocks), "cyan"))
            cells.append(Text(f"{format_number(values[0])} {arrow} {format_number(values[-1])}"))
            table.add_row(*cells)
    return table


def _select_metrics(histories: Sequence[RunCurves], patterns: Sequence[str]) -> list[str]:
    """Return the metrics to draw, in the order of the patterns."""
    available = list(dict.fromkeys(name for history in histories for name in history.curves))
    listed = f"The metrics are {', '.join(sorted(available))}."
    selected: dict[str, None] = {}
    for pattern in patterns or DEFAULT_METRICS:
        matches = [name for name in available if fnmatchcase(name, pattern)]
        if patterns and not matches:
            raise ConfigError(f"No run here has a metric '{pattern}'.{suggest_name(pattern, available)} {listed}")
        selected |= dict.fromkeys(matches)
    if not selected:
        raise ConfigError(f"The runs have none of the default metrics. Name some with --metrics. {listed}")
    return list(selected)


def _run_names(directories: Sequence[Path]) -> list[str]:
    """Return a name for each run: its path without the common prefix."""
    paths = [directory.resolve() for directory in directories]
    if len(paths) == 1:
        return [paths[0].name]
    shared = commonpath(paths)
    return [path.relative_to(shared).as_posix() if path != Path(shared) else path.name for path in paths]
