"""The table at the end of a sweep: a line for each run, with its end and its last metrics."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from etude.observe import format_number, format_seconds
from etude.observe.jsonl import METRICS_FILE
from etude.recipes.run.directory import read_metrics

SHOWN = ("reward", "loss", "eval/mean@*", "eval/accuracy", "eval/loss")
"""The metrics that are shown, with `*` for any characters."""


def print_summary(console: Console, parent: Path, names: Sequence[str], failed: Collection[str]) -> None:
    """Print the table of a sweep's runs, in their order. parent: the directory of the sweep. failed: the names of runs
    that raised an error."""
    metrics = {name: _last_metrics(parent / name) for name in names}
    found = dict.fromkeys(metric for values in metrics.values() for metric in values)
    shown = [name for pattern in SHOWN for name in found if fnmatchcase(name, pattern)]
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("run", overflow="fold")
    for title in ("end", "step", *shown, "time"):
        table.add_column(title, justify="left" if title == "end" else "right")
    for name, values in metrics.items():
        end = "failed" if name in failed else "done" if values else "not begun"
        numbers = [format_number(values[metric]) if metric in values else "–" for metric in shown]
        step = f"{values['step']:.0f}" if values else "–"
        cells = [name, end, step, *numbers, format_seconds(values.get("time", 0.0))]
        table.add_row(*map(Text, cells), style="red" if end == "failed" else None)
    console.print()
    console.print(table)


def _last_metrics(directory: Path) -> dict[str, float]:
    """Return the last value of each metric of a run, and the seconds of all its steps as `time`; nothing without a
    step."""
    if not (directory / METRICS_FILE).is_file():
        return {}
    steps: Sequence[Mapping[str, float | None]] = read_metrics(directory)
    last = {name: value for step in steps for name, value in step.items() if value is not None}
    return last | {"time": sum(step.get("time/step") or 0.0 for step in steps)} if steps else {}
