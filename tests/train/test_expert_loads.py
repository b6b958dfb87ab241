"""The metrics of a mixture's loads equal those of the choices that its routers make."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from etude.algorithms import AlgorithmConfig
from etude.algorithms.view import SingleRank
from etude.data.pack import pack_prefix_tree
from etude.models import Model, PackedAttention
from etude.models.experts import find_experts
from etude.train import Learner, TrainConfig
from etude.train.expert_loads import ExpertLoads
from tests.families import family_model
from tests.train.tasks import Improve, model, ready, rollouts

BATCH = rollouts(groups=4, size=2)


def updated(policy: Model) -> tuple[dict[str, float], list[Tensor], list[Tensor]]:
    """Return an update's metrics, and the experts and weights that routers chose, for each mixture and pass."""
    trainer = Learner(policy, TrainConfig(precision="fp64", max_tokens_per_micro_batch=40, learning_rate=0.0))
    batch = ready(trainer, AlgorithmConfig(), BATCH)
    chosen, weights = list[Tensor](), list[Tensor]()

    def note(into: list[Tensor], place: int, _: object, inputs: tuple[Tensor, ...]) -> None:
        if torch.is_grad_enabled():
            into.append(inputs[place].detach())

    for experts in find_experts(policy.module):
        experts.register_forward_pre_hook(partial(note, chosen, 1))
        experts.register_forward_pre_hook(partial(note, weights, 2))
    return trainer.update(batch, Improve(AlgorithmConfig())).reduce(), chosen, weights


def test_loads_are_those_of_the_routers_choices() -> None:
    policy = family_model("deepseek_v3", torch.float64)  # its weights add up to a factor
    metrics, chosen, weights = updated(policy)
    layers, count = len(find_experts(policy.module)), 4
    loads = [torch.cat(chosen[layer::layers]).flatten().bincount(minlength=count).double() for layer in range(layers)]
    largest = [float(load.max() / load.mean()) for load in loads]
    assert metrics["moe/load_max"] == pytest.approx(max(largest))
    assert metrics["moe/load"] == pytest.approx(sum(largest) / layers)
    assert metrics["moe/idle"] == pytest.approx(sum(float((load == 0).sum()) for load in loads) / layers / count)
    shares = torch.cat(weights) / torch.cat(weights).sum(1, keepdim=True)
    assert metrics["moe/router_entropy"] == pytest.approx(float(-(shares * shares.log()).sum(1).mean()), rel=1e-5)


def test_layers_that_are_computed_again_count_once() -> None:
    policy = family_model("qwen3_moe", torch.float64)
    policy.activation_checkpointing = "full"
    pack = pack_prefix_tree(BATCH)
    loads = ExpertLoads(policy)
    with loads.counting():
        hidden = policy.hidden(pack.ids, pack.positions, PackedAttention(pack))
    hidden.sum().backward()  # type: ignore[no-untyped-call]
    load = loads.sum_over(SingleRank())
    assert load is not None
    assert [int(rows.sum()) for rows in load.rows] == [2 * len(pack.ids)] * 2, "each token has two experts"


def test_a_dense_model_has_no_loads() -> None:
    trainer = Learner(model(), TrainConfig(precision="fp64"))
    metrics = trainer.update(ready(trainer, AlgorithmConfig(), BATCH), Improve(AlgorithmConfig())).reduce()
    assert not [name for name in metrics if name.startswith("moe/")]
