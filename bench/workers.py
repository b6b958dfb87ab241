"""Worker processes of a benchmark, with line-based communication, each under the Python of its peer.

They end with the benchmark in any case: a separate process kills their groups when the benchmark is gone.
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

from etude.child_process import reaper

__all__ = ["Worker"]

PATIENCE = 600.0
"""Time limits for the start of a worker and for an answer, in seconds."""
ROOT = Path(__file__).parents[1]


class Worker:
    """A process that answers lines of JSON. Its process group ends with it, child processes included."""

    def __init__(
        self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name, self.log = name, log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                cwd=ROOT,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **(environment or {})},
                start_new_session=True,
            )
        reaper.add(self.process.pid)
        assert self.process.stdin is not None and self.process.stdout is not None
        self._asks, self._tells = self.process.stdin, self.process.stdout

    def tell(self, line: str) -> None:
        """Send a line."""
        self._asks.write(line.encode() + b"\n")
        self._asks.flush()

    def hear(self) -> dict[str, Any]:
        """Return the next output line."""
        ready, _, _ = select.select([self._tells], [], [], PATIENCE)
        line = self._tells.readline() if ready else b""
        if not line:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
            why = "ended" if ready else f"said nothing for {PATIENCE:g} s"
            raise RuntimeError(f"{self.name} {why}. Its last words:\n{tail}")
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        """Wait for its end, then kill the rest of its process group."""
        with suppress(BrokenPipeError):
            self._asks.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        reaper.remove(self.process.pid)
        self._tells.close()
