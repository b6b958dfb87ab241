"""A Python of vLLM's server on a CPU that also finds torchvision, which its modules of Qwen's vision models import.

PyPI has it with a compiled part for CUDA alone, which does not load beside a torch without CUDA. Etude computes the
pixels itself, so the server calls nothing of it. It is an environment of its own, which `sitecustomize.py` beside this
file lets load without that part. The server also finds pip, without which vLLM reports none of its settings.
"""

from __future__ import annotations

import shlex
from importlib.util import find_spec
from pathlib import Path

from etude.rollout.python_environments import PackagePins, PythonEnvironment

__all__ = ["PINNED", "python"]

HERE = Path(__file__).parent
PINNED = PackagePins("torchvision-alone", ("torchvision==0.28.0",), ("torchvision",))
"""The release for the torch of vLLM's environment."""


def python(server: PythonEnvironment, torchvision: PythonEnvironment, directory: Path) -> Path:
    """Write a Python of the server's environment that also finds torchvision into a directory."""
    (packages,) = torchvision.directory.glob("lib/python*/site-packages")
    pip = find_spec("pip")
    assert pip is not None and pip.origin is not None
    found = directory / "packages"
    found.mkdir()
    (found / "pip").symlink_to(Path(pip.origin).parent)
    path = ":".join(shlex.quote(str(part)) for part in (HERE, packages, found))
    file = directory / "with-torchvision"
    file.write_text(f'#!/bin/sh\nPYTHONPATH={path} exec {shlex.quote(str(server.python))} "$@"\n')
    file.chmod(0o755)
    return file
