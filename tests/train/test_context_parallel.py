"""Heads over ranks: models that ranks cannot split are refused before a weight is read."""

from __future__ import annotations

import pytest

from etude.errors import ConfigError
from etude.train import MeshConfig
from etude.train.context_parallel import refuse_undivided_heads
from tests.families import HYBRID, config_of


def test_heads_that_ranks_cannot_split_are_refused() -> None:
    refuse_undivided_heads(config_of("qwen3_moe"), 4)  # ranks get copies of its 2 key heads
    with pytest.raises(
        ConfigError, match=r"`mesh.context=3` .* 4 query heads over 3 ranks are 1.333 each. .* such as 2"
    ):
        refuse_undivided_heads(config_of("qwen3_moe"), 3)
    with pytest.raises(
        ConfigError, match=r"2 query heads that `mesh.tensor=2` leaves a rank over 4 ranks are 0.5 each"
    ):
        refuse_undivided_heads(config_of("qwen3_moe"), 4, tensor=2)


@pytest.mark.parametrize("name", HYBRID)
def test_layers_that_hand_on_a_state_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"`mesh.context=2` .* layer \d of this .* model is `.*`: it hands a state"):
        refuse_undivided_heads(config_of(name), 2)


def test_ranks_that_do_not_fill_whole_meshes_are_refused() -> None:
    MeshConfig(context=2, tensor=2).check_ranks(8)
    with pytest.raises(
        ConfigError, match=r"`ranks=6` .* of 4, which is `mesh.context=2` × `mesh.tensor=2`. Set `ranks=4`"
    ):
        MeshConfig(context=2, tensor=2).check_ranks(6)
