"""The FLOPs of a pass, compared with a count by hand and with torch's counter."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from etude.batch import Pack
from etude.models import Model, create, tiny_config
from etude.train import measure_matmul_flops
from etude.train.flops import ModelFlops
from tests.families import family_model


@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt2"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_forward_pass_costs_what_torch_counts(family: str, tied: bool) -> None:
    """Compare with torch's count of transformers' own forward pass, where attention is a full square."""
    model = create(tiny_config(61, family=family, layers=3, hidden=32, tied=tied, heads=4, kv_heads=4), seed=0)
    model.module.set_attn_implementation("eager")
    tokens = 12
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.module(torch.arange(tokens)[None])
    cost = ModelFlops.from_model(model)
    square = cost.per_pair * tokens**2
    assert cost.per_token * tokens + cost.per_predicted * tokens + square == counter.get_total_flops()


def test_a_shared_prefix_counts_once() -> None:
    cost = ModelFlops(
        per_token=100.0, per_predicted=7.0, per_pair=1.0, trained_per_token=10.0, trained_per_predicted=0.0
    )
    pack = Pack(
        ids=torch.arange(5),
        positions=torch.tensor([0, 1, 2, 3, 3]),
        offsets=torch.tensor([0, 3, 4, 5]),
        parent=torch.tensor([-1, 0, 0]),
        source=torch.tensor([-1, 0, 1, 2, -1, 0, 1, 2]),
    )
    assert cost.forward(pack, predicted=2) == 500 + 14 + (1 + 2 + 3 + 4 + 4)
    assert cost.update(pack, predicted=2) == 2 * 500 + 50 + 2 * 14 + 3 * (1 + 2 + 3 + 4 + 4)


def test_frozen_weights_cost_no_gradient() -> None:
    whole, half = (ModelFlops.from_model(model) for model in (_model(), _model(freeze=("embed_tokens", "mlp"))))
    assert whole.trained_per_token == whole.per_token and whole.trained_per_predicted == whole.per_predicted
    assert half.per_token == whole.per_token and half.trained_per_predicted == 0, "the head is the embedding"
    assert half.per_token - half.trained_per_token == 2 * 3 * (3 * 32 * 96), "three matrices in each of three layers"


def _model(freeze: tuple[str, ...] = ()) -> Model:
    model = create(tiny_config(61, layers=3, hidden=32, heads=4, kv_heads=4), seed=0)
    if freeze:
        model.freeze(freeze)
    return model


def test_the_measured_rate_of_a_device_is_plausible() -> None:
    assert 1e8 < measure_matmul_flops(torch.float32, torch.device("cpu"), size=128, seconds=0.05) < 1e15


def test_a_mixture_counts_the_experts_of_a_token_and_a_recurrence_its_state() -> None:
    mixture = family_model("qwen3_moe")
    weights = dict(mixture.named_weights())
    experts = sum(w.numel() for name, w in weights.items() if w.ndim == 3)
    others = sum(
        w.numel() for name, w in weights.items() if w.ndim == 2 and "embed" not in name and "lm_head" not in name
    )
    assert ModelFlops.from_model(mixture).per_token == 2 * (others + experts * 2 / 4), "two of four experts"
    hybrid = family_model("qwen3_5_text")
    weights = dict(hybrid.named_weights())
    linear = sum(
        w.numel() for name, w in weights.items() if w.ndim == 2 and "embed" not in name and "lm_head" not in name
    )
    scanned, convolved = 3 * 4 * 8 * 8, 4 * (2 * 2 * 8 + 4 * 8)
    assert ModelFlops.from_model(hybrid).per_token == 2 * (linear + scanned + convolved)
    assert ModelFlops.from_model(hybrid).per_pair == 2 * 4 * (8 + 8), "one of its two layers attends"
