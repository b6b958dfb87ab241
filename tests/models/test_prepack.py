"""Weights packed for the processor: products are the same numbers, of the weights as last packed."""

from __future__ import annotations

from typing import NoReturn

import pytest
import torch
from torch.nn.functional import linear
from transformers import PreTrainedConfig

from etude.batch import Pack
from etude.models import Model, PackedAttention, PrepackedWeights, create, tiny_config
from etude.models.prepack import LinearWeight, prepacked_linear
from etude.observe import configure_logging

SHAPES = [(64, 32), (151, 48), (33, 17), (512, 256), (1152, 896)]
has_bf16 = pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(), reason="this processor does not multiply bfloat16 itself"
)


class Single:
    """A model with one linear weight."""

    def __init__(self, weight: torch.Tensor, trained: bool = True) -> None:
        self.weight, self.trained = weight, trained

    def linear_weights(self) -> list[LinearWeight]:
        return [LinearWeight(self.weight, self.trained)]


def hidden(model: Model, ids: list[int]) -> torch.Tensor:
    positions = torch.arange(len(ids))
    pack = Pack(
        ids=torch.tensor(ids, dtype=torch.int32),
        positions=positions,
        offsets=torch.tensor([0, len(ids)]),
        parent=torch.tensor([-1]),
        source=positions - 1,
    )
    return model.hidden(pack.ids, pack.positions, PackedAttention(pack))


@pytest.fixture
def config() -> PreTrainedConfig:
    return tiny_config(96, layers=2, hidden=64, heads=4, kv_heads=2, intermediate=96)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_is_the_same_bit_for_bit(shape: tuple[int, int], biased: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(n, shape[1], generator=generator).bfloat16() for n in (shape[0], 130))
    bias = torch.randn(shape[0], generator=generator).bfloat16() if biased else None
    packed = PrepackedWeights(Single(weight).linear_weights)
    for rows in (1, 2, 3, 7, 16, 33, 64, 130):
        with torch.inference_mode(), packed.activate():
            result = prepacked_linear(x[:rows], weight, bias)
        assert torch.equal(result, linear(x[:rows], weight, bias))


@has_bf16
def test_weights_are_packed_on_refresh_and_used_only_while_active() -> None:
    weight, x = torch.eye(32, dtype=torch.bfloat16), torch.ones(2, 32, dtype=torch.bfloat16)
    packed = PrepackedWeights(Single(weight).linear_weights)
    weight.mul_(2)
    with packed.activate():
        assert torch.equal(prepacked_linear(x, weight), x), "the weights as last packed"
    assert torch.equal(prepacked_linear(x, weight), 2 * x), "outside, the current weights"
    packed.refresh()
    with packed.activate():
        assert torch.equal(prepacked_linear(x, weight), 2 * x)
        packed.clear()
        weight.mul_(2)
        assert torch.equal(prepacked_linear(x, weight), 4 * x), "without packed weights, the current weights"


@has_bf16
@pytest.mark.parametrize("trained", [True, False])
def test_frozen_weights_are_packed_once(trained: bool) -> None:
    weight, x = torch.eye(32, dtype=torch.bfloat16), torch.ones(2, 32, dtype=torch.bfloat16)
    packed = PrepackedWeights(Single(weight, trained).linear_weights)
    weight.mul_(2)
    with packed.activate():
        packed.refresh(frozen=False)
        assert torch.equal(prepacked_linear(x, weight), 2 * x if trained else x)
        packed.refresh()
        assert torch.equal(prepacked_linear(x, weight), 2 * x)
        packed.clear()
        weight.mul_(2)
        packed.refresh(frozen=False)
        assert torch.equal(prepacked_linear(x, weight), 4 * x), "weights that are not packed yet are packed"


def test_a_model_with_packed_weights_computes_the_same(config: PreTrainedConfig) -> None:
    model = create(config, seed=0, dtype=torch.bfloat16)
    packed = PrepackedWeights(model.linear_weights)
    with torch.inference_mode():
        expected = model.logits(hidden(model, [3, 1, 4, 1, 5]))
        with packed.activate():
            assert torch.equal(model.logits(hidden(model, [3, 1, 4, 1, 5])), expected)


@has_bf16
def test_every_half_precision_linear_weight_is_packed_and_nothing_else(config: PreTrainedConfig) -> None:
    half = PrepackedWeights(create(config, seed=0, dtype=torch.bfloat16).linear_weights)
    assert len(half._packed) == 2 * 4 + 1, "four products a layer, and the head"
    assert not PrepackedWeights(create(config, seed=0, dtype=torch.float32).linear_weights)._packed


@has_bf16
def test_without_memory_for_packed_weights_products_use_the_current_weights(
    config: PreTrainedConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def out_of_memory(*_: object) -> NoReturn:
        raise RuntimeError("could not allocate memory")

    configure_logging("info")
    model = create(config, seed=0, dtype=torch.bfloat16)
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", out_of_memory)
    packed = PrepackedWeights(model.linear_weights)
    assert not packed._packed and "which costs speed: could not allocate memory" in capsys.readouterr().err
    with torch.inference_mode(), packed.activate():
        assert model.logits(hidden(model, [3, 1])).isfinite().all()
