"""The console output, on a terminal and off it. A display that fails never disturbs the run."""

from __future__ import annotations

import io
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from etude.observe.config import ConsoleStyle
from etude.observe.console import ConsoleSink, format_number, format_seconds, make_console, progress
from etude.observe.sinks import RunInfo
from tests.observe.clock import Clock
from tests.observe.terminal import ROOT, in_terminal, without_escapes


def run(steps: int | None = 100, name: str = "demo") -> RunInfo:
    return RunInfo(name=name, directory=Path("runs") / name, steps=steps)


def terminal(width: int = 100) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=True, force_interactive=True, width=width, highlight=False), out


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.0000"),
        (0.431, "0.4310"),
        (-0.0123, "-0.0123"),
        (1.0, "1.000"),
        (12.345, "12.35"),
        (-123.45, "-123.5"),
        (31250.0, "31250"),
        (123456.0, "1.2e5"),
        (1.23e-5, "1.2e-5"),
        (-1.23e-5, "-1.2e-5"),
        (6.02e23, "6.0e23"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
    ],
)
def test_numbers_are_short_and_fit_their_column(value: float, text: str) -> None:
    assert format_number(value) == text
    assert len(text) <= 7


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0123, "0.012 s"), (2.13, "2.1 s"), (59.0, "59.0 s"), (245.0, "4 min 05 s"), (11520.0, "3 h 12 min")],
)
def test_durations_are_written_in_readable_units(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_plain_lines_are_aligned_and_ordered_by_the_headline() -> None:
    out = io.StringIO()
    sink = ConsoleSink(make_console("plain", out), headline=["reward", "loss", "absent"])
    sink.open(run())
    sink.log(9, {"loss": -0.5, "reward": 0.431, "time/step": 2.1, "unseen": 1.0})
    sink.log(12, {"loss": 1234.5, "reward": 1.2e-5, "time/step": 65.0})
    sink.close()
    assert out.getvalue().splitlines() == [
        "demo: metrics are written to runs/demo",
        "step   9/100  reward  0.4310  loss -0.5000  2.1 s",
        "step  12/100  reward  1.2e-5  loss    1234  1 min 05 s",
    ]


def test_failures_outside_a_mean_are_shown_beside_it() -> None:
    out = io.StringIO()
    failures = {"reward": "failed_attempts", "eval": "eval/failed"}
    sink = ConsoleSink(make_console("plain", out), ["reward", "eval", "loss"], failures)
    sink.open(run())
    sink.log(1, {"reward": 1.0, "failed_attempts": 168.0, "loss": 0.5, "eval": 0.25, "eval/failed": 2.0})
    sink.log(2, {"reward": 1.0, "failed_attempts": 0.0, "loss": 0.5})
    assert out.getvalue().splitlines()[1:] == [
        "step   1/100  reward   1.000 (168 failed)  eval  0.2500 (2 failed)  loss  0.5000",
        "step   2/100  reward   1.000  loss  0.5000",
    ]


def test_plain_lines_are_never_cut_and_need_no_known_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    out, names = io.StringIO(), [f"metric_{i}" for i in range(20)]
    sink = ConsoleSink(make_console("auto", out), headline=names)
    sink.open(run(steps=None, name="[red]not markup[/red] :smile:"))
    sink.log(1, dict.fromkeys(names, 0.5))
    first, second = out.getvalue().splitlines()
    assert first.startswith("[red]not markup[/red] :smile:: metrics")
    assert second.count("0.5000") == 20
    assert second.startswith("step 1  metric_0  0.5000  metric_1  0.5000")


def test_a_terminal_gets_lines_that_fit_and_a_bar_that_goes_away() -> None:
    console, out = terminal(width=60)
    names = [f"metric_{i}" for i in range(20)]
    sink = ConsoleSink(console, headline=names)
    sink.open(run())
    for step in (1, 2, 3):
        sink.log(step, {**dict.fromkeys(names, 0.5), "time/step": 2.0})
    sink.close()
    text = without_escapes(out.getvalue())
    lines = [line for line in re.split(r"[\r\n]+", text) if line.startswith("step")]
    assert lines == [f"step   {n}/100  metric_0  0.5000  metric_1  0.5000  2.0 s" for n in (1, 2, 3)]
    assert re.search(r"demo ━.* 3%", text)
    assert out.getvalue().rstrip().endswith("\x1b[2K")


def test_a_resumed_run_starts_its_estimate_where_it_starts() -> None:
    console, out = terminal()
    sink = ConsoleSink(console)
    sink.open(run(steps=1000))
    sink.log(900, {})
    sink.close()
    assert re.search(r"demo ━.* 90% -:--:-- left", without_escapes(out.getvalue()))


@pytest.mark.parametrize(("style", "live"), [("auto", False), ("rich", True), ("plain", False), ("off", False)])
def test_the_style_decides_without_a_terminal(style: ConsoleStyle, live: bool) -> None:
    out = io.StringIO()
    sink = ConsoleSink(make_console(style, out), ["reward"])
    sink.open(run())
    sink.log(1, {"reward": 0.5})
    sink.close()
    assert ("\x1b[" in out.getvalue()) == live
    assert ("reward" in without_escapes(out.getvalue())) == (style != "off")


def test_progress_without_a_terminal_is_a_line_every_few_seconds() -> None:
    out, clock = io.StringIO(), Clock()
    with progress("loading shards", total=20, console=make_console("plain", out), clock=clock) as bar:
        for _ in range(20):
            clock.wait(1.0)
            bar.advance()
    assert out.getvalue().splitlines() == [
        "loading shards: 25% after 5.0 s",
        "loading shards: 50% after 10.0 s",
        "loading shards: 75% after 15.0 s",
        "loading shards: 100% after 20.0 s",
        "loading shards: done in 20.0 s",
    ]


def test_progress_without_a_total_counts() -> None:
    out, clock = io.StringIO(), Clock()
    with progress("reading", console=make_console("plain", out), clock=clock) as bar:
        clock.wait(6.0)
        bar.advance(12345)
    assert out.getvalue().splitlines() == ["reading: 12,345 after 6.0 s", "reading: done in 6.0 s"]


def test_short_work_leaves_no_line_and_failed_work_is_not_done() -> None:
    out, clock = io.StringIO(), Clock()
    console = make_console("plain", out)
    with progress("quick", total=2, console=console, clock=clock) as bar:
        clock.wait(1.9)
        bar.advance()
    with pytest.raises(OSError, match="disk"), progress("slow", total=2, console=console, clock=clock):
        clock.wait(60)
        raise OSError("disk")
    assert out.getvalue() == ""


def test_progress_on_a_terminal_is_a_bar_that_goes_away() -> None:
    console, out = terminal()
    with progress("loading [x]", total=4, console=console) as bar:
        for _ in range(4):
            bar.advance()
    text = without_escapes(out.getvalue())
    assert re.search(r"loading \[x\] ━+ 100%", text)
    assert out.getvalue().rstrip().endswith("\x1b[2K"), "its line is empty in the end"


LONG = "answering 256 tasks with eight samples each, of the dataset gsm8k-platinum-filtered-and-held-out-for-the-end"


@pytest.mark.parametrize(("words", "bar"), [(30, 40), (55, 25), (70, 10), (len(LONG), 10)])
def test_a_bar_shrinks_for_its_text_and_long_text_is_cut(words: int, bar: int) -> None:
    console, out = terminal()
    with progress(LONG[:words].replace(" ", "\n", 1), total=4, console=console) as live:
        live.advance(2)
    (line,) = {part for part in re.split(r"[\r\n]+", without_escapes(out.getvalue())) if "50%" in part}
    match = re.fullmatch(r"(\S.*?) ([━╸╺]+)  50% [\d:-]{7} left", line.strip())
    assert match is not None and len(match[2]) == bar and len(line) <= 100
    assert match[1] == LONG[:words] if words <= 70 else match[1].endswith("…") and LONG.startswith(match[1][:-1])


def test_a_bar_without_a_known_end_shows_no_remaining_time() -> None:
    console, out = terminal()
    with progress("starting vllm", console=console):
        pass
    shown = without_escapes(out.getvalue())
    assert "starting vllm ━" in shown and "left" not in shown and "%" not in shown


def wait_until_drawn(out: io.StringIO, pattern: str) -> None:
    """Wait until the display, which is drawn four times a second, has been drawn; a few seconds at most."""
    until = time.monotonic() + 5
    while not re.search(pattern, without_escapes(out.getvalue())) and time.monotonic() < until:
        time.sleep(0.01)


def test_one_terminal_has_one_display() -> None:
    """A second display would draw over the first, from the current position of the cursor."""
    out = io.StringIO()
    first, second = (Console(file=out, force_terminal=True, force_interactive=True, width=100) for _ in range(2))
    with progress("outer", 4, first), progress("inner", 2, second) as inner:
        inner.advance(2)
        wait_until_drawn(out, r"inner ━+ +100%")
    shown = out.getvalue()
    assert re.search(r"outer ━+ +0% .*\n.*inner ━+ +100%", without_escapes(shown))
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1
    with progress("alone", 1, second):
        pass
    assert "alone ━" in without_escapes(out.getvalue())


def test_lines_on_a_terminal_break_between_words() -> None:
    console, out = terminal(width=60)
    sink = ConsoleSink(console)
    sink.open(run(steps=None, name="a-run-with-a-name-of-some-length"))
    first, second = map(str.strip, out.getvalue().splitlines())
    assert first == "a-run-with-a-name-of-some-length: metrics are written to"
    assert second == "runs/a-run-with-a-name-of-some-length"


def test_an_ascii_terminal_gets_ascii() -> None:
    raw = io.BytesIO()
    console = make_console("rich", io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    sink = ConsoleSink(console, ["größe"])
    sink.open(run(name="étude"))
    sink.log(50, {"größe": 0.5})
    sink.close()
    with progress("läuft", total=1, console=console) as bar:
        bar.advance()
    text = without_escapes(raw.getvalue().decode("ascii"))
    assert "?tude: metrics are written to" in text
    assert "step  50/100  gr??e  0.5000" in text
    assert "l?uft ---" in text


PROGRAM = """
import sys
from pathlib import Path
from etude.observe import Mean, ObserveConfig, RunInfo, configure_logging, open_run_log, progress
configure_logging("info")
with progress("setting up", total=1) as bar:
    bar.advance()
with open_run_log(ObserveConfig(), RunInfo("demo", Path(sys.argv[1]), 500), headline=["reward"]) as log:
    for step in range(1, 501):
        with log.step(step) as at:
            at.add({"reward": Mean.of(step / 500)})
print("survived", file=sys.stderr)
"""


@pytest.mark.parametrize("shell", ["{} | head -n 1", "{} >&-", "{} > /dev/full"])
def test_a_run_survives_a_closed_standard_output(shell: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = shell.format(f"'{sys.executable}' '{program}' '{tmp_path}'")
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert "survived" in done.stderr
    assert "Traceback" not in done.stderr
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 500
    if "head" in shell:
        assert done.returncode == 0, done.stderr


def test_a_real_terminal_sees_lines_warnings_and_a_bar(tmp_path: Path) -> None:
    program = PROGRAM.replace("step / 500", "float('nan') if step == 3 else step / 500")
    status, text = in_terminal(program, tmp_path, {"HOME": str(tmp_path)})
    assert status == 0, text
    assert re.search(r"setting up ━+ 100%", text)
    assert re.search(r"step 500/500  reward   1\.000  0\.0\d\d s", text)
    assert re.search(r"main\[0\] WARNING The metric 'reward' is nan at step 3", text)
    assert re.search(r"demo ━", text)
    assert "survived" in text


def test_a_terminal_shows_the_phase_and_progress_of_a_step() -> None:
    console, out = terminal()
    sink = ConsoleSink(console)
    sink.open(run(steps=10))
    sink.show_phase(3, "collect")
    with sink.progress("step 3: answers", 8) as bar:
        bar.advance(6)
        wait_until_drawn(out, r"step 3: answers ━.* 75%")
    sink.show_phase(3, "update")
    sink.close()
    shown = without_escapes(out.getvalue())
    assert re.search(r"step 3: collect ━", shown) and re.search(r"step 3: answers ━.* 75%", shown)
    assert re.search(r"step 3: update ━", shown)


def test_without_a_terminal_a_step_prints_its_progress_sometimes(monkeypatch: pytest.MonkeyPatch) -> None:
    out, clock = io.StringIO(), Clock()
    monkeypatch.setattr("etude.observe.console.time.monotonic", clock)
    sink = ConsoleSink(make_console("plain", out))
    sink.open(run(steps=10))
    sink.show_phase(3, "collect")
    with sink.progress("step 3: answers", 8) as bar:
        for _ in range(8):
            clock.wait(10.0)
            bar.advance()
    assert out.getvalue().splitlines()[1:] == [
        "step 3: answers: 38% after 30.0 s",
        "step 3: answers: 75% after 1 min 00 s",
    ]
