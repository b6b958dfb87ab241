"""How busy the device was, where the system tells: on a CPU, the share of its threads' time that was computed in."""

from __future__ import annotations

import time
from functools import cache

import torch

from etude.models import Model
from etude.observe import Mean, Metrics
from etude.train import matmul_rate

__all__ = ["Meter", "peak_of", "sizes_of"]


class Meter:
    """Reads what was computed since it was last read. Nothing is told of a device that keeps no count of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._wall, self._computed = time.perf_counter(), time.process_time()

    def read(self) -> Metrics:
        """`device_utilisation`: the time that this process computed, over the time that its threads had."""
        wall, computed = time.perf_counter(), time.process_time()
        had, used = (wall - self._wall) * torch.get_num_threads(), computed - self._computed
        self._wall, self._computed = wall, computed
        return Metrics({"device_utilisation": Mean.over(used, had)}) if self._device.type == "cpu" else Metrics()


def peak_of(model: Model) -> float:
    """Operations a second that the device can do in the model's precision, measured in a moment, once a process."""
    size, seconds = (8192, 0.2) if model.device.type == "cuda" else (512, 0.05)
    return _rate(model.dtype, model.device, size, seconds)


def sizes_of(model: Model) -> tuple[int, int]:
    """How many weights a model has, and how many of them are trained."""
    weights = list(model.parameters())
    return sum(w.numel() for w in weights), sum(w.numel() for w in weights if w.requires_grad)


_rate = cache(matmul_rate)
