"""`etude version`: the versions of packages, and the devices found."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

NEEDED = {"torch": "torch", "numpy": "numpy", "hydra": "hydra-core", "pydantic": "pydantic"}
"""The required packages, and their distributions."""
OPTIONAL = {
    "peft": ("lora", ("peft",)),
    "ray": ("ray", ("ray",)),
    "tensorboardX": ("trackers", ("tensorboardX",)),
    "wandb": ("trackers", ("wandb",)),
    "mlflow": ("trackers", ("mlflow-skinny", "mlflow")),
}
"""The optional packages: the extra that installs each, and the distributions that provide it."""
GIB = 2**30


def list_packages() -> dict[str, str | None]:
    """Return the version of each required package, then of those of the extras; None if it is not installed."""
    needed = {name: _version((distribution,)) for name, distribution in NEEDED.items()}
    needed["torch"] = str(torch.__version__)  # also names the build, as in 2.13.0+cpu
    return needed | {name: _version(distributions) for name, (_, distributions) in OPTIONAL.items()}


def list_devices() -> dict[str, str]:
    """Describe the CPU, and each accelerator that torch finds, by their names in torch: `cpu`, `cuda:0`, `mps`."""
    devices = {"cpu": f"{platform.machine()}, {os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads"}
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(number)
        devices[f"cuda:{number}"] = f"{properties.name}, {properties.total_memory / GIB:.0f} GiB"
    if torch.backends.mps.is_available():
        devices["mps"] = "Apple GPU, memory shared with the CPU"
    return devices


def to_dict(etude: str) -> dict[str, Any]:
    """Return everything as plain data; `etude` is Etude's version."""
    return {
        "etude": etude,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": list_packages(),
        "devices": [{"name": name, "what": what} for name, what in list_devices().items()],
    }


def format_lines(etude: str) -> list[str]:
    """Return everything as lines of text; `etude` is Etude's version."""
    lines = {"etude": etude, "python": f"{platform.python_version()} on {platform.platform()}"}
    for name, found in list_packages().items():
        lines[name] = found or f"not installed: pip install 'etude[{OPTIONAL[name][0]}]'"
    return [f"{name:<13} {text}" for name, text in (lines | list_devices()).items()]


def _version(distributions: tuple[str, ...]) -> str | None:
    for distribution in distributions:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None
