"""The check of a model that is created: a small tree of rows, packed by Etude, equals the rows by transformers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from etude.batch import Pack
from etude.errors import ConfigError
from etude.models import PackedAttention, create, tiny_config, verification
from etude.models.states import StateTree
from tests import families
from tests.families import family_model

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


class ForgetfulAttention(PackedAttention):
    """An attention whose recurrent layers begin each segment with a state of zero."""

    @property
    def states(self) -> StateTree:  # type: ignore[override]
        pack = self.plan.pack
        return StateTree(pack.offsets.tolist(), [-1] * len(pack.parent), pack.ids.device)


class SinklessAttention(PackedAttention):
    """An attention that leaves sinks out."""

    def __call__(self, *args: Any, sinks: Tensor | None = None, **options: Any) -> Tensor:
        del sinks
        return super().__call__(*args, **options)


@pytest.mark.parametrize(
    ("broken", "name"),
    [
        (ForgetfulAttention, "qwen3_5_text"),
        (ForgetfulAttention, "lfm2"),
        (ForgetfulAttention, "nemotron_h"),
        (SinklessAttention, "gpt_oss"),
    ],
)
def test_states_and_sinks_that_are_left_out_are_found(
    broken: type[PackedAttention], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = family_model(name)
    verification.verify_model(model)
    monkeypatch.setattr(verification, "PackedAttention", broken)
    with pytest.raises(ConfigError, match=r"Layer 0 \(\w+\) of this .* than rows alone \(\d+% off\)"):
        verification.verify_model(model)


def test_a_layer_with_an_operation_that_is_not_answered_is_refused_with_those_that_are() -> None:
    sizes = {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "num_experts": 2}
    config = AutoConfig.for_model("jamba", **{**families.SIZES, **sizes, "num_experts_per_tok": 1})
    with pytest.raises(ConfigError, match=r"^Layer 0 \(JambaMambaDecoderLayer\) of this jamba model"):
        create(config, seed=0)


class UndefinedAttention(PackedAttention):
    """An attention whose results are not numbers."""

    def __call__(self, *args: Any, **options: Any) -> torch.Tensor:
        """Return no number."""
        return super().__call__(*args, **options) * torch.nan


@pytest.mark.parametrize("broken", [LeakingAttention, RootlessAttention, UndefinedAttention])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_whose_packed_rows_differ_from_rows_alone_is_refused(
    broken: type[PackedAttention], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "PackedAttention", broken)
    with pytest.raises(
        ConfigError, match=r"Layer 0 \(Gemma3DecoderLayer\) of this .* than rows alone \((\d+|nan)% off\)"
    ):
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
