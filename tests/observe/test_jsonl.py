"""metrics.jsonl: complete lines only, always valid JSON."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from etude.errors import DataError
from etude.observe import configure_logging
from etude.observe.jsonl import METRICS_FILE, JsonlSink, read_last_step, read_steps
from etude.observe.sinks import RunInfo


def run(directory: Path) -> RunInfo:
    return RunInfo(name="demo", directory=directory)


def read(directory: Path) -> list[dict[str, object]]:
    text = (directory / "metrics.jsonl").read_text(encoding="utf-8")
    return [
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON")) for line in text.splitlines()
    ]


def test_a_step_is_a_line_and_is_there_at_once(tmp_path: Path) -> None:
    sink = JsonlSink(now=lambda: 12.5)
    sink.open(run(tmp_path / "new" / "run"))
    sink.log(1, {"loss": 0.5, "reward/größe": 1.0})
    assert read(tmp_path / "new" / "run") == [{"step": 1, "time": 12.5, "loss": 0.5, "reward/größe": 1.0}]
    sink.log(2, {})
    sink.close()
    assert read(tmp_path / "new" / "run")[1] == {"step": 2, "time": 12.5}


def test_values_that_json_lacks_are_null_and_listed(tmp_path: Path) -> None:
    sink = JsonlSink(now=lambda: 0.0)
    sink.open(run(tmp_path))
    sink.log(1, {"a": math.nan, "b": 1.0, "c": -math.inf})
    sink.close()
    assert read(tmp_path) == [{"step": 1, "time": 0.0, "a": None, "b": 1.0, "c": None, "nonfinite": ["a", "c"]}]


@pytest.mark.parametrize(
    ("before", "whole_lines"),
    [
        (b"", 0),
        (b'{"step": 1}\n', 1),
        (b'{"step": 1}\n{"step": 2', 1),
        (b'{"st', 0),
        (b'{"step": 1}\n{"step": 2}\n' + b"x" * 200_000, 2),
        (b"\xff" * 70_000, 0),
    ],
)
def test_opening_again_appends_after_the_last_whole_line(tmp_path: Path, before: bytes, whole_lines: int) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(before)
    sink = JsonlSink()
    sink.open(run(tmp_path))
    sink.log(7, {})
    sink.close()
    assert [line["step"] for line in read(tmp_path)] == [*range(1, whole_lines + 1), 7]


WRITER = """
import sys
from pathlib import Path
from etude.observe.jsonl import JsonlSink
from etude.observe.sinks import RunInfo
sink = JsonlSink()
sink.open(RunInfo(name="demo", directory=Path(sys.argv[1])))
for step in range(1, 10**9):
    sink.log(step, {"loss": 1 / step})
    if step == 50:
        print("ready", flush=True)
"""


def test_a_killed_writer_leaves_lines_that_the_next_one_continues(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        os.kill(process.pid, signal.SIGKILL)
    sink = JsonlSink()
    sink.open(run(tmp_path))
    steps = [line["step"] for line in read(tmp_path)]
    assert len(steps) >= 50
    assert steps == list(range(1, len(steps) + 1))
    sink.close()


def test_the_last_logged_step_is_read(tmp_path: Path) -> None:
    assert read_last_step(tmp_path) == -1
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 7}\n{"step": 8, "lo')
    assert read_last_step(tmp_path) == 7


def test_a_number_too_large_for_a_float_is_reported_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / METRICS_FILE).write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 1' + "0" * 400 + "}\n")
    configure_logging("info")
    assert read_last_step(tmp_path) == 1 and "line 2, is not a step with its metrics" in capsys.readouterr().err
    with pytest.raises(DataError, match="line 2, is not a step with its metrics"):
        list(read_steps(tmp_path / METRICS_FILE))
