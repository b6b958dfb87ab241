"""`etude serve` as a process, for tests of its clients."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ServedModel:
    """A model that a process serves."""

    process: subprocess.Popen[str]
    url: str
    key: str
    output: str
    """The lines that the command printed at its start."""


@contextmanager
def serve_command(model: Path, *options: str) -> Iterator[ServedModel]:
    """Serve a model with one thread, in float32, on a free port."""
    words = ["serve", str(model), "--listen", "127.0.0.1:0", "train.precision=fp32", "threads=1", *options]
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "etude", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "TERM": "dumb"},
        text=True,
    ) as process:
        assert process.stdout is not None
        output = ""
        try:
            while "-d '{" not in output:
                line = process.stdout.readline()
                assert line, output
                output += line
            match = re.search(r"OPENAI_BASE_URL=(\S+)/v1 OPENAI_API_KEY=(\S+)", output)
            assert match is not None, output
            yield ServedModel(process, match[1], match[2], output)
        finally:
            process.kill()
