"""Curves of runs: selected, smoothed, drawn, printed."""

from __future__ import annotations

import io
import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console

from etude.errors import ConfigError
from etude.tools.plot import MOST_RUNS, PICTURE, plot, smooth_values
from tests.tools.test_metric_curves import written


def run(directory: Path, steps: int = 40, *, rate: float = 0.1, **others: float) -> Path:
    """Write a run whose reward rises, evaluated every tenth step."""
    logged = []
    for step in range(1, steps + 1):
        values = {"reward": 1 - math.exp(-rate * step), "time/step": 0.5, "unusual": float(step), **others}
        if step % 10 == 0:
            values["eval/mean@4"] = 1 - math.exp(-rate * step)
        logged.append((step, values))
    return written(directory, *logged)


def printed(
    runs: list[Path], *metrics: str, encoding: str = "utf-8", width: int = 100, into: Path | None = None
) -> str:
    """Return the output of `etude plot`."""
    buffer = io.BytesIO()
    file = io.TextIOWrapper(buffer, encoding=encoding)
    plot(runs, metrics, Console(file=file, width=width), into)
    file.flush()
    return buffer.getvalue().decode(encoding)


def test_a_run_is_drawn_and_summarised(tmp_path: Path) -> None:
    lines = printed([run(tmp_path / "first")]).splitlines()
    assert [line.split()[0] for line in lines] == ["reward", "eval/mean@4", "time/step", "picture"]
    assert "▁" in lines[0] and "█" in lines[0] and "0.1239 → 0.9810" in lines[0]  # the ends are means of neighbors
    assert "▁▆▇█" in lines[1]
    assert "0.5000 → 0.5000" in lines[2]
    assert lines[3].endswith(str(tmp_path / "first" / PICTURE))
    assert imread(tmp_path / "first" / PICTURE).std() > 0.01


def test_a_run_with_damaged_lines_is_drawn_without_them(tmp_path: Path) -> None:
    with (run(tmp_path / "first") / "metrics.jsonl").open("a") as file:
        file.write("broken\nbroken\n")
    lines = printed([tmp_path / "first"], "reward").splitlines()
    assert lines[0].endswith("first: 2 lines of metrics.jsonl are damaged, and left out.") and "0.9810" in lines[1]


def test_runs_are_distinguished_by_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [run(tmp_path / "a" / "slow", rate=0.02), run(tmp_path / "b" / "fast", 30)]
    lines = printed(runs, "reward").splitlines()
    assert lines[0].split()[:2] == ["reward", "a/slow"] and lines[1].split()[0] == "b/fast"
    assert (tmp_path / PICTURE).exists(), "where one is"
    assert not any((run / PICTURE).exists() for run in runs), "the picture of a run is its own"


def drawn_in(path: Path, red: int, green: int, blue: int) -> bool:
    """Return whether a picture has a line of this color."""
    pixels = (imread(path)[..., :3] * 255).round()
    return int((pixels == (red, green, blue)).all(-1).sum()) > 200


def test_each_run_has_its_colour(tmp_path: Path) -> None:
    runs = [run(tmp_path / "a", rate=0.02), run(tmp_path / "b")]
    both = tmp_path / "pictures" / "both.png"
    printed(runs, "reward", into=both)
    assert drawn_in(both, 0x0F, 0x76, 0x6E) and drawn_in(both, 0xC2, 0x41, 0x0C)
    printed([runs[0]], "reward")
    assert drawn_in(runs[0] / PICTURE, 0x0F, 0x76, 0x6E) and not drawn_in(runs[0] / PICTURE, 0xC2, 0x41, 0x0C)


def test_a_run_without_the_metric_is_left_out_of_its_panel(tmp_path: Path) -> None:
    runs = [run(tmp_path / "a"), run(tmp_path / "b", entropy=1.5)]
    lines = printed(runs, "entropy", "reward", into=tmp_path / PICTURE).splitlines()
    assert lines[0].split()[:2] == ["entropy", "b"] and len(lines) == 4


def test_the_chosen_metrics_are_drawn(tmp_path: Path) -> None:
    lines = printed([run(tmp_path / "a")], "unusual", "eval/*").splitlines()
    assert [line.split()[0] for line in lines] == ["unusual", "eval/mean@4", "picture"]


def test_one_step_is_enough(tmp_path: Path) -> None:
    assert "0.0952 → 0.0952" in printed([run(tmp_path / "a", 1)])


def test_a_plain_terminal_gets_plain_letters(tmp_path: Path) -> None:
    shown = printed([run(tmp_path / "a")], "reward", encoding="ascii", width=60)
    assert "_" in shown and "#" in shown and " > " in shown


def test_an_unknown_metric_lists_those_there(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"metric 'rewards'\. Did you mean reward\? The metrics are eval/mean@4, reward"
    ):
        printed([run(tmp_path / "a")], "rewards")
    with pytest.raises(ConfigError, match=r"none of the default metrics.*The metrics are odd\."):
        printed([written(tmp_path / "b", (1, {"odd": 1.0}))])


def test_too_many_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"9 runs were named, and one plot has colors for {MOST_RUNS}"):
        printed([tmp_path / str(number) for number in range(9)])


def test_smoothing_keeps_constants_and_lines_and_calms_noise() -> None:
    assert np.allclose(smooth_values(np.full(300, 2.5)), 2.5)
    line = np.arange(300.0)
    assert np.allclose(smooth_values(line)[20:-20], line[20:-20])
    noise = np.random.default_rng(0).normal(size=300)
    assert smooth_values(noise).std() < 0.5 * noise.std()
    assert smooth_values(np.array([1.0, 5.0, 2.0])).tolist() == [1.0, 5.0, 2.0]
