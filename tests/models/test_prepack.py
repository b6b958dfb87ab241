"""Weights laid out for the processor: the same numbers, of the weights as they were when they were last read."""

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
    """A model of one product."""

    def __init__(self, weight: torch.Tensor, trained: bool = True) -> None:
        self.weight, self.trained = weight, trained

    def linear_weights(self) -> list[LinearWeight]:
        return [LinearWeight(self.weight, self.trained)]


def hidden(model: Model, ids: list[int]) -> torch.Tensor:
    places = torch.arange(len(ids))
    pack = Pack(
        ids=torch.tensor(ids, dtype=torch.int32),
        positions=places,
        offsets=torch.tensor([0, len(ids)]),
        parent=torch.tensor([-1]),
        source=places - 1,
    )
    return model.hidden(pack.ids, pack.positions, PackedAttention(pack))


@pytest.fixture
def config() -> PreTrainedConfig:
    return tiny_config(96, layers=2, hidden=64, heads=4, kv_heads=2, intermediate=96)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_is_the_same_bit_for_bit(shape: tuple[int, int], biased: bool) -> None:
    chance = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(n, shape[1], generator=chance).bfloat16() for n in (shape[0], 130))
    bias = torch.randn(shape[0], generator=chance).bfloat16() if biased else None
    layout = PrepackedWeights(Single(weight))
    for rows in (1, 2, 3, 7, 16, 33, 64, 130):
        with torch.inference_mode(), layout.activate():
            found = prepacked_linear(x[:rows], weight, bias)
        assert torch.equal(found, linear(x[:rows], weight, bias))


@has_bf16
def test_it_is_read_when_it_is_told_to_be_and_only_where_it_is_used() -> None:
    weight, x = torch.eye(32, dtype=torch.bfloat16), torch.ones(2, 32, dtype=torch.bfloat16)
    layout = PrepackedWeights(Single(weight))
    weight.mul_(2)
    with layout.activate():
        assert torch.equal(prepacked_linear(x, weight), x), "the weights as they were"
    assert torch.equal(prepacked_linear(x, weight), 2 * x), "outside, the weights as they lie"
    layout.refresh()
    with layout.activate():
        assert torch.equal(prepacked_linear(x, weight), 2 * x)
        layout.clear()
        weight.mul_(2)
        assert torch.equal(prepacked_linear(x, weight), 4 * x), "without a layout, the weights as they lie"


@has_bf16
@pytest.mark.parametrize("trained", [True, False])
def test_what_is_not_trained_is_read_once(trained: bool) -> None:
    weight, x = torch.eye(32, dtype=torch.bfloat16), torch.ones(2, 32, dtype=torch.bfloat16)
    layout = PrepackedWeights(Single(weight, trained))
    weight.mul_(2)
    with layout.activate():
        layout.refresh(frozen=False)
        assert torch.equal(prepacked_linear(x, weight), 2 * x if trained else x)
        layout.refresh()
        assert torch.equal(prepacked_linear(x, weight), 2 * x)
        layout.clear()
        weight.mul_(2)
        layout.refresh(frozen=False)
        assert torch.equal(prepacked_linear(x, weight), 4 * x), "what is not held is read"


def test_a_model_computes_the_same_with_it(config: PreTrainedConfig) -> None:
    model = create(config, seed=0, dtype=torch.bfloat16)
    layout = PrepackedWeights(model)
    with torch.inference_mode():
        plain = model.logits(hidden(model, [3, 1, 4, 1, 5]))
        with layout.activate():
            assert torch.equal(model.logits(hidden(model, [3, 1, 4, 1, 5])), plain)


@has_bf16
def test_it_holds_every_product_of_half_precision_and_nothing_else(config: PreTrainedConfig) -> None:
    half = PrepackedWeights(create(config, seed=0, dtype=torch.bfloat16))
    assert len(half._packed) == 2 * 4 + 1, "four products a layer, and the head"
    assert not PrepackedWeights(create(config, seed=0, dtype=torch.float32))._packed


@has_bf16
def test_without_memory_for_it_products_take_the_weights_as_they_lie(
    config: PreTrainedConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> NoReturn:
        raise RuntimeError("could not allocate memory")

    configure_logging("info")
    model = create(config, seed=0, dtype=torch.bfloat16)
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", full)
    layout = PrepackedWeights(model)
    assert not layout._packed and "which costs speed: could not allocate memory" in capsys.readouterr().err
    with torch.inference_mode(), layout.activate():
        assert model.logits(hidden(model, [3, 1])).isfinite().all()
