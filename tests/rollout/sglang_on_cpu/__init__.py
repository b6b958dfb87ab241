"""SGLang's real server on a machine without a GPU: an environment of its own, and a Python that it imports under.

Two of the packages that it imports ship CUDA builds alone, and a model on a CPU calls neither: `sitecustomize.py`
beside this file stands in for them in every process of the server, those that it spawns included.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from etude.rollout.python_environments import PackagePins, PythonEnvironment

__all__ = ["PINNED", "python"]

HERE = Path(__file__).parent
ALONE = ("sglang", "torchvision", "apache-tvm-ffi", "compressed-tensors", "gguf", "dill", "xgrammar", "soundfile")
PINS = tuple(line for line in (HERE / "pins.txt").read_text().splitlines() if line and not line.startswith("#"))
PINNED = PackagePins("sglang-cpu", PINS, ALONE)


def python(made: PythonEnvironment, directory: Path) -> Path:
    """A Python of the environment that finds the stand-ins, written into a directory."""
    file = directory / "python"
    file.write_text(f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(HERE))} exec {shlex.quote(str(made.python))} "$@"\n')
    file.chmod(0o755)
    return file
