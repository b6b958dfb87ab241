"""`etude version`: the versions of packages, and the devices found."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
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


@dataclass(frozen=True)
class InstalledPackage:
    """A package and its version."""

    name: str
    version: str | None
    """None if it is not installed."""
    extra: str | None = None
    """The extra of Etude that installs it; None for a required package."""


@dataclass(frozen=True)
class Device:
    """A compute device."""

    name: str
    """The name in torch: `cpu`, `cuda:0`, `mps`."""
    what: str
    """A description."""


def list_packages() -> list[InstalledPackage]:
    """List the required packages, then those of the extras."""
    needed = [InstalledPackage(name, _version((distribution,))) for name, distribution in NEEDED.items()]
    return needed + [
        InstalledPackage(name, _version(distributions), extra) for name, (extra, distributions) in OPTIONAL.items()
    ]


def list_devices() -> list[Device]:
    """List the CPU, and each accelerator that torch finds."""
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
    """Return everything as plain data; `etude` is Etude's version."""
    return {
        "etude": etude,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {package.name: package.version for package in list_packages()},
        "devices": [asdict(device) for device in list_devices()],
    }


def format_lines(etude: str) -> list[str]:
    """Return everything as lines of text; `etude` is Etude's version."""
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
