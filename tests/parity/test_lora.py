"""Adapters compared with peft: the same numbers forward, and in float64 the same gradient, for every family."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from etude.checkpoint import export, export_adapter
from etude.models import (
    LoraAdapterConfig,
    Model,
    PackedAttention,
    adapt,
    adapter_config,
    create,
    load,
    save,
    tiny_config,
)
from etude.models.fused_layers import FusedBackbone, FusedLinear
from etude.models.tiny import FAMILIES
from tests.autograd import kept_for_backward
from tests.components import require
from tests.models.packs import FOREST, pack_of, paths, unshared

COARSE = {"gemma2": 1e-4}
"""Families whose attention transformers can only run with a softmax in float32, and the largest difference of that."""
FIRST = ["qwen3", *(pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES if family != "qwen3")]
"""The families; the quick tests use one."""


@pytest.fixture(autouse=True)
def _there() -> None:
    require("lora")


def adapted(family: str, dtype: torch.dtype, **options: Any) -> Model:
    """Return a model with adapters whose weights are large enough to matter."""
    base = create(tiny_config(50, family=family), seed=1, dtype=dtype)
    model = adapt(base, LoraAdapterConfig(**{"rank": 4, "alpha": 6, **options}), seed=0)
    chance = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_((0.15 * torch.randn(weight.shape, generator=chance, dtype=torch.float64)).to(dtype))
    return model


def theirs(model: Model, directory: Path) -> nn.Module:
    """Return the same weights, loaded by transformers and peft."""
    from peft import PeftModel

    adapter = export_adapter(dict(model.trained_weights()), adapter_config(model, directory), directory / "adapter")
    base = ((name, weight) for name, weight in model.named_weights() if ".lora_" not in name)
    config = model.module.config
    attention = "eager" if config.model_type in COARSE else "sdpa"
    loaded = export(base, config.to_dict(), directory / "base")
    module = AutoModelForCausalLM.from_pretrained(loaded, attn_implementation=attention)
    adapted_module: nn.Module = PeftModel.from_pretrained(module, adapter, is_trainable=True)
    return adapted_module


@pytest.fixture
def wide_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers takes its norms in float32. Here they are in float64, so that gradients can be compared to 1e-9."""
    for kind in norms():
        monkeypatch.setattr(kind, "forward", _gemma_norm if "Gemma" in kind.__name__ else _norm)


@cache
def norms() -> frozenset[type[nn.Module]]:
    """Return the classes of norms of the families."""
    models = (create(tiny_config(50, family=family, layers=1), seed=0) for family in FAMILIES)
    kinds = {type(part) for model in models for part in model.module.modules()}
    return frozenset(kind for kind in kinds if kind.__name__.endswith("RMSNorm"))


def _norm(self: Any, x: Tensor) -> Tensor:
    out: Tensor = self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
    return out


def _gemma_norm(self: Any, x: Tensor) -> Tensor:
    out: Tensor = (1 + self.weight) * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
    return out


@pytest.mark.parametrize("targets", [(), ("q_proj", "down_proj", "c_proj")], ids=["all", "some"])
@pytest.mark.parametrize("family", FIRST)
def test_logits_and_gradients_are_those_of_peft(
    family: str, targets: tuple[str, ...], tmp_path: Path, wide_norms: None
) -> None:
    """With activations kept, and with all of them computed again."""
    chosen = tuple(name for name in targets if (name == "c_proj") == (family == "gpt2"))
    model, tree = adapted(family, torch.float64, targets=chosen), pack_of(FOREST)
    reference, rows = theirs(model, tmp_path), paths(tree)
    weights = torch.randn(sum(map(len, rows)), 50, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    alone = torch.cat([reference(input_ids=tree.ids[row][None].long()).logits[0] for row in rows])
    (alone * weights).sum().backward()
    close = COARSE.get(family, 1e-9)
    for model.activation_checkpointing in ("none", "full", "selective"):
        packed = model.logits(model.hidden(tree.ids, tree.positions, PackedAttention(tree)))[torch.cat(rows)]
        torch.testing.assert_close(packed, alone, rtol=close, atol=close)
        (packed * weights).sum().backward()
        same_gradients(model, reference, close)


def same_gradients(model: Model, reference: nn.Module, close: float) -> None:
    """Compare the gradients of a model's adapters with those of peft, and clear the former."""
    wanted = {
        name.removeprefix("base_model.model.").replace(".default.", "."): weight.grad
        for name, weight in reference.named_parameters()
        if weight.grad is not None
    }
    gradients = {name: weight.grad for name, weight in model.named_weights() if weight.grad is not None}
    assert gradients.keys() == wanted.keys()
    for name, grad in gradients.items():
        torch.testing.assert_close(grad, wanted[name], rtol=close, atol=close * float(wanted[name].abs().max()))
    for _, weight in model.named_weights():
        weight.grad = None


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_a_fused_product_equals_its_parts_in_peft(family: str) -> None:
    """One product at a time, with the gradient of the input."""
    model = adapted(family, torch.float64)
    body, layer = model._backbone, model.module.model.layers[0]
    assert isinstance(body, FusedBackbone)
    x = torch.randn(9, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    parts = {
        body.layers[0].qkv: [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj],
        body.layers[0].gate_up: [layer.mlp.gate_proj, layer.mlp.up_proj],
        body.layers[0].out: [layer.self_attn.o_proj],
    }
    for fused, alone in parts.items():
        assert isinstance(fused, FusedLinear) and fused.low is not None
        ours, peft = fused(x), torch.cat([part(x) for part in alone], 1)
        torch.testing.assert_close(ours, peft, rtol=1e-12, atol=1e-12)
        leaves = [x, *fused.low.downs, *fused.low.ups]
        weights = torch.cos(torch.arange(ours.numel(), dtype=torch.float64)).view_as(ours)
        for a, b in zip(*(torch.autograd.grad((out * weights).sum(), leaves) for out in (ours, peft)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        with torch.no_grad():
            torch.testing.assert_close(fused(x), ours, rtol=1e-12, atol=1e-12)


def test_adapters_and_packing_keep_the_micro_batch_law() -> None:
    model, tree = adapted("qwen3", torch.float64), pack_of(FOREST)
    separate, rows = unshared(tree), paths(tree)
    one, two = (model.logits(model.hidden(p.ids, p.positions, PackedAttention(p))) for p in (tree, separate))
    torch.testing.assert_close(one[torch.cat(rows)], two, rtol=1e-9, atol=1e-9)


def test_frozen_weights_cost_no_activation_memory_and_no_weight_gradients() -> None:
    """Compared with the whole model, less is kept for the backward pass, which has two thirds of the operations."""
    tree, counted, saved_bytes = pack_of(FOREST), [], []
    for model in (
        create(tiny_config(50, hidden=128), seed=1),
        adapt(create(tiny_config(50, hidden=128), seed=1), LoraAdapterConfig(rank=1), seed=0),
    ):
        saved_bytes.append(kept_for_backward(partial(model.hidden, tree.ids, tree.positions, PackedAttention(tree))))
        loss = model.hidden(tree.ids, tree.positions, PackedAttention(tree)).square().sum()
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        counted.append(counter.get_total_flops())
    assert counted[1] < 0.6 * counted[0]


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt2"])
def test_half_precision_stays_close_and_the_export_equals_the_computed_weights(family: str, tmp_path: Path) -> None:
    model, tree = adapted(family, torch.float32), pack_of(FOREST)
    half = model.copy(dtype=torch.bfloat16)
    save(model, tmp_path / "merged")
    with torch.no_grad():
        wanted, logits, merged = (
            m.logits(m.hidden(tree.ids, tree.positions, PackedAttention(tree))).double()
            for m in (model, half, load(tmp_path / "merged", dtype=torch.float32))
        )
    off = (logits - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()
    assert 0 < off < 0.1
    torch.testing.assert_close(merged, wanted, rtol=1e-3, atol=1e-3)
