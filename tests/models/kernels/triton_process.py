"""Triton for machines without a GPU: an environment that holds nothing else, beside the packages of the tests.

A CPU build of torch brings no Triton, and a process that finds one behaves differently in other tests. So the kernels
run in processes of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from etude.rollout.python_environments import PackagePins, PythonEnvironment

__all__ = ["PINNED", "run_with_triton"]

ROOT = Path(__file__).parents[3]
PINNED = PackagePins("triton", ("triton==3.9.0",), ("triton",))


def run_with_triton(environment: PythonEnvironment, module: str, *arguments: str, interpret: bool = False) -> list[Any]:
    """Run a module of the tests that can import Triton; return what it prints, a JSON value on each line."""
    (packages,) = environment.directory.glob("lib/python*/site-packages")
    path = os.pathsep.join([str(ROOT), str(packages)])
    env = os.environ | {"PYTHONPATH": path} | ({"TRITON_INTERPRET": "1"} if interpret else {})
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]
