"""The model as its users see it: parameters stay leaves, fused weights share storage, and copies share nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.autograd import grad
from torch.nn.functional import linear
from transformers import AutoConfig

from etude.models import AttentionShape, Model, PackedAttention, create, load, save, tiny_config
from etude.models.fused_layers import FusedBackbone, FusedLinear
from tests.autograd import kept_for_backward
from tests.models.packs import FOREST, pack_of

PACK = pack_of(FOREST)


def run(model: Model) -> Tensor:
    return model.logits(model.hidden(PACK.ids, PACK.positions, PackedAttention(PACK)))


def fused_linears(model: Model) -> list[FusedLinear]:
    assert isinstance(model._backbone, FusedBackbone)
    return [fused for layer in model._backbone.layers for fused in (layer.qkv, layer.gate_up)]


def test_a_model_reports_its_sizes() -> None:
    model = create(tiny_config(50, layers=3, heads=6, kv_heads=2, head_dim=10, context=99), seed=0)
    assert model.attention_shapes == (AttentionShape(6, 2, 10, 10),) * 3
    assert (model.num_layers, model.kv_values_per_token) == (3, 120)
    assert (model.vocab_size, model.context_length, model.dtype, str(model.device)) == (50, 99, torch.float32, "cpu")


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_q_k_and_v_are_views_of_one_storage_under_their_published_names(family: str) -> None:
    model = create(tiny_config(50, family=family), seed=0)
    weights = dict(model.named_weights())
    for layer in range(2):
        for block, names in (("self_attn", "qkv"), ("mlp", ("gate", "up"))):
            views = [weights[f"model.layers.{layer}.{block}.{name}_proj.weight"] for name in names]
            assert len({w.untyped_storage().data_ptr() for w in views}) == 1
            assert all(w.is_leaf and w.is_contiguous() and w.requires_grad for w in views)


def test_tied_weights_are_named_once() -> None:
    names = [name for name, _ in create(tiny_config(50), seed=0).named_weights()]
    assert len(names) == len(set(names)) and "lm_head.weight" not in names
    assert "lm_head.weight" in dict(create(tiny_config(50, tied=False), seed=0).named_weights())


@pytest.mark.parametrize("options", [{}, {"attention_bias": True}], ids=["plain", "bias"])
def test_an_optimizer_step_reaches_the_fused_storage(options: dict[str, bool]) -> None:
    model = create(tiny_config(50, **options), seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    before = run(model)
    before.square().mean().backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
    optimizer.step()
    for fused in fused_linears(model):
        weights = [p for p in fused.parameters if p.ndim == 2]
        assert torch.equal(fused.weight, torch.cat(weights))
    assert not torch.allclose(run(model), before)


def test_gradients_add_up_over_backward_passes() -> None:
    model = create(tiny_config(50), seed=0, dtype=torch.float64)
    run(model).square().sum().backward()
    once = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    run(model).square().sum().backward()
    for parameter, first in zip(model.parameters(), once, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * first)


def test_only_parameters_that_require_a_gradient_get_one() -> None:
    model = create(tiny_config(50), seed=0)
    for name, parameter in model.named_weights():
        parameter.requires_grad_("k_proj" in name)
    run(model).square().sum().backward()
    assert all((p.grad is not None) == ("k_proj" in name) for name, p in model.named_weights())


def test_a_state_dict_is_loaded_and_saved(tmp_path: Path) -> None:
    model, other = create(tiny_config(50), seed=0), create(tiny_config(50), seed=1)
    other.module.load_state_dict(model.module.state_dict())
    assert torch.equal(run(model), run(other))
    save(other, tmp_path)
    assert torch.equal(run(model), run(load(tmp_path, dtype=torch.float32)))


def test_a_copy_has_its_own_weights() -> None:
    model = create(tiny_config(50), seed=0)
    model.activation_checkpointing = "selective"
    copied = model.copy()
    assert copied.activation_checkpointing == "selective" and torch.equal(run(model), run(copied))
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.add_(1)
    assert not torch.allclose(run(model), run(copied))
    assert torch.equal(run(model), run(create(tiny_config(50), seed=0)))
    half = model.copy(dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16 and model.dtype == torch.float32


SIZES = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
NO_ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
RANDOM = {
    "qwen3": lambda: tiny_config(50, family="qwen3", attention_dropout=0.5),
    "gpt2": lambda: tiny_config(50, family="gpt2", attn_pdrop=0.5, resid_pdrop=0.5),
    "opt": lambda: AutoConfig.for_model("opt", **SIZES, **NO_ENDS, ffn_dim=64, word_embed_proj_dim=32, dropout=0.5),
    "starcoder2": lambda: AutoConfig.for_model(
        "starcoder2", **SIZES, **NO_ENDS, num_key_value_heads=2, intermediate_size=64, residual_dropout=0.5
    ),
    "mixtral": lambda: AutoConfig.for_model(
        "mixtral",
        **SIZES,
        **NO_ENDS,
        num_key_value_heads=2,
        intermediate_size=64,
        num_local_experts=4,
        router_jitter_noise=0.5,
    ),
}
"""Models with randomness in training: dropout in modules or in functions, and noise in a router."""


def test_a_mixture_computes_in_float64() -> None:
    """One expert after the other, because torch's grouped products have no float64."""
    model = create(RANDOM["mixtral"](), seed=0)
    wide = model.copy(dtype=torch.float64)
    assert run(wide).dtype == torch.float64
    torch.testing.assert_close(run(wide).float(), run(model), rtol=1e-4, atol=1e-5)
    wide.copy(dtype=torch.float32)


@pytest.mark.parametrize("kind", RANDOM)
def test_passes_are_deterministic_and_activation_checkpointing_changes_nothing(kind: str) -> None:
    model = create(RANDOM[kind](), seed=0)
    found = []
    for model.activation_checkpointing in ("none", "full", "full", "selective"):
        logits = run(model)
        gradients = torch.autograd.grad(logits.square().sum(), list(model.parameters()), materialize_grads=True)
        found.append((logits.detach(), *gradients))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-5, atol=1e-5)
    assert not any(part.training for part in model.module.modules())


def kept_bytes(model: Model) -> int:
    """Return the bytes that autograd keeps after a forward pass."""
    return kept_for_backward(lambda: model.hidden(PACK.ids, PACK.positions, PackedAttention(PACK)))


@pytest.mark.parametrize("kind", ["qwen3", "gpt2", "mixtral"])
def test_activation_checkpointing_keeps_little_memory(kind: str) -> None:
    model = create(RANDOM[kind](), seed=0)
    whole = kept_bytes(model)
    model.activation_checkpointing = "full"
    assert kept_bytes(model) < 0.4 * whole
    assert kept_bytes(model.copy()) < 0.4 * whole


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_logits_are_float32_or_wider_and_rounded_to_half_at_most_once(dtype: torch.dtype) -> None:
    model = create(tiny_config(50, family="gemma2", final_logit_softcapping=3.0), seed=0, dtype=dtype)
    hidden = torch.randn(9, model.head_weight.shape[1], generator=torch.Generator().manual_seed(0)).to(dtype) * 4
    hidden.requires_grad_()
    raw, logits = model.raw_logits(hidden), model.logits(hidden)
    product = linear(hidden, model.head_weight).to(torch.promote_types(dtype, torch.float32))
    assert raw.dtype == logits.dtype == product.dtype
    assert torch.equal(raw, product) and torch.equal(logits, torch.tanh(product / 3) * 3)
    weights = [hidden, model.head_weight]
    assert all(map(torch.equal, grad(raw.sin().sum(), weights), grad(product.sin().sum(), weights)))


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gpu_forms_logits_in_float32(dtype: torch.dtype, family: str) -> None:
    model = create(tiny_config(50, family=family), seed=0, dtype=dtype, device="cuda")
    hidden = 20 * torch.randn(9, model.head_weight.shape[1], dtype=dtype, device="cuda").requires_grad_()
    raw, exact = model.raw_logits(hidden), linear(hidden.double(), model.head_weight.double())
    assert raw.dtype == torch.float32
    torch.testing.assert_close(raw.double(), exact, rtol=1e-5, atol=1e-4)
    weights = [hidden, model.head_weight]
    for found, wanted in zip(grad(raw.sin().sum(), weights), grad(exact.sin().sum(), weights), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.05 * float(wanted.abs().max()))


def test_a_module_moved_away_from_its_storage_is_noticed() -> None:
    model = create(tiny_config(50), seed=0)
    model.module.to(torch.float64)
    with pytest.raises(AssertionError, match="was given other memory"):
        run(model)


def test_without_gradients_nothing_is_kept_for_backward() -> None:
    model = create(tiny_config(50), seed=0)
    with torch.no_grad():
        assert not run(model).requires_grad
    with torch.inference_mode():
        inferred = run(model)
    assert torch.equal(inferred, run(model).detach())
