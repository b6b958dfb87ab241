"""The meter: how much of the device's time was computed in."""

from __future__ import annotations

import time

import torch

from etude.recipes.meter import Meter


def test_computing_is_told_from_waiting() -> None:
    meter = Meter(torch.device("cpu"))
    time.sleep(0.3)
    idle = meter.read().reduce()["device_utilisation"]
    began = time.process_time()
    while time.process_time() - began < 0.3:
        torch.randn(64, 64) @ torch.randn(64, 64)
    busy = meter.read().reduce()["device_utilisation"]
    assert 0 <= idle < 0.3 < idle + 0.3 < busy + 0.3 and busy > 2 * idle


def test_nothing_is_told_of_a_device_that_keeps_no_count() -> None:
    assert not Meter(torch.device("meta")).read()
