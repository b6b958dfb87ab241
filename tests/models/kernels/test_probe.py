"""The trial of kernels on a machine that has none. `interpreted.py` tries kernels that hold, and some that do not."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from etude.models.kernels.probe import ProbedModel, probe_kernels
from etude.models.kernels.shapes import KernelShape


def test_a_cpu_has_no_kernels() -> None:
    shape = KernelShape(4, 2, 32, 16)
    choice = probe_kernels(ProbedModel(torch.device("cpu"), torch.float32, shape, 100, 100, True, frozenset({None})))
    reason = "the device is a CPU, not a GPU"
    if find_spec("triton") is None:
        reason = "Triton is not installed; a CUDA build of torch brings it"
    assert choice.held == frozenset()
    assert choice.describe() == f"Decode steps use torch's operations in place of Triton kernels: {reason}."
