"""How busy the device was, where the system tells: on a CPU, the share of its threads' time that was computed in."""

from __future__ import annotations

import time
from functools import cache

import torch

from etude.models import Model
from etude.observe import Mean, Metrics
from etude.train import measure_matmul_flops

__all__ = ["UtilizationMeter", "count_parameters", "measure_peak_flops"]


class UtilizationMeter:
    """Reads what was computed since it was last read. Nothing is told of a device that keeps no count of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._wall, self._computed = time.perf_counter(), time.process_time()

    def read(self) -> Metrics:
        """`device_utilization`: the time that this process computed, over the time that its threads had."""
        wall, computed = time.perf_counter(), time.process_time()
        had, used = (wall - self._wall) * torch.get_num_threads(), computed - self._computed
        self._wall, self._computed = wall, computed
        return Metrics({"device_utilization": Mean.over(used, had)}) if self._device.type == "cpu" else Metrics()


def measure_peak_flops(model: Model) -> float:
    """Operations a second that the device can do in the model's precision, measured in a moment, once a process."""
    size, seconds = (8192, 0.2) if model.device.type == "cuda" else (512, 0.05)
    return _rate(model.dtype, model.device, size, seconds)


def count_parameters(model: Model) -> tuple[int, int]:
    """How many weights a model has, and how many of them are trained."""
    weights = list(model.parameters())
    return sum(w.numel() for w in weights), sum(w.numel() for w in weights if w.requires_grad)


_rate = cache(measure_matmul_flops)
