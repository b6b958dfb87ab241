"""The functions of logits compared with numpy in float64: masked vocabularies, and finite differences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from etude.algorithms.logits import (
    entropy,
    full_kl,
    sum_pi_squared,
    token_logp,
    topk_logp,
    topk_logp_with_tail,
)

ROWS, VOCABULARY, TEMPERATURE = 7, 6, 0.7


def random_logits(seed: int = 0, masked: bool = True) -> Tensor:
    logits = 3 * torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if masked:
        logits[0, 1:] = -torch.inf
        logits[1, [0, 4]] = -torch.inf
    return logits


def probabilities(logits: Tensor) -> np.ndarray:
    scaled = np.exp((logits.numpy() - logits.numpy().max(1, keepdims=True)) / TEMPERATURE)
    return np.asarray(scaled / scaled.sum(1, keepdims=True))


IDS = torch.tensor([0, 1, 2, 5, 4, 3, 0])


def test_token_logp_is_the_log_of_the_softmax() -> None:
    logits = random_logits()
    expected = np.log(probabilities(logits)[np.arange(ROWS), IDS.numpy()])
    np.testing.assert_allclose(token_logp(logits, IDS, TEMPERATURE).numpy(), expected, atol=1e-12)


def test_the_tail_is_the_probability_of_all_unlisted_tokens() -> None:
    logits = torch.randn(6, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[1, 4]]).repeat(6, 1)
    result = topk_logp_with_tail(logits, ids, TEMPERATURE)
    torch.testing.assert_close(result[:, :2], topk_logp(logits, ids, TEMPERATURE))
    torch.testing.assert_close(result.exp().sum(1), torch.ones(6, dtype=torch.float64))
    assert bool((topk_logp_with_tail(logits[:, :2], torch.tensor([[0, 1]]).repeat(6, 1))[:, 2] == -torch.inf).all())


def test_topk_logp_picks_k_tokens_a_row_and_agrees_with_token_logp() -> None:
    logits = random_logits()
    ids = torch.stack([IDS, (IDS + 2) % VOCABULARY], dim=1)
    result = topk_logp(logits, ids, TEMPERATURE)
    assert torch.equal(result[:, 0], token_logp(logits, IDS, TEMPERATURE))
    with np.errstate(divide="ignore"):
        expected = np.log(probabilities(logits)[np.arange(ROWS)[:, None], ids.numpy()])
    np.testing.assert_allclose(result.numpy(), expected, atol=1e-12)


def test_entropy_and_sum_pi_squared_ignore_impossible_tokens() -> None:
    logits = random_logits()
    p = probabilities(logits)
    expected = -(p * np.log(np.where(p > 0, p, 1))).sum(1)
    np.testing.assert_allclose(entropy(logits, TEMPERATURE).numpy(), expected, atol=1e-12)
    np.testing.assert_allclose(sum_pi_squared(logits, TEMPERATURE).numpy(), (p * p).sum(1), atol=1e-12)
    assert entropy(logits)[0] == 0


def test_full_kl_is_over_the_vocabulary() -> None:
    logits, ref = random_logits(), random_logits(1)
    p, q = probabilities(logits), probabilities(ref)
    expected = (p * (np.log(np.where(p > 0, p, 1)) - np.log(np.where(p > 0, q, 1)))).sum(1)
    np.testing.assert_allclose(full_kl(logits, ref, TEMPERATURE).numpy(), expected, atol=1e-12)
    assert (full_kl(logits, logits) == 0).all()


def test_full_kl_is_infinite_if_the_reference_excludes_a_token() -> None:
    ref = random_logits()
    assert torch.isinf(full_kl(random_logits(masked=False), ref)).tolist() == [True, True, *[False] * (ROWS - 2)]


@pytest.mark.parametrize("name", ["token_logp", "topk_logp", "entropy", "sum_pi_squared", "full_kl"])
def test_gradients_equal_finite_differences(name: str) -> None:
    logits, ref = random_logits(masked=False), random_logits(1, masked=False)
    functions = {
        "token_logp": lambda x: token_logp(x, IDS, TEMPERATURE),
        "topk_logp": lambda x: topk_logp(x, torch.stack([IDS, 5 - IDS], 1), TEMPERATURE),
        "entropy": lambda x: entropy(x, TEMPERATURE),
        "sum_pi_squared": lambda x: sum_pi_squared(x, TEMPERATURE),
        "full_kl": lambda x: full_kl(x, ref, TEMPERATURE),
    }
    assert torch.autograd.gradcheck(functions[name], logits.requires_grad_())


def test_gradients_are_finite_with_a_masked_vocabulary() -> None:
    logits = random_logits().requires_grad_()
    total = token_logp(logits, IDS) + entropy(logits) + sum_pi_squared(logits) + full_kl(logits, random_logits(1))
    total.sum().backward()
    assert logits.grad is not None and torch.isfinite(logits.grad).all()
    assert (logits.grad[0, 1:] == 0).all()


def test_half_precision_is_computed_in_float32() -> None:
    logits = random_logits(masked=False).bfloat16()
    torch.testing.assert_close(token_logp(logits, IDS), token_logp(logits.float(), IDS), rtol=0, atol=0)
    assert entropy(logits).dtype == torch.float32
