"""The environment of the programs that evaluate models: lm-eval and inspect-ai, without torch."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from etude.rollout.python_environments import PackagePins

__all__ = ["PINNED", "run_offline"]

_LINES = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines()
PINNED = PackagePins("evals", tuple(line for line in _LINES if not line.startswith("#")), ("inspect_ai", "lm_eval"))
PATIENCE_S = 400
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def run_offline(python: Path, words: list[str], directory: Path, **variables: str) -> str:
    """Run a program of this environment in a directory of its own; return what it prints."""
    env = {"PATH": os.environ["PATH"], "HOME": str(directory / "home"), "NO_PROXY": "127.0.0.1", **OFFLINE, **variables}
    done = subprocess.run(
        [str(python), "-m", *words],
        cwd=directory,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout
