"""The model as its users hold it: parameters that stay leaves, views that stay shared, copies that do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from etude.models import Model, PackedAttention, create, load, save, tiny
from etude.models.layers import Fused, FusedLinear
from tests.models.packs import FOREST, pack_of

PACK = pack_of(FOREST)


def run(model: Model) -> Tensor:
    return model.logits(model.hidden(PACK.ids, PACK.positions, PackedAttention(PACK)))


def parts(model: Model) -> list[FusedLinear]:
    assert isinstance(model._body, Fused)
    return [fused for layer in model._body.layers for fused in (layer.qkv, layer.gate_up)]


def test_a_model_tells_its_sizes() -> None:
    model = create(tiny(50, layers=3, heads=6, kv_heads=2, head_dim=10, context=99), seed=0)
    assert (model.layers, model.query_heads, model.kv_heads, model.head_dim) == (3, 6, 2, 10)
    assert (model.vocabulary, model.context, model.dtype, str(model.device)) == (50, 99, torch.float32, "cpu")


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_q_k_and_v_are_views_of_one_storage_under_their_published_names(family: str) -> None:
    model = create(tiny(50, family=family), seed=0)
    weights = dict(model.named_weights())
    for layer in range(2):
        for block, names in (("self_attn", "qkv"), ("mlp", ("gate", "up"))):
            held = [weights[f"model.layers.{layer}.{block}.{name}_proj.weight"] for name in names]
            assert len({w.untyped_storage().data_ptr() for w in held}) == 1
            assert all(w.is_leaf and w.is_contiguous() and w.requires_grad for w in held)


def test_tied_weights_are_named_once() -> None:
    names = [name for name, _ in create(tiny(50), seed=0).named_weights()]
    assert len(names) == len(set(names)) and "lm_head.weight" not in names
    assert "lm_head.weight" in dict(create(tiny(50, tied=False), seed=0).named_weights())


@pytest.mark.parametrize("more", [{}, {"attention_bias": True}], ids=["plain", "bias"])
def test_an_optimizer_step_reaches_the_fused_storage(more: dict[str, bool]) -> None:
    model = create(tiny(50, **more), seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    before = run(model)
    before.square().mean().backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
    optimizer.step()
    for fused in parts(model):
        weights = [p for p in fused.parameters if p.ndim == 2]
        assert torch.equal(fused.weight, torch.cat(weights))
    assert not torch.allclose(run(model), before)


def test_gradients_add_up_over_backward_passes() -> None:
    model = create(tiny(50), seed=0, dtype=torch.float64)
    run(model).square().sum().backward()
    once = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    run(model).square().sum().backward()
    for parameter, first in zip(model.parameters(), once, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * first)


def test_only_what_is_asked_for_gets_a_gradient() -> None:
    model = create(tiny(50), seed=0)
    for name, parameter in model.named_weights():
        parameter.requires_grad_("k_proj" in name)
    run(model).square().sum().backward()
    assert all((p.grad is not None) == ("k_proj" in name) for name, p in model.named_weights())


def test_a_state_dict_goes_in_and_out(tmp_path: Path) -> None:
    model, other = create(tiny(50), seed=0), create(tiny(50), seed=1)
    other.module.load_state_dict(model.module.state_dict())
    assert torch.equal(run(model), run(other))
    save(other, tmp_path)
    assert torch.equal(run(model), run(load(tmp_path, dtype=torch.float32)))


def test_a_copy_has_weights_of_its_own() -> None:
    model = create(tiny(50), seed=0)
    model.activation_checkpointing = True
    copied = model.copy()
    assert copied.activation_checkpointing and torch.equal(run(model), run(copied))
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.add_(1)
    assert not torch.allclose(run(model), run(copied))
    assert torch.equal(run(model), run(create(tiny(50), seed=0)))
    half = model.copy(dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16 and model.dtype == torch.float32


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_dropout_never_acts(family: str) -> None:
    more = {"attention_dropout": 0.5} if family == "qwen3" else {"attn_pdrop": 0.5, "resid_pdrop": 0.5}
    model = create(tiny(50, family=family, **more), seed=0)
    for model.activation_checkpointing in (False, True):
        assert torch.equal(run(model), run(model))


def test_moving_the_module_from_under_its_storage_is_noticed() -> None:
    model = create(tiny(50), seed=0)
    model.module.to(torch.float64)
    with pytest.raises(AssertionError, match="was given other memory"):
        run(model)


def test_without_grad_nothing_is_kept() -> None:
    model = create(tiny(50), seed=0)
    with torch.no_grad():
        assert not run(model).requires_grad
    with torch.inference_mode():
        quiet = run(model)
    assert torch.equal(quiet, run(model).detach())
