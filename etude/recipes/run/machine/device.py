"""Chooses the device of a run: the CPU, or a GPU for each of its ranks."""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING

from etude.errors import ConfigError
from etude.lazy import LazyModule, torch
from etude.observe import get_logger

if TYPE_CHECKING:
    from etude.recipes.recipe import Recipe
    from etude.train import flops
else:
    flops = LazyModule("etude.train.flops")


def select_device(run: Recipe) -> torch.device:
    """Return the device of this process, as one of the run's ranks or the only one.

    The controller of ranks over Ray may have no GPU itself. There a CUDA device only means that the ranks use GPUs on
    their own machines.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if run.device == "cpu" or (run.device == "auto" and not num_gpus):
        return torch.device("cpu")
    if not num_gpus and run.cluster == "ray":
        return torch.device("cuda")
    if not num_gpus:
        raise ConfigError(
            "`device=cuda` asks for a GPU, and this torch reaches none: `etude doctor` says why. Or leave `device` "
            "out and compute on the processor."
        )
    if run.ranks > num_gpus and run.cluster == "local":
        raise ConfigError(
            f"`ranks={run.ranks}` want a GPU each, and torch sees {num_gpus}. Lower `ranks`, make more of them "
            "visible, or compute on the processor with `device=cpu`."
        )
    # not `current_device()`, which takes half a gigabyte of GPU 0 for a process that may only control others
    opened = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.device("cuda", torch.cuda.current_device() if opened else 0)


def describe_device(run: Recipe) -> str:
    """Describe the device of this process, and the number of ranks."""
    device = select_device(run)
    reached = device.type == "cuda" and torch.cuda.is_available()
    name = torch.cuda.get_device_name(device) if reached else f"{platform.machine()}, {os.cpu_count()} cores"
    return f"{run.ranks} × {device.type} ({name})"


def check_device(run: Recipe) -> None:
    """Refuse a device that does not exist, and warn of a processor that is slow in the run's precision."""
    on_cpu = select_device(run).type == "cpu"
    if on_cpu and run.train.precision in ("bf16", "fp16") and (speedup := flops.measure_bf16_speedup()) < 1:
        get_logger("recipes").warning(
            "`train.precision=%s`: in half precision this processor computes %.2f times as fast as in fp32. Train with "
            "`train.precision=fp32`, where memory allows.",
            run.train.precision,
            speedup,
        )
