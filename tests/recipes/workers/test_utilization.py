"""The meter: how much of the device's time was computed in."""

from __future__ import annotations

import time

import torch

from etude.models import create, tiny_config
from etude.recipes.workers.utilization import UtilizationMeter, measure_peak_flops


def test_computing_is_distinguished_from_waiting() -> None:
    meter = UtilizationMeter(torch.device("cpu"))
    time.sleep(0.3)
    idle = meter.read().reduce()["device_utilization"]
    began = time.process_time()
    while time.process_time() - began < 0.3:
        torch.randn(64, 64) @ torch.randn(64, 64)
    busy = meter.read().reduce()["device_utilization"]
    assert 0 <= idle < 0.3 < idle + 0.3 < busy + 0.3 and busy > 2 * idle


def test_a_device_without_a_counter_gives_no_metric() -> None:
    assert not UtilizationMeter(torch.device("meta")).read()


def test_the_peak_of_a_device_is_measured_once_for_each_precision() -> None:
    """Two measurements never come to the same number."""
    config = tiny_config(8, layers=1, hidden=8, heads=1, kv_heads=1)
    one, same, other = (
        measure_peak_flops(create(config, seed=seed, dtype=dtype))
        for seed, dtype in enumerate((torch.float32, torch.float32, torch.float64))
    )
    assert one == same != other and one > 1e6
