"""Layers that torch.compile makes: few graphs for packs of any length, and never more than a limit."""

from __future__ import annotations

import pytest
import torch

from etude.models import Model, PackedAttention, compiled_layers, create, tiny_config
from tests.families import family_model
from tests.models.packs import FOREST, pack_of

pytestmark = pytest.mark.slow  # tracing takes seconds

PACKS = [pack_of(segments) for segments in (FOREST, ((-1, 5), (0, 3)), ((-1, 20), (0, 9), (0, 2)), ((-1, 1),))]


@pytest.fixture(autouse=True)
def _traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_layers, "BACKEND", "eager")


def model_of(family: str, layers: int = 4) -> Model:
    """Return a model with transformers' own layers."""
    return Model(create(tiny_config(50, family=family, layers=layers), seed=1).module, fused=False)


def gradients(model: Model) -> list[torch.Tensor]:
    """Return hidden states of packs of several lengths, and the gradients of the weights."""
    hidden = [model.hidden(pack.ids, pack.positions, PackedAttention(pack)) for pack in PACKS]
    weights = [weight for _, weight in model.trained_weights() if weight is not model.head_weight]
    loss = torch.stack([each.square().sum() for each in hidden]).sum()
    return [*hidden, *torch.autograd.grad(loss, weights)]


@pytest.mark.parametrize(("family", "graphs"), [("qwen3", 2), ("gemma2", 3), ("gpt2", 2)])
def test_layers_share_their_graphs(family: str, graphs: int) -> None:
    plain, compiled = model_of(family), model_of(family)
    compiled.compile_layers()
    for expected, result in zip(gradients(plain), gradients(compiled), strict=True):
        torch.testing.assert_close(result, expected)
    assert compiled.compiled_graphs == graphs and plain.compiled_graphs == 0


@pytest.mark.parametrize(("name", "graphs"), [("qwen3_5_text", 5), ("nemotron_h", 8)])
def test_layers_of_other_kinds_have_few_graphs(name: str, graphs: int) -> None:
    """Recurrences and experts run as they are, like attention: no graph has their loops."""
    plain, compiled = family_model(name), family_model(name)
    compiled.compile_layers()
    for expected, result in zip(gradients(plain), gradients(compiled), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-4)
    assert compiled.compiled_graphs == graphs


def test_a_single_token_needs_no_graph() -> None:
    model = model_of("qwen3")
    model.compile_layers()
    model.hidden(PACKS[-1].ids, PACKS[-1].positions, PackedAttention(PACKS[-1]))
    assert model.compiled_graphs == 0


def test_beyond_the_limit_layers_run_uncompiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Passes with a gradient have the graphs that the limit allows. Passes without one then run uncompiled."""
    monkeypatch.setattr(compiled_layers, "MAX_GRAPHS", 2)
    plain, compiled = model_of("qwen3"), model_of("qwen3")
    compiled.compile_layers()
    gradients(compiled)
    with torch.no_grad():
        for pack in PACKS:
            expected, result = (m.hidden(pack.ids, pack.positions, PackedAttention(pack)) for m in (plain, compiled))
            torch.testing.assert_close(result, expected)
    assert compiled.compiled_graphs == 2
    warnings = [record.getMessage() for record in caplog.records if record.name == "etude.models"]
    assert len(warnings) == 1 and "torch compiled 2 graphs for the layers of this model" in warnings[0]
