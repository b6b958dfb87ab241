"""Stores, runners and trainers in their own processes, as a user starts them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import etude
from tests.learn import games

ETUDE = [sys.executable, "-m", "etude"]
LOOKER = "tests.learn.looking:looker"
LINGERS = "tests.joined:lingers"
lingers = etude.command("echo $$ >> $PIDS; sleep 120 & echo $! >> $PIDS; wait")
"""An agent that does not end by itself and starts another process; it writes down both process ids."""
ROOT = Path(__file__).parent.parent
SMALL = (
    *("steps=2", "collect.tasks=2", "collect.group_size=2", "sampling.max_tokens=8", "data.max_prompt_length=16"),
    *("train.precision=fp32", "threads=1", "observe.console=plain", "reward=exact_match"),
)


class Process:
    """A running `etude` command; its output goes to a file."""

    def __init__(self, words: Sequence[str], log: Path, **environment: str) -> None:
        self.log = log
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment}
        with log.open("ab") as file:
            self.running = subprocess.Popen(
                [*ETUDE, *words],
                stdout=file,
                stderr=file,
                env=env,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
            )

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def says(self, pattern: str, within: float = 90.0) -> re.Match[str]:
        """Wait until the output contains this text."""
        until = time.monotonic() + within
        while (match := re.search(pattern, self.said)) is None:
            assert self.running.poll() is None or re.search(pattern, self.said), self.said
            assert time.monotonic() < until, self.said
            time.sleep(0.05)
        return match

    def send_signal(self, number: signal.Signals = signal.SIGINT) -> None:
        """Send a signal to the process alone, not to its children, as a supervisor does."""
        with suppress(ProcessLookupError):
            self.running.send_signal(number)

    def ends(self, within: float = 90.0) -> int:
        """Wait for its end; return the exit code."""
        return self.running.wait(within)


@contextmanager
def started(words: Sequence[str], log: Path, **environment: str) -> Iterator[Process]:
    """Start a command; at the end, kill its whole session if it still runs."""
    process = Process(words, log, **environment)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.running.pid, signal.SIGKILL)
        process.running.wait()


def descendants(pid: int) -> list[int]:
    """Return the processes that this one has started, and theirs."""
    result: list[int] = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int((place / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                result += [int(place.name), *descendants(int(place.name))]
    return result


def made(directory: Path) -> list[str]:
    """Create a small random model, and tasks to look things up; return the options of a run over them."""
    games.make_speaker(directory / "model", steps=12)
    for name, count in (("train", 40), ("val", 3)):
        lines = []
        for row in games.lookups(count, seed=count):
            prompt = row["prompt"]
            assert isinstance(prompt, list)
            lines.append({"key": prompt[0]["content"], "answer": row["answer"], "table": row["table"]})
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = [f"data.{name}=[{directory / name}.jsonl]" for name in ("train", "val")]
    return [f"model.path={directory / 'model'}", *files, f"agent.path={LOOKER}", *SMALL]
