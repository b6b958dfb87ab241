"""Frozen parts of a model: chosen by name, without a gradient, and stored in one precision."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from etude.errors import ConfigError
from etude.models import Model, PackedAttention, create, load, save, tiny_config
from tests.models.packs import FOREST, pack_of

PACK = pack_of(FOREST)


def run(model: Model) -> Tensor:
    return model.logits(model.hidden(PACK.ids, PACK.positions, PackedAttention(PACK)))


def test_frozen_parts_get_no_gradient_and_the_others_keep_theirs() -> None:
    whole, half = (create(tiny_config(50), seed=1, dtype=torch.float64) for _ in range(2))
    half.freeze(("embed_tokens", "q_proj", "layers.1.mlp", "q_norm"))
    for model in (whole, half):
        run(model).square().sum().backward()
    expected, trained = dict(whole.named_weights()), {name for name, _ in half.trained_weights()}
    for name, weight in half.named_weights():
        assert (weight.grad is not None) == (name in trained)
        if weight.grad is not None:
            torch.testing.assert_close(weight.grad, expected[name].grad, rtol=1e-12, atol=1e-12)
    assert len(expected) - len(trained) == 1 + 2 + 3 + 2


def test_frozen_weights_are_stored_in_one_precision(tmp_path: Path) -> None:
    save(create(tiny_config(50), seed=1), tmp_path)
    model = load(tmp_path, dtype=torch.bfloat16, keep_float32=True)
    model.freeze(("layers.0",))
    assert set(model.take_float32_weights()) == {n for n, w in model.trained_weights() if w.ndim == 2}


@pytest.mark.parametrize(
    "parts, message",
    [
        (("mlpp",), "`model.freeze` names `mlpp`, and this model has no such part. It has model.embed_tokens.weight"),
        (("lm_head",), "names `lm_head`"),
        (("*",), r"`model.freeze=\[\*\]` leaves nothing of the model to train"),
    ],
)
def test_parts_that_cannot_be_frozen_are_refused(parts: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create(tiny_config(50), seed=0).freeze(parts)
