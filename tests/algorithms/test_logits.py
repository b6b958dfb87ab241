"""The functions of logits compared with numpy in float64: masked vocabularies, and finite differences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from etude.algorithms.logits import (
    entropy,
    full_kl,
    masked_token_logp,
    sum_pi_squared,
    token_logp,
    topk_logp,
    topk_logp_with_tail,
)
from etude.errors import BatchError

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


def token_sets() -> tuple[Tensor, Tensor]:
    """Return a set of tokens for each row: the sampled one and some others, in no order and of different sizes."""
    rows = [[3, 0], [1], [5, 2, 4], [0, 1, 2, 3, 4, 5], [4, 5], [3, 2], [1, 0, 2]]
    return torch.tensor([token for row in rows for token in row]), torch.tensor(
        [0, *np.cumsum([len(row) for row in rows]).tolist()]
    )


def test_sampling_mask_renormalizes_over_the_samplers_set() -> None:
    logits, (allowed, offsets) = random_logits(), token_sets()
    p = probabilities(logits)
    probability_of_set = [p[i, allowed[offsets[i] : offsets[i + 1]].numpy()].sum() for i in range(ROWS)]
    expected = np.log(p[np.arange(ROWS), IDS.numpy()] / probability_of_set)
    np.testing.assert_allclose(
        masked_token_logp(logits, IDS, allowed, offsets, TEMPERATURE).numpy(), expected, atol=1e-12
    )


def test_sampling_mask_over_the_whole_vocabulary_is_token_logp() -> None:
    logits = random_logits()
    allowed, offsets = torch.arange(VOCABULARY).repeat(ROWS), torch.arange(ROWS + 1) * VOCABULARY
    result = masked_token_logp(logits, IDS.int(), allowed, offsets)
    torch.testing.assert_close(result, token_logp(logits, IDS), rtol=0, atol=1e-12)


def test_sampling_mask_refuses_a_token_outside_its_set() -> None:
    allowed, offsets = token_sets()
    ids = IDS.clone()
    ids[4] = 0
    with pytest.raises(BatchError, match=r"Token 0 of row 4 is 0 times in the set of 2 tokens"):
        masked_token_logp(random_logits(), ids, allowed, offsets)


@pytest.mark.parametrize(
    "name", ["token_logp", "topk_logp", "entropy", "sum_pi_squared", "full_kl", "masked_token_logp"]
)
def test_gradients_equal_finite_differences(name: str) -> None:
    logits, ref, (allowed, offsets) = random_logits(masked=False), random_logits(1, masked=False), token_sets()
    functions = {
        "token_logp": lambda x: token_logp(x, IDS, TEMPERATURE),
        "topk_logp": lambda x: topk_logp(x, torch.stack([IDS, 5 - IDS], 1), TEMPERATURE),
        "entropy": lambda x: entropy(x, TEMPERATURE),
        "sum_pi_squared": lambda x: sum_pi_squared(x, TEMPERATURE),
        "full_kl": lambda x: full_kl(x, ref, TEMPERATURE),
        "masked_token_logp": lambda x: masked_token_logp(x, IDS, allowed, offsets, TEMPERATURE),
    }
    assert torch.autograd.gradcheck(functions[name], logits.requires_grad_())


def test_gradients_are_finite_with_a_masked_vocabulary() -> None:
    logits, (allowed, offsets) = random_logits().requires_grad_(), token_sets()
    total = (
        token_logp(logits, IDS)
        + entropy(logits)
        + sum_pi_squared(logits)
        + full_kl(logits, random_logits(1))
        + masked_token_logp(logits, IDS, allowed, offsets)
    )
    total.sum().backward()
    assert logits.grad is not None and torch.isfinite(logits.grad).all()
    assert (logits.grad[0, 1:] == 0).all()


def test_half_precision_is_computed_in_float32() -> None:
    logits = random_logits(masked=False).bfloat16()
    torch.testing.assert_close(token_logp(logits, IDS), token_logp(logits.float(), IDS), rtol=0, atol=0)
    assert entropy(logits).dtype == torch.float32
