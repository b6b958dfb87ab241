"""Log-probs from hidden states equal those from logits, and so do gradients; the logits never exist as a whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from etude.algorithms import logits as plain
from etude.batch import SupportSets
from etude.models import Model, TokenSets, create, logp_and_entropy, map_logit_chunks, tiny_config, token_logp
from etude.models.logprob_head import chunk_rows
from etude.support import SetKind, Support, encode_set

ROWS, TEMPERATURE = 23, 0.7


def model_of(family: str = "qwen3", dtype: torch.dtype = torch.float64, vocabulary: int = 61, **sizes: Any) -> Model:
    model = create(tiny_config(vocabulary, family=family, **sizes), seed=0, dtype=dtype)
    with torch.no_grad():
        model.head_weight.normal_(generator=torch.Generator().manual_seed(3))
    return model


def random_inputs(model: Model, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    width = model.head_weight.shape[1]
    hidden = torch.randn(rows, width, generator=generator, dtype=torch.float64).to(model.dtype) / 4
    return hidden.requires_grad_(), torch.randint(0, model.vocab_size, (rows,), generator=generator, dtype=torch.int32)


def gradients(model: Model, hidden: Tensor, values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    weights = [torch.randn(v.shape, generator=torch.Generator().manual_seed(i)) for i, v in enumerate(values)]
    loss = sum(((v * w).sum() for v, w in zip(values, weights, strict=True)), start=torch.zeros(()))
    bias = () if model.head_bias is None else (model.head_bias,)
    return torch.autograd.grad(loss, (hidden, model.head_weight, *bias))


SOFTCAPPED = {"family": "gemma2", "final_logit_softcapping": 2.0}


def test_a_large_vocabulary_has_fewer_rows_of_logits_at_a_time() -> None:
    sizes = {"layers": 1, "hidden": 4, "heads": 1, "kv_heads": 1, "intermediate": 4}
    seen: list[int] = []
    for vocabulary, rows in ((1000, 1500), (2**17, 600), (2**20, 200)):
        model = create(tiny_config(vocabulary, **sizes), seed=0)
        (result,) = map_logit_chunks(
            model, torch.zeros(rows, 4), lambda logits, *_: (seen.append(len(logits)), logits[:, 0])[1:]
        )
        assert len(result) == rows
    assert seen == [1024, 476, 512, 88, 128, 72]


GPU_BYTES = 80 * 10**9
FREE = 60 * 2**30


@pytest.mark.parametrize(
    ("vocab_size", "gpu", "rows"),
    [
        (32_768, {}, 1024),
        (151_936, {}, 441),
        (1_000_000, {}, 128),
        (32_768, {"gpu": True, "total": 24 * 10**9, "free": 20 * 2**30}, 2048),
        (151_936, {"gpu": True, "total": 24 * 10**9, "free": 20 * 2**30}, 512),
        (32_768, {"gpu": True, "total": GPU_BYTES, "free": FREE}, 4096),
        (151_936, {"gpu": True, "total": GPU_BYTES, "free": FREE}, 3533),
        (151_936, {"gpu": True, "total": GPU_BYTES, "free": 8 * 2**30}, 512),
    ],
)
def test_a_gpu_with_more_memory_gets_longer_chunks(vocab_size: int, gpu: dict[str, Any], rows: int) -> None:
    assert chunk_rows(vocab_size, **gpu) == rows


@pytest.mark.parametrize("sizes", [{}, SOFTCAPPED, {"tied": False}], ids=["plain", "softcap", "untied"])
@pytest.mark.parametrize("chunk", [1, 7, ROWS, 100])
def test_log_probs_and_entropies_equal_those_of_the_logits(sizes: dict[str, Any], chunk: int) -> None:
    model = model_of(**sizes)
    hidden, ids = random_inputs(model)
    logits = model.logits(hidden)
    expected = (plain.token_logp(logits, ids, TEMPERATURE), plain.entropy(logits, TEMPERATURE))
    result = logp_and_entropy(model, hidden, ids, TEMPERATURE, chunk=chunk)
    torch.testing.assert_close(result, expected, atol=1e-12, rtol=1e-12)
    expected_gradients = gradients(model, hidden, expected)
    torch.testing.assert_close(gradients(model, hidden, result), expected_gradients, atol=1e-11, rtol=1e-11)

    logp_alone = token_logp(model, hidden, ids, TEMPERATURE, chunk=chunk)
    torch.testing.assert_close(logp_alone, expected[0], atol=1e-12, rtol=1e-12)
    logits = model.logits(hidden)
    expected_gradients = gradients(model, hidden, (plain.token_logp(logits, ids, TEMPERATURE),))
    torch.testing.assert_close(gradients(model, hidden, (logp_alone,)), expected_gradients, atol=1e-11, rtol=1e-11)


def random_sets(ids: Tensor, vocabulary: int) -> tuple[TokenSets, Tensor]:
    """Return a set of each form for the rows in turn, each with the row's id; and all of them as masks [N, V]."""
    numbers = np.random.default_rng(5)
    masks = numbers.random((len(ids), vocabulary)) < np.resize([0.02, 0.5, 0.97, 0.0, 1.0], len(ids))[:, None]
    masks[np.arange(len(ids)), ids.numpy()] = True
    support = Support.build([encode_set(mask) for mask in masks])
    assert support is not None
    return TokenSets(torch.tensor(support.index), SupportSets.from_support(support)), torch.from_numpy(masks)


@pytest.mark.parametrize("sizes", [{}, SOFTCAPPED, {"tied": False}], ids=["plain", "softcap", "bias"])
@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_a_row_with_a_set_has_the_distribution_over_its_set(sizes: dict[str, Any], chunk: int) -> None:
    model = model_of(**sizes)
    if sizes == {"tied": False}:
        model._head.bias = nn.Parameter(
            torch.randn(model.vocab_size, generator=torch.Generator().manual_seed(4), dtype=model.dtype)
        )
    hidden, ids = random_inputs(model)
    sets, masks = random_sets(ids, model.vocab_size)
    logits = model.logits(hidden).masked_fill(~masks, -torch.inf)
    expected = plain.token_logp(logits, ids, TEMPERATURE), plain.entropy(logits, TEMPERATURE)
    assert (expected[0][3::5] == 0).all(), "a set of one token leaves no choice"
    expected_gradients = gradients(model, hidden, expected)
    result = logp_and_entropy(model, hidden, ids, TEMPERATURE, chunk=chunk, sets=sets)
    torch.testing.assert_close(result, expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(gradients(model, hidden, result), expected_gradients, atol=1e-11, rtol=1e-11)
    other = map_logit_chunks(
        model,
        hidden,
        lambda logits, start, stop: (
            plain.token_logp(logits, ids[start:stop], TEMPERATURE),
            plain.entropy(logits, TEMPERATURE),
        ),
        chunk,
        sets,
    )
    torch.testing.assert_close(other, expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(gradients(model, hidden, other), expected_gradients, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("which", [0, 1])
def test_log_probs_and_entropies_can_be_used_alone(which: int) -> None:
    model = model_of()
    hidden, ids = random_inputs(model)
    logits = model.logits(hidden)
    expected = (plain.token_logp(logits, ids), plain.entropy(logits))[which]
    result = logp_and_entropy(model, hidden, ids, chunk=5)[which]
    torch.testing.assert_close(
        gradients(model, hidden, (result,)), gradients(model, hidden, (expected,)), atol=1e-11, rtol=1e-11
    )


@pytest.mark.parametrize("sizes", [{}, SOFTCAPPED], ids=["plain", "softcap"])
def test_any_function_of_logits_can_be_computed_in_chunks(sizes: dict[str, Any]) -> None:
    model = model_of(**sizes)
    hidden, ids = random_inputs(model)
    top = torch.stack([ids.long(), (ids.long() + 5) % model.vocab_size], 1)

    def functions(logits: Tensor, start: int, stop: int) -> tuple[Tensor, ...]:
        return plain.topk_logp(logits, top[start:stop]), plain.sum_pi_squared(logits), logits.argmax(1)

    *result, best = map_logit_chunks(model, hidden, functions, chunk=6)
    *expected, expected_best = functions(model.logits(hidden), 0, ROWS)
    assert torch.equal(best, expected_best)
    torch.testing.assert_close(result, expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(
        gradients(model, hidden, tuple(result)), gradients(model, hidden, tuple(expected)), atol=1e-11, rtol=1e-11
    )


def test_head_and_hidden_states_get_their_gradients_alone() -> None:
    model = model_of()
    hidden, ids = random_inputs(model)
    expected = gradients(model, hidden, (token_logp(model, hidden, ids, chunk=4),))
    weights = torch.randn(ROWS, generator=torch.Generator().manual_seed(0))
    (head_gradient,) = torch.autograd.grad((token_logp(model, hidden.detach(), ids) * weights).sum(), model.head_weight)
    model.head_weight.requires_grad_(False)
    (hidden_gradient,) = torch.autograd.grad((token_logp(model, hidden, ids) * weights).sum(), hidden)
    torch.testing.assert_close((hidden_gradient, head_gradient), expected, atol=1e-12, rtol=1e-12)


def test_zero_rows_have_zero_log_probs() -> None:
    model = model_of()
    hidden, ids = random_inputs(model, rows=0)
    logp, entropy = logp_and_entropy(model, hidden, ids)
    (logp.sum() + entropy.sum()).backward()
    assert logp.shape == entropy.shape == (0,) and hidden.grad is not None
    assert model.head_weight.grad is not None and not model.head_weight.grad.any()


def test_bfloat16_log_probs_are_computed_in_float32() -> None:
    model = model_of(dtype=torch.bfloat16)
    hidden, ids = random_inputs(model)
    logp, entropy = logp_and_entropy(model, hidden, ids, TEMPERATURE, chunk=8)
    logits = model.logits(hidden)
    assert logp.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logp, plain.token_logp(logits, ids, TEMPERATURE))
    torch.testing.assert_close(entropy, plain.entropy(logits, TEMPERATURE))
    (logp.sum() + entropy.sum()).backward()
    assert hidden.grad is not None and hidden.grad.dtype == torch.bfloat16


class Largest(TorchDispatchMode):
    """A dispatch mode that records the number of elements of the largest result."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.elements = max(self.elements, leaf.numel())
        return out


@pytest.mark.parametrize("kind", ["logp", "both", "any"])
def test_the_logits_never_exist_as_a_whole(kind: str) -> None:
    model = model_of(dtype=torch.float32, vocabulary=1024, hidden=16, heads=2, head_dim=8)
    rows, chunk = 512, 64
    hidden, ids = random_inputs(model, rows)

    def work() -> None:
        if kind == "logp":
            values: tuple[Tensor, ...] = (token_logp(model, hidden, ids, chunk=chunk),)
        elif kind == "both":
            values = logp_and_entropy(model, hidden, ids, chunk=chunk)
        else:
            values = map_logit_chunks(model, hidden, lambda z, a, b: (plain.token_logp(z, ids[a:b]),), chunk)
        torch.stack([v.sum() for v in values]).sum().backward()

    with Largest() as seen:
        work()
    assert seen.elements == chunk * model.vocab_size


def test_rows_with_small_sets_get_no_logits_of_the_vocabulary() -> None:
    model = model_of(dtype=torch.float32, vocabulary=1024, hidden=4, heads=1, kv_heads=1, head_dim=4)
    hidden, ids = random_inputs(model, 512)
    kept = [np.unique([token, 7, 8]).astype(np.int32) for token in ids.tolist()]
    support = Support.build([(SetKind.KEPT, each) for each in kept])
    assert support is not None
    sets = TokenSets(torch.tensor(support.index), SupportSets.from_support(support))
    with Largest() as seen:
        logp_and_entropy(model, hidden, ids, sets=sets)[0].sum().backward()
    assert seen.elements <= 4 * model.vocab_size, "the gradient of the head"


def test_the_tracker_sees_a_whole_matrix() -> None:
    model = model_of(dtype=torch.float32, vocabulary=1024, hidden=16, heads=2, head_dim=8)
    hidden, ids = random_inputs(model, 512)
    with Largest() as seen:
        plain.token_logp(model.logits(hidden), ids).sum().backward()
    assert seen.elements == 512 * 1024
