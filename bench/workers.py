"""Processes that a benchmark talks to line by line, each with a peer in it and under that peer's own Python.

They end with the benchmark, however that ends: a process beside it kills their groups when it is gone.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from etude.agents.process_reaper import ProcessReaper

__all__ = ["Worker"]

PATIENCE = 600.0
"""Seconds within which a worker must start, and answer."""
ROOT = Path(__file__).parents[1]
_GUARD = ProcessReaper()


class Worker:
    """A process that answers lines of JSON. Its group of processes ends with it, whatever it started itself."""

    def __init__(
        self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name, self.log = name, log
        with log.open("wb") as said:
            self.process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                cwd=ROOT,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **(environment or {})},
                start_new_session=True,
            )
        _GUARD.add(self.process.pid)
        assert self.process.stdin is not None and self.process.stdout is not None
        self._asks, self._tells = self.process.stdin, self.process.stdout

    def tell(self, line: str) -> None:
        """Hand it a line."""
        self._asks.write(line.encode() + b"\n")
        self._asks.flush()

    def hear(self) -> dict[str, Any]:
        """The next line it says."""
        ready, _, _ = select.select([self._tells], [], [], PATIENCE)
        line = self._tells.readline() if ready else b""
        if not line:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
            why = "ended" if ready else f"said nothing for {PATIENCE:g} s"
            raise RuntimeError(f"{self.name} {why}. Its last words:\n{tail}")
        told: dict[str, Any] = json.loads(line)
        return told

    def close(self) -> None:
        """Let it end by itself, then end what is left of its group."""
        with suppress(BrokenPipeError):
            self._asks.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        _GUARD.remove(self.process.pid)
        self._tells.close()
