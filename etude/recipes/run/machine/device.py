"""Chooses the device of a run: the CPU, or a GPU for each of its ranks."""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING, Literal

from etude.errors import ConfigError
from etude.lazy import LazyModule, torch
from etude.observe import get_logger

if TYPE_CHECKING:
    from etude.train import flops
else:
    flops = LazyModule("etude.train.flops")


def select_device(device: Literal["auto", "cpu", "cuda"], *, ranks: int, cluster: str) -> torch.device:
    """Return the device of this process, as one of the ranks of a run or the only one.

    The controller of ranks over Ray may have no GPU itself. There a CUDA device only means that the ranks use GPUs on
    their own machines.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cpu" or (device == "auto" and not num_gpus):
        return torch.device("cpu")
    if not num_gpus and cluster == "ray":
        return torch.device("cuda")
    if not num_gpus:
        raise ConfigError(
            "`device=cuda` asks for a GPU, and this torch reaches none: `etude doctor` says why. Or leave `device` "
            "out and compute on the processor."
        )
    if ranks > num_gpus and cluster == "local":
        raise ConfigError(
            f"`ranks={ranks}` want a GPU each, and torch sees {num_gpus}. Lower `ranks`, make more of them "
            "visible, or compute on the processor with `device=cpu`."
        )
    # not `current_device()`, which takes half a gigabyte of GPU 0 for a process that may only control others
    opened = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.device("cuda", torch.cuda.current_device() if opened else 0)


def describe_device(device: torch.device, ranks: int) -> str:
    """Describe the device of this process, and the number of ranks."""
    reached = device.type == "cuda" and torch.cuda.is_available()
    name = torch.cuda.get_device_name(device) if reached else f"{platform.machine()}, {os.cpu_count()} cores"
    return f"{ranks} × {device.type} ({name})"


def check_precision(device: torch.device, precision: str) -> None:
    """Warn of a processor that is slow in a run's precision."""
    if device.type == "cpu" and precision in ("bf16", "fp16") and (speedup := flops.measure_bf16_speedup()) < 1:
        get_logger("recipes").warning(
            "`train.precision=%s`: in half precision this processor computes %.2f times as fast as in fp32. Train with "
            "`train.precision=fp32`, where memory allows.",
            precision,
            speedup,
        )
