"""SGLang's real server on a machine without a GPU: a separate environment, and a Python for it.

Two of the packages that it imports ship CUDA builds alone, and a model on a CPU calls neither: `sitecustomize.py`
beside this file replaces them in every process of the server, including those that it spawns.
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
    """Write a Python of the environment that finds the replacements into a directory."""
    file = directory / "python"
    file.write_text(f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(HERE))} exec {shlex.quote(str(made.python))} "$@"\n')
    file.chmod(0o755)
    return file
