"""Run a program in a pseudo-terminal, to see what a user would see."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]


def without_escapes(text: str) -> str:
    """Return the text without its colors and cursor movements."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def in_terminal(program: str, argument: Path, environment: Mapping[str, str]) -> tuple[int, str]:
    """Run a Python program whose three streams are one terminal; return its exit status and everything shown."""
    ours, theirs = pty.openpty()
    variables = {"PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "80", "LINES": "24", **environment}
    with subprocess.Popen(
        [sys.executable, "-c", program, str(argument)], stdin=theirs, stdout=theirs, stderr=theirs, env=variables
    ) as process:
        os.close(theirs)
        shown = b""
        try:
            with suppress(OSError):  # Linux reports a closed terminal so
                while part := os.read(ours, 65536):
                    shown += part
        except BaseException:  # the test ran out of time: the program may be waiting for an answer
            process.kill()
            raise
    os.close(ours)
    return process.returncode, without_escapes(shown.decode())
