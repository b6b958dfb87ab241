"""The utilization of the device, if the system reports it: on a CPU, the share of its threads' time spent computing."""

from __future__ import annotations

import time
from functools import cache

import torch

from etude.models import Model
from etude.observe import Mean, Metrics
from etude.train import measure_matmul_flops


class UtilizationMeter:
    """Measures the computation since the last reading. Devices without such a counter give no metric."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._wall = time.perf_counter()
        self._computed = time.process_time()

    def read(self) -> Metrics:
        """Return `device_utilization`: the CPU time of this process, over the time that its threads had."""
        wall, computed = time.perf_counter(), time.process_time()
        had, used = (wall - self._wall) * torch.get_num_threads(), computed - self._computed
        self._wall = wall
        self._computed = computed
        return Metrics({"device_utilization": Mean.over(used, had)}) if self._device.type == "cpu" else Metrics()


def measure_peak_flops(dtype: torch.dtype, device: torch.device) -> float:
    """Return the operations per second of the device in this precision, measured briefly, once per process."""
    size, seconds = (8192, 0.2) if device.type == "cuda" else (512, 0.05)
    return _rate(dtype, device, size, seconds)


def count_parameters(model: Model) -> tuple[int, int]:
    """Return the number of weights of a model, and the number of trained weights."""
    weights = list(model.parameters())
    return sum(w.numel() for w in weights), sum(w.numel() for w in weights if w.requires_grad)


_rate = cache(measure_matmul_flops)
