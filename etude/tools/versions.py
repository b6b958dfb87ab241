"""What is installed, and which devices were found: the first thing to read when something does not work."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

__all__ = ["Device", "InstalledPackage", "format_lines", "list_devices", "list_packages", "to_dict"]

NEEDED = {"torch": "torch", "numpy": "numpy", "hydra": "hydra-core", "pydantic": "pydantic"}
"""The packages that Etude cannot do without, and their distributions."""
OPTIONAL = {
    "peft": ("lora", ("peft",)),
    "ray": ("ray", ("ray",)),
    "tensorboardX": ("trackers", ("tensorboardX",)),
    "wandb": ("trackers", ("wandb",)),
    "mlflow": ("trackers", ("mlflow-skinny", "mlflow")),
}
"""The packages that an extra installs: the extra, and the distributions that provide it."""
GIB = 2**30


@dataclass(frozen=True)
class InstalledPackage:
    """A package and its version."""

    name: str
    version: str | None
    """None where it is not installed."""
    extra: str | None = None
    """The extra of Etude that installs it; None for what is always there."""


@dataclass(frozen=True)
class Device:
    """Something to compute on."""

    name: str
    """As torch calls it: `cpu`, `cuda:0`, `mps`."""
    what: str
    """In words."""


def list_packages() -> list[InstalledPackage]:
    """Etude's packages, those of its extras last."""
    needed = [InstalledPackage(name, _version((distribution,))) for name, distribution in NEEDED.items()]
    return needed + [
        InstalledPackage(name, _version(distributions), extra) for name, (extra, distributions) in OPTIONAL.items()
    ]


def list_devices() -> list[Device]:
    """The CPU, and each accelerator that torch can reach."""
    devices = [
        Device("cpu", f"{platform.machine()}, {os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads")
    ]
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(number)
            devices.append(Device(f"cuda:{number}", f"{properties.name}, {properties.total_memory / GIB:.0f} GiB"))
    if torch.backends.mps.is_available():
        devices.append(Device("mps", "Apple GPU, memory shared with the CPU"))
    return devices


def to_dict(etude: str) -> dict[str, Any]:
    """All of it as plain data; `etude` is Etude's own version."""
    return {
        "etude": etude,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {package.name: package.version for package in list_packages()},
        "devices": [asdict(device) for device in list_devices()],
    }


def format_lines(etude: str) -> list[str]:
    """All of it for a person to read, a line each; `etude` is Etude's own version."""
    lines = [("etude", etude), ("python", f"{platform.python_version()} on {platform.platform()}")]
    for package in list_packages():
        remedy = f"not installed: pip install 'etude[{package.extra}]'"
        lines.append((package.name, package.version or remedy))
    lines += [(device.name, device.what) for device in list_devices()]
    return [f"{name:<13} {text}" for name, text in lines]


def _version(distributions: tuple[str, ...]) -> str | None:
    for distribution in distributions:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None
