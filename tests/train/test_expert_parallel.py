"""Experts over ranks: what cannot be divided is refused before a weight is read, and the error shows the arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from etude.errors import ConfigError
from etude.models import Model
from etude.models.experts import find_experts
from etude.train import MeshConfig
from etude.train.device_mesh import build_mesh
from etude.train.expert_parallel import choose_sharded_dimension, refuse_undivided, refuse_without_experts
from tests.families import family_model
from tests.train.tasks import model


def mixture(experts: int, inner: int = 16) -> Model:
    """Return a model with so many experts in each layer."""
    return family_model("qwen3_moe", num_experts=experts, num_local_experts=experts, moe_intermediate_size=inner)


def test_experts_that_ranks_cannot_divide_are_refused() -> None:
    refuse_undivided(mixture(4), 2)
    with pytest.raises(
        ConfigError, match=r"`mesh.expert=3` .* 4 experts of a layer, and 4 over 3 ranks are 1.333 each"
    ):
        refuse_undivided(mixture(4), 3)
    with pytest.raises(
        ConfigError, match=r"8 over 3 ranks are 2.667 each. Choose a number that divides them, such as 2"
    ):
        refuse_undivided(mixture(8), 3)


def test_a_weight_that_all_experts_share_is_refused() -> None:
    policy = mixture(4)
    experts = find_experts(policy.module)[0]
    experts.register_parameter("norm", torch.nn.Parameter(torch.ones(32)))
    with pytest.raises(ConfigError, match=r"`mesh.expert=2` .* `norm` of this qwen3_moe model has none. Set .*=1`"):
        refuse_undivided(policy, 2)


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"this qwen3 model has none. Leave it out: the ranks"):
        refuse_without_experts(model(), 2)


def test_a_mesh_that_is_no_divisor_of_the_ranks_is_refused() -> None:
    MeshConfig(replicas=2, expert=4).check_ranks(8)
    message = r"`mesh.expert=8` .* `ranks=12` over `mesh.replicas=1` are 12. Choose a divisor, such as 6"
    with pytest.raises(ConfigError, match=message):
        MeshConfig(expert=8).check_ranks(12)
    with pytest.raises(ConfigError, match=r"`mesh.expert=2` .* are 1. Choose a divisor, such as 1"):
        MeshConfig(expert=2).check_ranks(1)


@pytest.fixture
def many_ranks() -> Any:
    """Make this process the first of 32 ranks that do not communicate."""
    dist.init_process_group(dist.Backend.FAKE, rank=0, world_size=32)
    yield
    dist.destroy_process_group()


def test_ranks_share_whole_experts_or_else_their_rows(many_ranks: None) -> None:
    meshes = build_mesh(MeshConfig(expert=2), "cpu")
    for count, inner, dimension in ((32, 16, 0), (6, 16, 1)):
        (experts, *_) = find_experts(mixture(count, inner).module)
        assert choose_sharded_dimension(experts, meshes)(torch.nn.Parameter()).dim == dimension
    (experts, *_) = find_experts(mixture(6, 12).module)
    with pytest.raises(ConfigError, match=r"3 experts, which 16 ranks share: .* of which one weight has 24. Set .*=1`"):
        choose_sharded_dimension(experts, meshes)
