"""Cases of the small kernels of a decode layer, against the steps of `layer_ops`."""

from __future__ import annotations

import torch
from torch import Tensor

from etude.models.kernels.decode_ops import add_norm, gated_silu, norm_rotate_write
from etude.models.kernels.shapes import KernelShape, StepRows
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
    shape = KernelShape(query_heads=4, key_heads=2, width=32, block_size=16, blocks=13)
    table = torch.randperm(12).view(3, 4) + 1
    rows = StepRows(torch.tensor([2, 0, 1, 0, 2]), torch.tensor([0, 17, 33, 5, 47]), table)
    place = table[rows.slots, rows.positions // 16] * 16 + rows.positions % 16
    rows = StepRows(rows.slots.to(device), rows.positions.to(device), table.to(device))
    qkv = torch.randn(5, 8, 32).to(device, dtype)
    norms = torch.randn(2, 32).to(device, dtype)
    angle = torch.randn(64, 16).repeat(1, 2)
    cos = angle.cos().to(device, dtype)
    sin = (angle.sin() * torch.tensor([-1.0, 1.0]).repeat_interleave(16)).to(device, dtype)
    for q_norm, k_norm in ((None, None), (norms[0], norms[1])):
        memory = torch.full((2, 2, 13 * 16, 32), 7.0).to(device, dtype)
        pair = None if q_norm is None else (q_norm, k_norm)
        q = norm_rotate_write(qkv, pair, 1e-6, (cos, sin), memory[0], memory[1], rows, shape)
        qk = qkv[:, :6]
        if q_norm is not None:
            qk = EAGER_OPS.rms_norm(qk, torch.cat([q_norm.expand(4, -1), k_norm.expand(2, -1)]), 1e-6)
        rotated = EAGER_OPS.apply_rotary(qk, cos[rows.positions], sin[rows.positions])
        _check(q, rotated[:, :4])
        _check(memory[0, :, place].transpose(0, 1), rotated[:, 4:])
        assert torch.equal(memory[1, :, place].transpose(0, 1), qkv[:, 6:])
        memory[:, :, place] = 7.0
        assert bool((memory == 7.0).all())


def check_gated_silu(device: str, dtype: torch.dtype) -> None:
    """More numbers than one program takes, and no multiple of them."""
    torch.manual_seed(0)
    x = torch.randn(3, 2 * 1100).to(device, dtype)
    _check(gated_silu(x), EAGER_OPS.gated_silu(x))


@torch.inference_mode()
def _check(found: Tensor, expected: Tensor) -> None:
    rounding = ROUNDINGS[found.dtype]
    torch.testing.assert_close(found, expected, rtol=rounding, atol=2 * rounding)
