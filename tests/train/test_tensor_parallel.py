"""Meshes of sharded weights: invalid ones are refused before a weight is read, and the error shows the arithmetic."""

from __future__ import annotations

from typing import Any

import pytest

from etude.errors import ConfigError
from etude.models import LoraAdapterConfig, adapt
from etude.train import MeshConfig
from etude.train.tensor_parallel import refuse_unsplittable
from tests.train.tasks import model


@pytest.mark.parametrize(
    ("tensor", "sizes", "message"),
    [
        (3, {}, r"`mesh.tensor=3` .* 4 query heads over 3 ranks are 1.333 each. .* such as 2"),
        (4, {}, r"2 key heads over 4 ranks are 0.5 each. .* such as 2"),
        (4, {"kv_heads": 4, "intermediate": 90}, r"90 units of inner width over 4 ranks are 22.5 each. .* such as 2"),
        (2, {"family": "gemma2"}, r"of this gemma2 model has `post_feedforward_layernorm.weight` besides"),
        (2, {"family": "gpt2"}, r"of this gpt2 model has `attn.c_attn.bias` besides"),
    ],
)
def test_layers_that_ranks_cannot_split_are_refused(tensor: int, sizes: dict[str, Any], message: str) -> None:
    policy = model("fp32", **sizes)
    with pytest.raises(ConfigError, match=message):
        refuse_unsplittable(policy, tensor)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_supported_families_are_split(family: str) -> None:
    """With adapters too."""
    refuse_unsplittable(model(family=family), 2)
    refuse_unsplittable(adapt(model(family=family), LoraAdapterConfig(rank=2), seed=0), 2)


def test_ranks_that_do_not_fill_whole_meshes_are_refused() -> None:
    MeshConfig(replicas=2, tensor=2).check_ranks(8)
    with pytest.raises(
        ConfigError, match=r"`ranks=6` is no multiple of 4, which is `mesh.replicas=2` × `mesh.tensor=2`. Set `ranks=4`"
    ):
        MeshConfig(replicas=2, tensor=2).check_ranks(6)
