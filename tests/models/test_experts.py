"""The products of a mixture's experts: values, gradients and padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from etude.models import experts as experts_module
from etude.models.experts import compute_experts, find_experts, grouped_product, pad_expert_rows
from tests.families import family_model

IDLE = 2
"""An expert that no token chooses."""
TOKENS = 7


def mixture_of(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return the experts of a family's last layer."""
    return [part for part in family_model(name, dtype).module.modules() if find_experts(part) == [part]][-1]


def inputs_of(experts: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, and the experts and weights of each token; one expert gets none."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, 32, generator=generator).to(next(experts.parameters()).dtype)
    scores = torch.randn(TOKENS, experts.num_experts, generator=generator)
    scores[:, IDLE] = -9
    weights, chosen = scores.to(hidden.dtype).softmax(-1).topk(2)
    return hidden.requires_grad_(), chosen, weights.requires_grad_()


def gradients(out: Tensor, experts: Any, *inputs: Tensor) -> list[Tensor]:
    target = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype)
    return list(torch.autograd.grad((out * target).sum(), [*inputs, *experts.parameters()]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_experts_equal_those_of_the_family_one_by_one(name: str, dtype: torch.dtype) -> None:
    """With a gate or without one, with biases, and with transposed weights."""
    experts = mixture_of(name, dtype)
    hidden, chosen, weights = inputs_of(experts)
    out = compute_experts(experts, hidden, chosen, weights)
    found = gradients(out, experts, hidden, weights)
    experts.config._experts_implementation = "eager"
    theirs = experts(hidden, chosen, weights)
    expected = gradients(theirs, experts, hidden, weights)
    torch.testing.assert_close([out, *found], [theirs, *expected], rtol=1e-5, atol=1e-5)
    for gradient in found[2:]:
        assert not gradient[IDLE].any() and all(gradient[i].any() for i in range(4) if i != IDLE)


def test_sums_in_parts_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = mixture_of("qwen3_moe", torch.bfloat16)
    hidden, chosen, weights = inputs_of(experts)
    wide = weights.detach().float().requires_grad_()  # as of routers that compute in float32
    results = []
    for numbers in (experts_module.PART, 3 * 2 * 32, 1):
        monkeypatch.setattr(experts_module, "PART", numbers)
        out = compute_experts(experts, hidden, chosen, wide)
        results.append([out, *gradients(out, experts, hidden, wide)])
    for whole, parted, single in zip(*results, strict=True):
        assert torch.equal(whole, parted) and torch.equal(whole, single)


def test_a_product_has_the_gradient_of_its_formula() -> None:
    x, weight = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((5, 3), (4, 3, 2)))
    ends = torch.tensor([2, 2, 4, 5])
    assert torch.autograd.gradcheck(lambda x, weight: grouped_product(x, weight, ends), (x, weight))


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_padding_changes_no_result_and_stays_out_of_training(name: str) -> None:
    experts = mixture_of(name, torch.float64)
    hidden, chosen, weights = inputs_of(experts)
    plain = compute_experts(experts, hidden, chosen, weights)
    with pad_expert_rows(16):
        trained = compute_experts(experts, hidden, chosen, weights)
        with torch.no_grad():
            padded = compute_experts(experts, hidden, chosen, weights)
    assert torch.equal(trained, plain) and trained.requires_grad
    torch.testing.assert_close(padded, plain, rtol=1e-12, atol=1e-12)


def test_with_padding_a_token_has_the_same_bits_alone_and_among_others() -> None:
    experts = mixture_of("qwen3_moe")
    hidden, chosen, weights = inputs_of(experts)
    with torch.no_grad(), pad_expert_rows(16):
        together = compute_experts(experts, hidden, chosen, weights)
        alone = [compute_experts(experts, *(x[i : i + 1] for x in (hidden, chosen, weights))) for i in range(TOKENS)]
    assert torch.equal(torch.cat(alone), together)
