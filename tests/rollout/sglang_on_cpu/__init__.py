"""SGLang's real server on a machine without a GPU: an environment of its own, and a Python that it imports under.

Two of the packages that it imports ship CUDA builds alone, and a model on a CPU calls neither: `sitecustomize.py` beside
this file stands in for them in every process of the server, those that it spawns included.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from rich.console import Console

from etude.rollout.environments import Environment, Pinned, environment, whole

__all__ = ["ALONE", "FLAGS", "PINNED", "found", "made"]

HERE = Path(__file__).parent
ALONE = (
    *("sglang", "torchvision", "apache-tvm-ffi", "compressed-tensors", "gguf", "dill", "xgrammar", "soundfile"),
    "xgrammar",
)
