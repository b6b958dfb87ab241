"""Cases of the small kernels of a decode layer, against the steps of `layer_ops`."""

from __future__ import annotations

import torch
from torch import Tensor

from etude.models import StepMemory, StepRows, TorchStepOps
from etude.models.kernels.decode_ops import add_norm, gated_silu, norm_rotate_write
from etude.models.layer_ops import EAGER_OPS

ROUNDINGS = {torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""The largest difference relative to a value, by type: a few of its last bits, of sums in another order."""


def check_add_norm(device: str, dtype: torch.dtype) -> None:
    """A width that is no power of two, with a residual and without."""
    torch.manual_seed(0)
    x, before = torch.randn(2, 5, 96).to(device, dtype)
    weight = torch.randn(96).to(device, dtype)
    _check(add_norm(x, None, weight, 1e-6), EAGER_OPS.rms_norm(x, weight, 1e-6))
    residual = before.clone()
    normed = add_norm(x, residual, weight, 1e-6)
    assert torch.equal(residual, before + x), "the sum is rounded as torch rounds it"
    _check(normed, EAGER_OPS.rms_norm(before + x, weight, 1e-6))


def check_norm_rotate_write(device: str, dtype: torch.dtype) -> None:
    """Queries and keys with norms and without; each key and value lies where the table says, and nothing else moves."""
    torch.manual_seed(0)
    table = torch.randperm(12).view(3, 4) + 1
    slots = torch.tensor([2, 0, 1, 0, 2])
    positions = torch.tensor([0, 17, 33, 5, 47])
    place = table[slots, positions // 16] * 16 + positions % 16
    rows = StepRows(slots.to(device), positions.to(device), 4)
    qkv = torch.randn(5, 8, 32).to(device, dtype)
    norms = torch.randn(2, 32).to(device, dtype)
    cos, sin = torch.randn(2, 64, 32).to(device, dtype)
    before = torch.full((2, 2, 2, 13, 16, 32), 7.0).to(device, dtype)
    for q_norm, k_norm in ((None, None), (norms[0], norms[1])):
        memory = StepMemory(before.clone(), table.to(device), cos, sin, 1 << 20)
        expected = StepMemory(before.clone(), table.to(device), cos, sin, 1 << 20)
        q = norm_rotate_write(qkv, q_norm, k_norm, 1e-6, memory, 1, rows)
        _check(q, TorchStepOps(expected, rows).write(1, qkv, q_norm, k_norm, 1e-6))
        _check(memory.keys_values, expected.keys_values)
        assert torch.equal(memory.keys_values[1, 1], expected.keys_values[1, 1])
        is_written = (memory.keys_values != 7.0)[1, 0, 0, :, :, 0].flatten().nonzero()[:, 0]
        assert sorted(place.tolist()) == is_written.tolist()


def check_gated_silu(device: str, dtype: torch.dtype) -> None:
    """More numbers than one program takes, and no multiple of them."""
    torch.manual_seed(0)
    x = torch.randn(3, 2 * 1100).to(device, dtype)
    _check(gated_silu(x), EAGER_OPS.gated_silu(x))


@torch.inference_mode()
def _check(found: Tensor, expected: Tensor) -> None:
    rounding = ROUNDINGS[found.dtype]
    torch.testing.assert_close(found, expected, rtol=rounding, atol=2 * rounding)
