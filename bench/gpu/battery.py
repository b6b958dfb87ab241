"""Items that run one after another, each of whose figures are in the file as soon as it ends.

An item is also in the file before it begins, marked as running: a crash or a kill names it. An item that fails is
written with its error, and the next one runs. An item that does not fit into the time left is skipped with the reason.
"""

from __future__ import annotations

import json
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from bench.common import machine, versions

Figures = dict[str, float | str]
"""The figures of an item. A text says why a figure is missing, or names what a number cannot."""

SLACK = 30.0
"""Seconds that an item may take beyond twice its estimate before it is ended."""
TINY_SHARE = 0.05
"""The share of an item's time that its tiny form takes."""


@dataclass(frozen=True)
class Place:
    """Where the items run."""

    device: torch.device
    tiny: bool
    """True for sizes that a processor computes in seconds, to try the battery itself."""
    folder: Path
    """The directory of files too large for the table, such as traces."""

    @property
    def on_gpu(self) -> bool:
        """True if the device is an NVIDIA GPU."""
        return self.device.type == "cuda"

    def milliseconds(self, work: Callable[[], object], times: int = 20, warm: int = 5) -> Figures:
        """Time warm calls: the median and the 90th percentile of wall time, and the median on the device."""
        if self.tiny:
            times, warm = 3, 1
        for _ in range(warm):
            work()
        walls, on_device = [], []
        for _ in range(times):
            wall, device = self._timed(work)
            walls.append(wall)
            on_device.append(device)
        figures: Figures = {"ms": median(walls), "ms_p90": sorted(walls)[int(0.9 * (times - 1))]}
        if self.on_gpu:
            figures["device_ms"] = median(on_device)
        return figures

    def seconds(self, work: Callable[[], object]) -> float:
        """Return how long one call takes, with all that it started on the device."""
        return self._timed(work)[0] / 1e3

    def free(self) -> None:
        """Return the memory that torch keeps of models that are gone."""
        if self.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak_gb(self) -> float:
        """Return the most memory of the device that was in use since `free`; 0 on a CPU."""
        return torch.cuda.max_memory_allocated(self.device) / 1e9 if self.on_gpu else 0.0

    def _timed(self, work: Callable[[], object]) -> tuple[float, float]:
        """Return the milliseconds of one call, on the wall and between two events on the device."""
        if not self.on_gpu:
            start = time.perf_counter()
            work()
            return 1e3 * (time.perf_counter() - start), 0.0
        before = torch.cuda.Event(enable_timing=True)
        after = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        before.record()
        work()
        after.record()
        after.synchronize()
        return 1e3 * (time.perf_counter() - start), before.elapsed_time(after)


@dataclass(frozen=True)
class Item:
    """A group of figures that are measured together."""

    name: str
    seconds: float
    """How long it takes on a GPU."""
    run: Callable[[Place], Figures]
    needs_gpu: bool = False
    goals: Mapping[str, float] = field(default_factory=dict)
    """The least value of a figure."""


class Battery:
    """The items, what became of them, and the file that says so."""

    def __init__(self, items: Sequence[Item], place: Place, file: Path, minutes: float) -> None:
        self._items, self._place, self._file = items, place, file
        self._until = time.monotonic() + 60 * minutes
        self.cases: list[dict[str, Any]] = []

    def run(self, tell: Callable[[str], None]) -> int:
        """Run the items, and return how many failed. tell: called with a line for each item."""
        for item in self._items:
            reason = self._reason_to_skip(item)
            if reason:
                self.cases.append({"name": item.name, "skipped": reason})
            else:
                self.cases.append({"name": item.name, "running": True})
                self._write()
                self.cases[-1] = self._outcome(item)
            self._write()
            tell(self._line())
        return sum("failed" in case for case in self.cases)

    def table(self) -> Table:
        """Return the table of all figures, beside their goals."""
        shown = Table(box=SIMPLE_HEAD, pad_edge=False)
        shown.add_column("item")
        shown.add_column("figure")
        shown.add_column("value", justify="right")
        shown.add_column("goal", justify="right")
        for item, case in zip(self._items, self.cases, strict=False):
            for name, value in case.get("figures", {}).items():
                goal = item.goals.get(name)
                missed = goal is not None and not (isinstance(value, float) and value >= goal)
                cell = value if isinstance(value, str) else f"{value:,.4g}"
                shown.add_row(item.name, name, cell, "" if goal is None else f"{goal:g}", style="yellow" * missed)
            for word in ("skipped", "failed"):
                if word in case:
                    shown.add_row(item.name, word, str(case[word]), "")
        return shown

    def _reason_to_skip(self, item: Item) -> str:
        if item.needs_gpu and not self._place.on_gpu:
            return "needs cuda"
        takes = item.seconds * (TINY_SHARE if self._place.tiny else 1)
        left = self._until - time.monotonic()
        return f"takes {takes:.0f} s, and {max(left, 0):.0f} s are left" if takes > left else ""

    def _outcome(self, item: Item) -> dict[str, Any]:
        start = time.monotonic()
        try:
            with _time_limit(2 * item.seconds + SLACK):
                outcome: dict[str, Any] = {"figures": item.run(self._place), "goals": dict(item.goals)}
        except Exception as error:
            first_line = (str(error) or "no message").splitlines()[0]
            trace = traceback.format_exc().splitlines()[-8:]
            outcome = {"failed": f"{type(error).__name__}: {first_line}", "trace": trace}
        try:
            self._place.free()  # after a fault of the device this raises too, and the next items say the same
        except RuntimeError as error:
            outcome.setdefault("failed", f"the device is lost: {error}")
        return {"name": item.name, **outcome, "seconds": round(time.monotonic() - start, 2)}

    def _line(self) -> str:
        case = self.cases[-1]
        for word in ("skipped", "failed"):
            if word in case:
                return f"{case['name']}: {word}, {case[word]}"
        return f"{case['name']}: {len(case['figures'])} figures in {case['seconds']:.0f} s"

    def _write(self) -> None:
        """Replace the file as a whole, so that it is readable at every moment."""
        ratios = {
            f"{case['name']}: {name}": case["figures"][name] / goal
            for case in self.cases
            for name, goal in case.get("goals", {}).items()
            if isinstance(case["figures"].get(name), float)
        }
        whole = {"machine": machine(), "versions": versions(), "cases": self.cases, "ratios": ratios}
        part = self._file.with_name(self._file.name + ".part")
        part.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
        part.replace(self._file)


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise within this context after so many seconds. A call that never returns to Python is not ended."""

    def ended(*_: object) -> None:
        raise TimeoutError(f"The item was still running after {seconds:.0f} s.")

    before = signal.signal(signal.SIGALRM, ended)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
