"""The battery of a GPU: its file is readable whatever happens to an item, and its items run at a tiny size."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu.__main__ import main
from bench.gpu.battery import Battery, Figures, Item, Place
from bench.gpu.items import ITEMS, outcomes

HIDDEN = """
import sys


class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("hydra", "omegaconf", "pyarrow", "sqlalchemy", "fastapi", "matplotlib"):
            raise ModuleNotFoundError(name)


sys.meta_path.insert(0, Hidden())
import bench.gpu.__main__
"""
"""A program that loads the battery where only its own requirements are installed."""
KILLED = """
import os
import signal
import sys
from pathlib import Path

import torch

from bench.gpu.battery import Battery, Item, Place

first = Item("first", 1, lambda place: {"one": 1.0})
second = Item("second", 1, lambda place: os.kill(os.getpid(), signal.SIGKILL))
place = Place(torch.device("cpu"), True, Path(sys.argv[1]).parent)
Battery([first, second], place, Path(sys.argv[1]), 1).run(print)
"""
"""A program whose second item ends it."""


def run(items: list[Item], file: Path, minutes: float = 1.0) -> list[dict[str, Any]]:
    battery = Battery(items, Place(torch.device("cpu"), True, file.parent), file, minutes)
    battery.run(lambda line: None)
    cases: list[dict[str, Any]] = json.loads(file.read_text())["cases"]
    assert battery.cases == cases
    return cases


def item(name: str, work: Callable[[], Figures], **options: Any) -> Item:
    return Item(name, 1, lambda place: work(), **options)


def test_a_failing_item_is_a_figure_and_the_next_one_runs(tmp_path: Path) -> None:
    def fails() -> Figures:
        raise ValueError("planted\nmore")

    good = item("good", lambda: {"speed": 3.0}, goals={"speed": 2.0})
    failed, after = run([item("bad", fails), good], tmp_path / "f")
    assert failed["failed"] == "ValueError: planted" and any("in fails" in line for line in failed["trace"])
    assert after["figures"] == {"speed": 3.0}
    assert json.loads((tmp_path / "f").read_text())["ratios"] == {"good: speed": 1.5}


@pytest.mark.slow
def test_a_killed_battery_leaves_its_figures_and_the_name_of_the_item(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path / "f")]
    ended = subprocess.run(command, check=False, timeout=120, capture_output=True)
    assert ended.returncode == -signal.SIGKILL
    first, second = json.loads((tmp_path / "f").read_text())["cases"]
    assert first["figures"] == {"one": 1.0} and second == {"name": "second", "running": True}


def test_an_item_without_time_or_without_its_device_is_skipped_with_the_reason(tmp_path: Path) -> None:
    assert [case["skipped"] for case in run([item("late", dict)], tmp_path / "f", minutes=0)] == [
        "takes 0 s, and 0 s are left"
    ]
    assert run([item("gpu", dict, needs_gpu=True)], tmp_path / "f") == [{"name": "gpu", "skipped": "needs cuda"}]


def test_the_outcome_of_each_test_of_a_report_is_a_figure(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="tests.a" name="one"/>'
        '<testcase classname="tests.a" name="two"><failure message="assert 1 == 2&#10;more"/></testcase>'
        "</testsuite></testsuites>"
    )
    assert outcomes(report) == {"passed": 1.0, "failure": 1.0, "tests.a::two": "assert 1 == 2"}


@pytest.mark.slow
def test_the_battery_needs_only_what_a_bare_machine_has() -> None:
    subprocess.run([sys.executable, "-c", HIDDEN], check=True, timeout=120)


@pytest.mark.smoke
def test_every_item_runs_at_a_tiny_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "gpu.json"
    assert main(["--json", str(file), "--device", "cpu", "--tiny", "--minutes", "9"]) == 0
    cases = json.loads(file.read_text())["cases"]
    assert [case["name"] for case in cases] == [item.name for item in ITEMS]
    assert [case["name"] for case in cases if "figures" not in case] == ["parity"], capsys.readouterr().out
