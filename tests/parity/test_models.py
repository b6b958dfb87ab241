"""The models compared with transformers: packed = one by one = tree, forward and, in float64, every gradient."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from etude.batch import Pack
from etude.models import Model, PackedAttention, create, save, tiny_config
from tests.models.packs import FOREST, pack_of, paths, unshared

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama3-rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3-yarn": (
        "qwen3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "qwen3-untied": ("qwen3", {"tied": False, "attention_bias": True, "kv_heads": 4}),
    "mistral-window": ("mistral", {"sliding_window": 5}),
    "gemma2": ("gemma2", {"sliding_window": 5, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0}),
    "gemma3": ("gemma3", {"sliding_window": 5, "sliding_window_pattern": 2}),
    "gpt2": ("gpt2", {}),
}


FIRST = [name if name in ("qwen3", "gpt2") else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
"""The cases; the quick tests use two."""


def made(name: str, dtype: torch.dtype) -> Model:
    """Return a model whose weights are large enough that each of them matters."""
    family, more = CASES[name]
    more = {"layers": 3, "head_dim": None if family == "gpt2" else 16, "family": family, **more}
    model = create(tiny_config(50, **more), seed=1, dtype=dtype)
    chance = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=chance, dtype=torch.float64)
            parameter.add_((0.2 * noise).to(dtype))
    return model


def run(model: Model, pack: Pack) -> Tensor:
    return model.logits(model.hidden(pack.ids, pack.positions, PackedAttention(pack)))


def theirs(model: Model, directory: Path) -> PreTrainedModel:
    """Return the same weights, loaded and run by transformers."""
    save(model, directory)
    module: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    return module


@pytest.mark.parametrize("name", FIRST)
def test_a_tree_and_separate_rows_give_the_outputs_of_transformers(name: str, tmp_path: Path) -> None:
    model, tree = made(name, torch.float32), pack_of(FOREST)
    reference = theirs(model, tmp_path)
    with torch.no_grad():
        packed, separate = run(model, tree), run(model, unshared(tree))
        rows = paths(tree)
        wanted = [reference(tree.ids[row][None].long()).logits[0] for row in rows]
    for row, logits in zip(rows, wanted, strict=True):
        torch.testing.assert_close(packed[row], logits, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(separate, torch.cat(wanted), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", FIRST)
def test_every_gradient_is_the_same_however_rows_are_packed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tree = made(name, torch.float64), pack_of(FOREST)
    keep_norms_wide(model, monkeypatch)
    rows, separate = paths(tree), unshared(tree)
    weights = torch.randn(len(separate.ids), model.vocab_size, dtype=torch.float64)
    ends = [0, *separate.offsets[1:].tolist()]

    tree_logits = run(model, tree)
    as_tree = gradients(model, (tree_logits[torch.cat(rows)] * weights).sum())
    packed = gradients(model, (run(model, separate) * weights).sum())
    alone = []
    for row, start, end in zip(rows, ends, ends[1:], strict=False):
        one = pack_of([(-1, len(row))])
        logits = model.logits(model.hidden(tree.ids[row], one.positions, PackedAttention(one)))
        alone.append((logits * weights[start:end]).sum())
    one_by_one = gradients(model, torch.stack(alone).sum())
    for (name, _), a, b, c in zip(model.named_weights(), as_tree, packed, one_by_one, strict=True):
        torch.testing.assert_close(a, c, atol=1e-9, rtol=1e-9, msg=partial("{}, {}: {}".format, "tree", name))
        torch.testing.assert_close(b, c, atol=1e-9, rtol=1e-9, msg=partial("{}, {}: {}".format, "packed", name))


@pytest.mark.parametrize("name", ["llama", "qwen3-yarn", "mistral-window", "gemma2", "gpt2"])
def test_the_gradient_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    model, pack = made(name, torch.float32), pack_of([(-1, 12)])
    reference = theirs(model, tmp_path)
    weights = torch.randn(12, model.vocab_size)
    (run(model, pack) * weights).sum().backward()
    (reference(pack.ids[None].long()).logits[0] * weights).sum().backward()
    wanted = dict(reference.named_parameters())
    for name, parameter in model.named_weights():
        grad = wanted[name].grad
        assert parameter.grad is not None and grad is not None
        scale = float(grad.abs().max())
        torch.testing.assert_close(parameter.grad, grad, atol=1e-4 * scale, rtol=1e-3)


@pytest.mark.parametrize("name", ["qwen3", "mistral-window", "gemma2", "gpt2"])
def test_bfloat16_stays_close_to_float32(name: str) -> None:
    model, tree = made(name, torch.float32), pack_of(FOREST)
    half = model.copy(dtype=torch.bfloat16)
    with torch.no_grad():
        wanted, half_outputs = run(model, tree), run(half, tree)
    assert half.dtype == torch.bfloat16
    off = (half_outputs - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()
    assert 0 < off < 0.1


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gpt2"])
def test_checkpointed_activations_give_the_same_gradient(name: str) -> None:
    model, tree = made(name, torch.float32), pack_of(FOREST)
    expected = gradients(model, run(model, tree).square().sum())
    for model.activation_checkpointing in ("full", "selective"):
        again = gradients(model, run(model, tree).square().sum())
        for a, b in zip(expected, again, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


def gradients(model: Model, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def keep_norms_wide(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' Gemma takes its norms in float32. Here they are in float64, so that gradients can be compared to
    1e-9."""

    def wide(self: Any, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (1 + self.weight)

    for part in model.module.modules():
        if type(part).__name__.startswith("Gemma") and type(part).__name__.endswith("RMSNorm"):
            assert isinstance(part, nn.Module)
            monkeypatch.setattr(type(part), "forward", wide)
