"""The names of checkpoints in their directory: `step-00000040.2` is the second save, of step 40.

A run that went back saves a step again, under a higher number.
"""

from __future__ import annotations

import re
from pathlib import Path

BEST = "best.json"
"""The file that names the best checkpoint."""
_NAME = re.compile(r"step-\d{8,}\.\d+")


def list_paths(directory: Path) -> list[Path]:
    """Return every path with a checkpoint's name, in the order of writing."""
    if not directory.is_dir():
        return []
    return sorted((path for path in directory.iterdir() if _NAME.fullmatch(path.name)), key=sequence_number)


def step_of(path: Path) -> int:
    """Return the step in a checkpoint's name."""
    return int(path.stem.removeprefix("step-"))


def sequence_number(path: Path) -> int:
    """Return the sequence number in a checkpoint's name."""
    return int(path.suffix.removeprefix("."))
