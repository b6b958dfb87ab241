"""Shared code of the benchmarks: the machine, interleaved timing, a table, and a JSON file."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from etude import __version__
from etude.tools.versions import list_devices, list_packages
from etude.train import measure_matmul_flops
from etude.train.optim import PRECISIONS

__all__ = [
    "Case",
    "Measured",
    "computed_dtype",
    "default_device",
    "machine",
    "matrix_rate",
    "measure",
    "precision",
    "table",
    "versions",
    "write_json",
    "written",
]


def nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Case:
    """Work to time, and the yardstick to compare it with."""

    name: str
    kind: str
    work: Callable[[], object]
    yardstick: Callable[[], object]
    limit: float
    """The largest allowed ratio to the yardstick."""
    is_peer: bool = False
    """True if the work is a peer's and the yardstick ours: then the limit is the smallest allowed ratio."""
    before: Callable[[], object] = nothing
    """A function to call before the work, untimed."""
    after: Callable[[], object] = nothing
    """A function to call after the work, untimed; it may inspect the result."""


@dataclass(frozen=True)
class Measured:
    """A case, timed: medians over the rounds, of seconds and of the rounds' ratios."""

    name: str
    kind: str
    seconds: float
    yardstick_seconds: float
    ratio: float
    limit: float
    met: bool


def measure(cases: Sequence[Case], rounds: int, progress: Callable[[], None] = nothing) -> list[Measured]:
    """Time every case once a round, its yardstick right before and after it, so that a slow moment slows both."""
    times: dict[str, list[tuple[float, float]]] = {case.name: [] for case in cases}
    for number in range(rounds + 1):
        for case in cases:
            case.before()
            before, work, after = _seconds(case.yardstick), _seconds(case.work), _seconds(case.yardstick)
            case.after()
            if number > 0:  # the first round only warms up
                times[case.name].append((work, (before + after) / 2))
            progress()
    result = []
    for case in cases:
        pairs = times[case.name]
        ratio = median(work / yard for work, yard in pairs)
        seconds, yard = median(work for work, _ in pairs), median(yard for _, yard in pairs)
        met = ratio >= case.limit if case.is_peer else ratio <= case.limit
        result.append(Measured(case.name, case.kind, seconds, yard, ratio, case.limit, met))
    return result


def machine() -> dict[str, Any]:
    """Return a description of the machine."""
    return {
        "platform": platform.platform(),
        "devices": list_devices(),
        "threads": torch.get_num_threads(),
        "precision": precision(),
    }


def precision() -> str:
    """Return the precision that all sides compute in: the one that `train.precision=auto` chooses on this machine."""
    from etude.recipes.run.resume.precision import (
        choose_precision,  # with hydra, which the battery of a GPU runs without
    )

    return choose_precision(default_device())[0]


def computed_dtype() -> torch.dtype:
    """Return the dtype that all sides compute in."""
    return PRECISIONS[precision()]


def matrix_rate() -> float:
    """Return operations a second in the best matrix product of this machine, in the precision of the benchmarks."""
    gpu = torch.cuda.is_available()
    return measure_matmul_flops(computed_dtype(), default_device(), size=8192 if gpu else 2048)


def default_device() -> torch.device:
    """Return the GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def versions() -> dict[str, str | None]:
    """Return the versions of the packages."""
    return {"etude": __version__, "python": platform.python_version()} | list_packages()


def table(measured: Sequence[Measured], yardstick: str) -> Table:
    """Return the table of the results; missed limits are marked."""
    shown = Table(box=SIMPLE_HEAD, pad_edge=False)
    shown.add_column("case")
    for title in ("ms", f"{yardstick}, ms", "ratio", "limit", ""):
        shown.add_column(title, justify="right")
    for kind in dict.fromkeys(case.kind for case in measured):
        shown.add_row(kind, style="bold")
        for case in measured:
            if case.kind == kind:
                shown.add_row(
                    f"  {case.name}",
                    f"{1e3 * case.seconds:.2f}",
                    f"{1e3 * case.yardstick_seconds:.2f}",
                    f"{case.ratio:.1f}",
                    f"{case.limit:g}",
                    "" if case.met else "misses",
                    style="" if case.met else "yellow",
                )
    return shown


def write_json(path: Path, measured: Sequence[Measured], about: Mapping[str, Any]) -> None:
    """Return every measured case, and the ratios by name."""
    written(path, [asdict(case) for case in measured], {case.name: case.ratio for case in measured}, about)


def written(
    path: Path, cases: Sequence[Mapping[str, Any]], ratios: Mapping[str, float], about: Mapping[str, Any] | None = None
) -> None:
    """Write the file of a benchmark: machine, versions, every measured case, and the ratios by name."""
    whole = {"machine": machine(), "versions": versions(), **(about or {}), "cases": [*cases], "ratios": {**ratios}}
    path.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")


def _seconds(work: Callable[[], object]) -> float:
    _wait_for_gpu()
    began = time.perf_counter()
    work()
    _wait_for_gpu()
    return time.perf_counter() - began


def _wait_for_gpu() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
