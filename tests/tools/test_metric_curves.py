"""A run's metrics, read back: complete, cut off, resumed, absent."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from etude.errors import ConfigError
from etude.observe import JsonlSink, RunInfo
from etude.observe.step_history import MetricsFile
from etude.tools.metric_curves import LatestMetrics, read_curves


def written(directory: Path, *steps: tuple[int, dict[str, float]]) -> Path:
    """Write a run with these metrics, by the sink that every run has."""
    sink = JsonlSink()
    sink.open(RunInfo("run", directory))
    for step, values in steps:
        sink.log(step, values)
    sink.close()
    return directory


def test_logged_metrics_are_read(tmp_path: Path) -> None:
    history = read_curves(written(tmp_path, (1, {"reward": 0.5}), (2, {"reward": 0.75, "eval": 1.0})))
    assert list(history.curves) == ["reward", "eval"]
    reward = history.curves["reward"]
    assert reward.steps.tolist() == [1, 2] and reward.values.tolist() == [0.5, 0.75]
    assert history.curves["eval"].steps.tolist() == [2]


def test_a_value_that_is_no_number_is_a_gap(tmp_path: Path) -> None:
    history = read_curves(written(tmp_path, (1, {"kl": math.nan, "loss": 1.0}), (2, {"kl": 0.5, "gap": math.inf})))
    assert history.curves["kl"].steps.tolist() == [2]
    assert set(history.curves) == {"kl", "loss"}


def test_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    written(tmp_path, *((step, {"reward": 0.0}) for step in range(1, 7)))
    history = read_curves(written(tmp_path, (4, {"reward": 1.0}), (5, {"reward": 1.0})))
    assert history.curves["reward"].steps.tolist() == [1, 2, 3, 4, 5]
    assert history.curves["reward"].values.tolist() == [0.0, 0.0, 0.0, 1.0, 1.0]


def test_a_line_that_was_cut_off_is_ignored(tmp_path: Path) -> None:
    written(tmp_path, (1, {"reward": 0.5}))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "rew')
    assert read_curves(tmp_path).curves["reward"].steps.tolist() == [1]


@pytest.mark.parametrize("text", ["not json", "[1]", '{"reward": 1.0}', '{"step": 2, "reward": "high"}'])
def test_a_broken_line_is_left_out_and_said(tmp_path: Path, text: str) -> None:
    written(tmp_path, (1, {"reward": 0.5}))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(text + "\n")
    written(tmp_path, (2, {"reward": 0.75}))
    history = read_curves(tmp_path)
    assert history.curves["reward"].values.tolist() == [0.5, 0.75]
    assert history.problem == "1 line of metrics.jsonl is damaged, and left out."


def test_each_absence_has_its_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"There is no run .*nowhere \(seen from /"):
        read_curves(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"has no metrics\.jsonl: no run has started there"):
        read_curves(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file is a file\. Name the directory of a run"):
        read_curves(tmp_path / "file")
    for name in "abcdefghij":
        written(tmp_path / name, (1, {"reward": 0.5}))
    with pytest.raises(
        ConfigError, match=r"is not a run; it has 10 runs: a, b, c, d, e, f, g, h, …\. Name one of them, or"
    ):
        read_curves(tmp_path)
    with pytest.raises(ConfigError, match=r"has not finished its first step yet\. Wait until"):
        read_curves(written(tmp_path / "new"))


def test_a_growing_file_is_read_on_without_reading_it_again(tmp_path: Path) -> None:
    path = written(tmp_path, (1, {"reward": 0.5})) / "metrics.jsonl"
    file, latest = MetricsFile(path), LatestMetrics(tmp_path)
    assert file.refresh() and not file.refresh()
    with path.open("a") as writer:
        writer.write('broken\n{"step": 2, "reward": 0.75, "ev')
        writer.flush()
        assert file.refresh() and not file.refresh() and file.damaged == 1 and file.steps == [1]
        assert (latest.refresh()["step"], latest.refresh()["reward"]) == (1, 0.5)
        writer.write('al": 1.0}\n{"step": 3, "time": 5.0}\n')
    assert file.refresh() and file.steps == [1, 2, 3]
    assert latest.refresh() == {"step": 3, "reward": 0.75, "eval": 1.0, "time": 5.0}
    assert file.curve("reward").values.tolist() == [0.5, 0.75] and file.curve("eval").steps.tolist() == [2]
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + 'broken\n{"step": 2, "reward": 1.0, "time": 7.0}\n' + 3 * lines[-1])
    assert file.refresh() and file.curve("reward").values.tolist() == [0.5, 1.0] and "eval" not in file.names
    assert latest.refresh() == {"step": 3, "reward": 1.0, "time": 5.0}, "the file was cut, and has grown again"
    path.write_text(lines[0])
    assert file.refresh() and (file.steps, file.damaged, file.names) == ([1], 0, ["time", "reward"])
    assert latest.refresh()["step"] == 1 and "eval" not in latest.refresh()


def test_late_metrics_are_added_to_their_step(tmp_path: Path) -> None:
    """Also to a step without a line of its own, and where they are the only ones of their name."""
    written(tmp_path, *((step, {"reward": step / 10}) for step in (1, 2, 4)))
    sink = JsonlSink()
    sink.open(RunInfo("run", tmp_path))
    sink.log(2, {"eval": 0.5}, late=True)
    sink.log(5, {"reward": 0.5})
    sink.log(3, {"eval": 0.75}, late=True)
    sink.close()
    curves = read_curves(tmp_path).curves
    assert curves["reward"].steps.tolist() == [1, 2, 4, 5] and curves["reward"].values.tolist() == [0.1, 0.2, 0.4, 0.5]
    assert curves["eval"].steps.tolist() == [2, 3] and curves["eval"].values.tolist() == [0.5, 0.75]
    assert "late" not in curves and LatestMetrics(tmp_path).refresh()["step"] == 5
