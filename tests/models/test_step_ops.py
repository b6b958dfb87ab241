"""The operations of a decode step round where the trainer's do, so that sampler and trainer stay close."""

from __future__ import annotations

import torch
from torch import Tensor

from etude.models import StepMemory, StepRows, TorchStepOps
from etude.models.layer_ops import EAGER_OPS

ROWS = 6
HEADS = 4
KEY_HEADS = 2
WIDTH = 32
EPS = 1e-6


def random_of(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).bfloat16()


def assert_rounded_alike(result: Tensor, expected: Tensor) -> None:
    """Assert that few numbers differ, and those by one rounding. A rounding less on the way changes a fifth of them."""
    torch.testing.assert_close(result, expected, atol=0, rtol=2**-7)
    assert float((result != expected).float().mean()) < 0.02


@torch.inference_mode()
def test_norms_are_rounded_as_the_trainers_are() -> None:
    memory = StepMemory(
        keys_values=torch.zeros(1, 2, KEY_HEADS, 8, 4, WIDTH, dtype=torch.bfloat16),
        table=torch.arange(8).view(2, 4),
        cos=torch.ones(16, WIDTH, dtype=torch.bfloat16),
        sin=torch.zeros(16, WIDTH, dtype=torch.bfloat16),
        fetch_bytes=1 << 20,
    )
    rows = StepRows(torch.zeros(ROWS, dtype=torch.int64), torch.arange(ROWS), blocks=2)
    ops = TorchStepOps(memory, rows)
    x = random_of(ROWS, 256)
    residual = random_of(ROWS, 256).roll(1)
    weight = random_of(256)
    added, normed = ops.add_norm(x, residual.clone(), weight, EPS)
    assert torch.equal(added, residual + x)
    assert_rounded_alike(normed, EAGER_OPS.rms_norm(residual + x, weight, EPS))
    qkv = random_of(ROWS, HEADS + 2 * KEY_HEADS, WIDTH)
    q_norm = random_of(WIDTH)
    k_norm = q_norm.roll(1)
    q = ops.write(0, qkv, q_norm, k_norm, EPS)
    assert_rounded_alike(q, EAGER_OPS.rms_norm(qkv[:, :HEADS], q_norm, EPS))
    keys, values = memory.keys_values[0, :, :, :2].flatten(2, 3)[:, :, :ROWS].transpose(1, 2)
    assert_rounded_alike(keys, EAGER_OPS.rms_norm(qkv[:, HEADS:-KEY_HEADS], k_norm, EPS))
    assert torch.equal(values, qkv[:, -KEY_HEADS:])
