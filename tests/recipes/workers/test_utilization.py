"""The meter of utilization: the share of the device's time with computation."""

from __future__ import annotations

import time

import torch

from etude.recipes.workers.utilization import UtilizationMeter, measure_peak_flops


def test_computation_is_distinguished_from_waiting() -> None:
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
    """Two measurements never give the same number."""
    dtypes, cpu = (torch.float32, torch.float32, torch.float64), torch.device("cpu")
    one, same, other = (measure_peak_flops(dtype, cpu) for dtype in dtypes)
    assert one == same != other and one > 1e6
