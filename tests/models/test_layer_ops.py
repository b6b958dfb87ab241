"""Norm, rotary positions and gated activation compared with their formulas: values and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from etude.models.layer_ops import apply_rotary, gated_silu, rms_norm


def random_tensor(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def norm_formula(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt()


def rotary_formula(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-b, a], -1) * sin[:, None]


def gate_formula(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return silu(gate) * up


COS, SIN = random_tensor(5, 8, seed=3).detach(), random_tensor(5, 8, seed=4).detach()
SIGNED = SIN * torch.tensor([-1.0] * 4 + [1.0] * 4, dtype=SIN.dtype)
OPERATIONS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "norm": (lambda x, w: rms_norm(x, w, 1e-3), norm_formula, (random_tensor(5, 8), random_tensor(8, seed=1))),
    "norm of heads": (
        lambda x, w: rms_norm(x, w, 1e-3),
        norm_formula,
        (random_tensor(5, 3, 8), random_tensor(8, seed=1)),
    ),
    "rotary": (
        lambda x: apply_rotary(x, COS, SIGNED),
        lambda x: rotary_formula(x, COS, SIN),
        (random_tensor(5, 3, 8),),
    ),
    "gate": (gated_silu, gate_formula, (random_tensor(5, 8),)),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_equals_its_formula(name: str) -> None:
    operation, formula, inputs = OPERATIONS[name]
    result, expected = operation(*inputs), formula(*inputs)
    torch.testing.assert_close(result, expected)
    weights = random_tensor(*result.shape, seed=9).detach()
    torch.testing.assert_close(
        torch.autograd.grad((result * weights).sum(), inputs), torch.autograd.grad((expected * weights).sum(), inputs)
    )
    assert torch.autograd.gradcheck(operation, inputs)


@pytest.mark.parametrize("name", OPERATIONS)
def test_in_bfloat16_an_operation_equals_its_formula_up_to_rounding(name: str) -> None:
    operation, formula, inputs = OPERATIONS[name]
    rounded = [x.detach().bfloat16().requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in rounded]
    result, expected = operation(*rounded), formula(*exact)
    torch.testing.assert_close(result.double(), expected, atol=0.03, rtol=0.03)
    rounded_gradients, exact_gradients = (
        torch.autograd.grad(y.double().sin().sum(), xs) for y, xs in ((result, rounded), (expected, exact))
    )
    for a, b in zip(rounded_gradients, exact_gradients, strict=True):
        assert a.dtype == torch.bfloat16
        torch.testing.assert_close(a.double(), b, atol=0.1, rtol=0.05)


def test_operations_accept_slices_of_a_wider_tensor() -> None:
    whole = random_tensor(5, 7, 8)
    torch.testing.assert_close(apply_rotary(whole[:, 2:5], COS, SIGNED), rotary_formula(whole[:, 2:5], COS, SIN))
    torch.testing.assert_close(rms_norm(whole[:, 2:5], torch.ones(8), 1e-3), norm_formula(whole[:, 2:5], torch.ones(8)))
