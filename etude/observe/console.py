"""The console output of a run.

On a terminal: one line per step above a live progress bar, which also names the phase of the step. Elsewhere (a file, a
pipe, a CI log): plain lines. The console never disturbs the run, also if its reader goes away, or if standard output is
closed or takes only ASCII. rich detects the terminal's features, and respects NO_COLOR, COLUMNS and TERM.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import ClassVar, Protocol, TextIO

from rich.cells import cell_len
from rich.console import Console, OverflowMethod
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskProgressColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Column
from rich.text import Text

from etude.observe.config import ConsoleStyle
from etude.observe.sinks import RunInfo, Sink

_DAY = 24 * 3600.0
NARROW, WIDE = 10, 40
"""Minimum and maximum width of a bar, in cells; a long description makes it shorter."""
BAR_SUFFIX_WIDTH = 20
"""Width of the text behind a bar, in cells: `100% 0:00:12 left`, and the spaces."""
LINE_INTERVAL_S, STEP_LINE_INTERVAL_S = 5.0, 30.0
"""Seconds between two progress lines: of work outside a step, and inside a step, which ends with a line anyway."""


def make_console(style: ConsoleStyle = "auto", file: TextIO | None = None) -> Console:
    """Return the console of a style; it writes to standard output, or to `file`."""
    return _PipeSafeConsole(
        file=file,
        quiet=style == "off",
        force_terminal=True if style == "rich" else None,
        force_interactive={"auto": None, "rich": True, "plain": False, "off": False}[style],
        no_color=True if style == "plain" else None,
        highlight=False,
        markup=False,
        emoji=False,
    )


def format_number(value: float) -> str:
    """Format a number with about four digits, usually in at most seven characters: `0.4310`, `-12.34`, `31250`,
    `1.2e-5`, `nan`."""
    value += 0.0  # turns -0.0 into 0.0
    size = abs(value)
    if not size < float("inf"):
        return str(value)
    if size >= 100_000 or 0 < size < 0.001:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    decimals = sum(size < bound for bound in (1000, 100, 10, 1))
    return f"{value:.{decimals}f}"


def format_seconds(seconds: float) -> str:
    """Format a duration: `0.012 s`, `2.1 s`, `4 min 05 s`, `3 h 12 min`."""
    if seconds < 0.1:
        return f"{seconds:.3f} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = int(seconds // 60)
    if minutes < 60:
        return f"{minutes} min {int(seconds % 60):02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


class StepNotes(Protocol):
    """A source of sentences that are printed under the line of a step."""

    def open(self, run: RunInfo) -> None:
        """Prepare for the steps of a run."""
        ...

    def note(self, step: int, values: Mapping[str, float], *, late: bool = False) -> str:
        """Return the sentences about a step; empty for none. late: the values add to those of an earlier step."""
        ...


class ConsoleSink(Sink):
    """A sink that prints one line per step: the headline metrics that the step has, in their order.

    `etude answers` prints rollouts."""

    name = "console"

    def __init__(
        self,
        console: Console,
        headline: Sequence[str] = (),
        failures: Mapping[str, str] | None = None,
        notes: StepNotes | None = None,
    ) -> None:
        """headline: the metrics of the line; `etude/recipes/run/steps/console_metrics.py` has those of a run.

        failures: for a headline metric, the metric that counts the failures it leaves out.
        """
        self._console = console
        self._notes = notes
        self._headline = headline
        self._failures = failures or {}
        self._bar: _LiveBar | None = None

    def open(self, run: RunInfo) -> None:
        """Print the run directory; on a terminal, show the bar if the number of steps is known."""
        self._steps = run.steps
        if self._notes is not None:
            self._notes.open(run)
        _print_line(self._console, Text(f"{run.name}: metrics are written to {run.directory}"))
        if self._console.is_interactive and run.steps is not None:
            self._bar = _LiveBar(self._console, run.name, run.steps)

    def log(self, step: int, values: Mapping[str, float], *, late: bool = False) -> None:
        """Print the line of one step, or of late numbers of an earlier one."""
        width = self._console.width if self._console.is_interactive else None
        _print_line(self._console, _step_line(step, self._steps, values, self._headline, self._failures, width))
        if self._notes is not None and (note := self._notes.note(step, values, late=late)):
            _print_line(self._console, Text(f"  {note}", "yellow"))
        if self._bar is not None and not late:
            self._bar.move_to(step)

    def show_phase(self, step: int, name: str) -> None:
        """Show the current phase of a step beside the bar."""
        if self._bar is not None:
            self._bar.describe(f"step {step}: {name}")

    @contextmanager
    def progress(self, description: str, total: float | None) -> Iterator[ProgressReporter]:
        """Report the progress of work inside a step: a second bar on a terminal, else a line from time to time."""
        if self._bar is not None:
            with self._bar.add_nested(description, total) as nested:
                yield nested
        else:
            yield _TextProgress(self._console, description, total, time.monotonic, STEP_LINE_INTERVAL_S)

    def close(self) -> None:
        """Remove the bar; the lines stay."""
        if self._bar is not None:
            self._bar.stop()


class ProgressReporter(Protocol):
    """The object that `progress` yields."""

    def advance(self, amount: float = 1.0) -> None:
        """Add this amount to the finished part of the total."""
        ...


class FunctionReporter(ProgressReporter):
    """A progress reporter that passes each amount to a function."""

    def __init__(self, function: Callable[[float], object] = lambda _: None) -> None:
        self._function = function

    def advance(self, amount: float = 1.0) -> None:
        self._function(amount)


@contextmanager
def progress(
    description: str,
    total: float | None = None,
    console: Console | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[ProgressReporter]:
    """Report the progress of long work: a live bar on a terminal, else a line every few seconds.

    Without a `total` the bar shows activity only. The bar disappears at the end. Away from a terminal, work of less
    than two seconds prints no line.
    """
    console = make_console() if console is None else console
    if console.is_interactive:
        if (outer := _LiveBar.find(console)) is not None:
            with outer.add_nested(description, total) as nested:
                yield nested
            return
        live = _LiveBar(console, description, total)
        try:
            yield live
        finally:
            live.stop()
    else:
        lines = _TextProgress(console, description, total, clock)
        yield lines
        lines.finish()


class _LiveBar:
    """A bar that redraws itself on a terminal, with the remaining time. It disappears at the end."""

    _active: ClassVar[list[_LiveBar]] = []
    """The visible bars. Two independent bars on one terminal would overwrite each other."""

    def __init__(self, console: Console, description: str, total: float | None) -> None:
        self._progress = Progress(
            _DescriptionColumn(console),
            _FlexibleBarColumn(console, self._description_width),
            TaskProgressColumn(),
            _TimeLeftColumn(table_column=Column(no_wrap=True)),
            console=console,
            transient=True,
            refresh_per_second=4,
            # Steps may take minutes: rich's default window of 30 seconds would never give an estimate.
            speed_estimate_period=_DAY,
        )
        self._task = self._progress.add_task(_single_line(console, description), total=total)
        self._has_moved = False
        self._progress.start()
        self._active.append(self)

    @classmethod
    def find(cls, console: Console) -> _LiveBar | None:
        """Return the visible bar of this console's file; None if there is none."""
        return next((bar for bar in cls._active if bar._progress.console.file is console.file), None)

    def advance(self, amount: float = 1.0) -> None:
        self._progress.advance(self._task, amount)

    def move_to(self, completed: float) -> None:
        """Set the finished part. In a resumed run the first value may be large, and does not count for the speed."""
        if self._has_moved:
            self._progress.update(self._task, completed=completed)
        else:
            self._progress.reset(self._task, completed=int(completed))
            self._has_moved = True

    def describe(self, description: str) -> None:
        """Change the bar's description."""
        self._progress.update(self._task, description=_single_line(self._progress.console, description))

    @contextmanager
    def add_nested(self, description: str, total: float | None) -> Iterator[ProgressReporter]:
        """Show a second bar below this one, inside the block."""
        progress = self._progress
        task = progress.add_task(_single_line(progress.console, description), total=total)
        try:
            yield FunctionReporter(partial(progress.advance, task))
        finally:
            progress.remove_task(task)

    def stop(self) -> None:
        if self in self._active:
            self._active.remove(self)
        self._progress.stop()

    def _description_width(self) -> int:
        """Return the width of the longest description, in cells."""
        return max((cell_len(task.description) for task in self._progress.tasks), default=0)


class _DescriptionColumn(ProgressColumn):
    """The description of a bar, on one line and cut to the width."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._cut: OverflowMethod = "ellipsis" if _replace_unencodable(console, "…") == "…" else "crop"

    def render(self, task: Task) -> Text:
        return Text(task.description, no_wrap=True, overflow=self._cut)


class _FlexibleBarColumn(BarColumn):
    """A bar as wide as the description in front of it allows."""

    def __init__(self, console: Console, description_width: Callable[[], int]) -> None:
        super().__init__(table_column=Column(no_wrap=True))
        self._console = console
        self._description_width = description_width

    def render(self, task: Task) -> ProgressBar:
        self.bar_width = max(NARROW, min(WIDE, self._console.width - BAR_SUFFIX_WIDTH - self._description_width()))
        return super().render(task)


class _TimeLeftColumn(TimeRemainingColumn):
    """The remaining time, `0:00:12 left`, if the total is known."""

    def render(self, task: Task) -> Text:
        time = super().render(task)
        return time.append(" left") if time else time


class _TextProgress:
    """Progress as plain lines, one every few seconds."""

    def __init__(
        self,
        console: Console,
        description: str,
        total: float | None,
        clock: Callable[[], float],
        every: float = LINE_INTERVAL_S,
    ) -> None:
        self._console = console
        self._description = description
        self._total = total
        self._clock = clock
        self._every = every
        self._began = self._last_printed = clock()
        self._done = 0.0

    def advance(self, amount: float = 1.0) -> None:
        self._done += amount
        now = self._clock()
        if now - self._last_printed >= self._every:
            self._last_printed = now
            amount_done = f"{self._done:,.0f}" if self._total is None else f"{min(self._done / self._total, 1.0):.0%}"
            _print_line(
                self._console, Text(f"{self._description}: {amount_done} after {format_seconds(now - self._began)}")
            )

    def finish(self) -> None:
        seconds = self._clock() - self._began
        if seconds >= 2.0:
            _print_line(self._console, Text(f"{self._description}: done in {format_seconds(seconds)}"))


class _PipeSafeConsole(Console):
    """rich's console, with one change: if the reader has ended (`etude train | head`), only the output ends."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        with Path(os.devnull).open("w") as devnull:
            os.dup2(devnull.fileno(), self.file.fileno())


def _step_line(
    step: int,
    steps: int | None,
    values: Mapping[str, float],
    headline: Sequence[str],
    failures: Mapping[str, str],
    width: int | None,
) -> Text:
    """Format `step  12/100  reward  0.4310 (3 failed)  loss -0.0123  2.1 s`; drop metrics that exceed the width."""
    end = "" if steps is None else f"/{steps}"
    line = Text.assemble(("step ", "dim"), f"{step:>{max(0, len(end) - 1)}}", (end, "dim"))
    duration = f"  {format_seconds(values['time/step'])}" if "time/step" in values else ""
    for name in headline:
        if name not in values:
            continue
        cell = Text.assemble("  ", (name, "dim"), f" {format_number(values[name]):>7}")
        if failed := values.get(failures.get(name, ""), 0.0):
            cell.append(f" ({failed:.0f} failed)", "bold")
        if width is not None and len(line) + len(cell) + len(duration) > width:
            break
        line.append_text(cell)
    return line.append(duration, "dim")


def _print_line(console: Console, line: Text) -> None:
    """Print one line. A terminal may wrap it between words; elsewhere it is never cut."""
    line.plain = _replace_unencodable(console, line.plain)
    console.print(line, soft_wrap=not console.is_interactive)


def _single_line(console: Console, description: str) -> str:
    """Return a description on one line, in characters that the console can encode."""
    return _replace_unencodable(console, " ".join(description.split()))


def _replace_unencodable(console: Console, text: str) -> str:
    """Replace the characters that the console cannot encode by question marks."""
    return text.encode(console.encoding, "replace").decode(console.encoding)
