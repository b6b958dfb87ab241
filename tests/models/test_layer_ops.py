"""Norm, rotary positions and gated activation against their formulas, values and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from etude.models.layer_ops import apply_rotary, gated_silu, rms_norm


def some(*shape: int, seed: int = 0) -> Tensor:
    chance = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=chance, dtype=torch.float64).requires_grad_()


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt()


def plain_turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-b, a], -1) * sin[:, None]


def plain_gate(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return silu(gate) * up


COS, SIN = some(5, 8, seed=3).detach(), some(5, 8, seed=4).detach()
SIGNED = SIN * torch.tensor([-1.0] * 4 + [1.0] * 4, dtype=SIN.dtype)
STEPS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "norm": (lambda x, w: rms_norm(x, w, 1e-3), plain_norm, (some(5, 8), some(8, seed=1))),
    "norm of heads": (lambda x, w: rms_norm(x, w, 1e-3), plain_norm, (some(5, 3, 8), some(8, seed=1))),
    "turn": (lambda x: apply_rotary(x, COS, SIGNED), lambda x: plain_turn(x, COS, SIN), (some(5, 3, 8),)),
    "gate": (gated_silu, plain_gate, (some(5, 8),)),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_its_formula(name: str) -> None:
    step, formula, inputs = STEPS[name]
    found, wanted = step(*inputs), formula(*inputs)
    torch.testing.assert_close(found, wanted)
    weights = some(*found.shape, seed=9).detach()
    torch.testing.assert_close(
        torch.autograd.grad((found * weights).sum(), inputs), torch.autograd.grad((wanted * weights).sum(), inputs)
    )
    assert torch.autograd.gradcheck(step, inputs)


@pytest.mark.parametrize("name", STEPS)
def test_in_bfloat16_a_step_is_its_formula_rounded_a_few_times(name: str) -> None:
    step, formula, inputs = STEPS[name]
    low = [x.detach().bfloat16().requires_grad_() for x in inputs]
    high = [x.detach().double().requires_grad_() for x in low]
    found, wanted = step(*low), formula(*high)
    torch.testing.assert_close(found.double(), wanted, atol=0.03, rtol=0.03)
    of_low, of_high = (torch.autograd.grad(y.double().sin().sum(), xs) for y, xs in ((found, low), (wanted, high)))
    for a, b in zip(of_low, of_high, strict=True):
        assert a.dtype == torch.bfloat16
        torch.testing.assert_close(a.double(), b, atol=0.1, rtol=0.05)


def test_slices_of_a_wider_tensor_are_taken_as_they_are() -> None:
    whole = some(5, 7, 8)
    torch.testing.assert_close(apply_rotary(whole[:, 2:5], COS, SIGNED), plain_turn(whole[:, 2:5], COS, SIN))
    torch.testing.assert_close(rms_norm(whole[:, 2:5], torch.ones(8), 1e-3), plain_norm(whole[:, 2:5], torch.ones(8)))
