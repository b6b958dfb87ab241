"""vLLM's real server on a CPU with its model runner V2, which reports the tokens that could be drawn.

That runner has kernels in Triton, and no package brings a Triton for a CPU. `sitecustomize.py` beside this file has
Triton's interpreter run them, in every process of the server. A step takes a tenth of a second.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from etude.rollout.python_environments import PythonEnvironment

__all__ = ["python"]

HERE = Path(__file__).parent


def python(made: PythonEnvironment, directory: Path) -> Path:
    """Write a Python of the environment whose Triton interprets into a directory."""
    file = directory / "interpreting"
    path = f"PYTHONPATH={shlex.quote(str(HERE))}${{PYTHONPATH:+:$PYTHONPATH}}"
    file.write_text(f'#!/bin/sh\n{path} TRITON_INTERPRET=1 exec {shlex.quote(str(made.python))} "$@"\n')
    file.chmod(0o755)
    return file
