"""The check of a model that is created: a small tree of rows, packed by Etude, equals the rows by transformers."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from etude.batch import Pack
from etude.errors import ConfigError
from etude.models import PackedAttention, create, tiny_config, verification

SIZES = {"layers": 2, "hidden": 32, "heads": 2, "kv_heads": 1, "family": "gemma3"}


class LeakingAttention(PackedAttention):
    """An attention over all of a pack, as if it were one row."""

    def __init__(self, pack: Pack) -> None:
        one_row = {"offsets": pack.offsets[[0, -1]], "parent": pack.parent[:1]}
        super().__init__(dataclasses.replace(pack, **one_row))


class RootlessAttention(PackedAttention):
    """An attention in which answers do not see their prompt."""

    def __init__(self, pack: Pack) -> None:
        super().__init__(dataclasses.replace(pack, parent=torch.full_like(pack.parent, -1)))


@pytest.mark.parametrize("broken", [LeakingAttention, RootlessAttention])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_whose_packed_rows_differ_from_rows_alone_is_refused(
    broken: type[PackedAttention], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "PackedAttention", broken)
    with pytest.raises(ConfigError, match=r"Layer 0 \(Gemma3DecoderLayer\) of this .* than rows alone \(\d+% off\)"):
        create(tiny_config(50, **SIZES), seed=0, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_model_is_accepted_in_each_dtype_though_its_hidden_states_are_large(dtype: torch.dtype) -> None:
    model = create(tiny_config(50, **SIZES), seed=0, dtype=dtype)
    with torch.no_grad():
        model.module.get_input_embeddings().weight.mul_(100)
    verification.verify_model(model)


def test_weights_that_are_not_numbers_are_not_called_another_model() -> None:
    model = create(tiny_config(50, **SIZES), seed=0)
    with torch.no_grad():
        model.module.model.layers[0].mlp.down_proj.weight.fill_(torch.nan)
    verification.verify_model(model)
