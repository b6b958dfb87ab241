"""What the sharded train engine promises of its meshes: replicas of shards, and layers split over ranks.

One world of four ranks serves all tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from etude.algorithms.losses.preference import RewardModelLoss
from etude.checkpoint import CheckpointManager
from etude.dispatch.process_crew import ProcessCrew
from etude.models import create, load, save, tiny_config
from etude.train import MeshConfig
from tests.contracts.test_train_engines import EVERYTHING, WHOLE, Engine, calls_of_update, difference, practised, same
from tests.recipes.ranked import RankPolicy, crew_of, judge
from tests.train.tasks import VOCABULARY, model, rollouts
from tests.train.test_scoring import pairs

pytestmark = pytest.mark.xdist_group("meshes")  # what its tests share takes long to make

BOTH, TENSOR = MeshConfig(tensor=2), MeshConfig(tensor=4)
REPLICAS, REPLICAS_AND_TENSOR = MeshConfig(replicas=2), MeshConfig(replicas=2, tensor=2)
EVERY = {
    "data 2 x tensor 2": (BOTH, model),
    "tensor 4": (TENSOR, partial(model, kv_heads=4, tied=False)),
    "replica 2 x data 2": (REPLICAS, model),
    "replica 2 x tensor 2": (REPLICAS_AND_TENSOR, partial(model, tied=False)),
}
"""The meshes of four ranks, each with a model: its head is tied to the embedding or not."""
LEARNERS: dict[str, tuple[MeshConfig, dict[str, Any]]] = {
    "biases, and activations made twice": (
        TENSOR,
        {"policy": partial(model, family="qwen2", kv_heads=4), "activation_checkpointing": "full"},
    ),
    "whole distributions": (BOTH, {"algorithm": WHOLE, "max_tokens_per_micro_batch": 40}),
}


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCrew]:
    with closing(crew_of(4, tmp_path_factory.mktemp("four"))) as made:
        yield made


@pytest.fixture
def on(four: ProcessCrew) -> Callable[[MeshConfig], Engine]:
    """The four ranks as a mesh."""

    def engine(mesh: MeshConfig) -> Engine:
        four._repeats = mesh.size
        return Engine(four, "fsdp", mesh)

    return engine


@pytest.mark.parametrize("mesh", EVERY)
def test_steps_are_those_of_one_rank(on: Callable[[MeshConfig], Engine], mesh: str) -> None:
    """In loss, gradient norm and weights. Some micro-batches and one update are empty for some ranks."""
    config, policy = EVERY[mesh]
    engine = on(config)
    options: dict[str, Any] = {"policy": policy, "algorithm": EVERYTHING, "max_tokens_per_micro_batch": 60}
    one, many = engine.alone(**options), engine.begin(**options)
    wanted, found = (practised(crew, 2) + practised(crew, 1, groups=1, updates=3, first=2) for crew in (one, many))
    assert difference(one, many) <= 1e-12
    for mine, theirs in zip(wanted, found, strict=True):
        for name in ("loss", "grad_norm", "trained_tokens", "action_tokens"):
            assert theirs[name] == pytest.approx(mine[name], rel=1e-10, abs=1e-12), name


@pytest.mark.parametrize("learner", LEARNERS)
def test_every_learner_is_that_of_one_rank(on: Callable[[MeshConfig], Engine], learner: str) -> None:
    mesh, options = LEARNERS[learner]
    engine = on(mesh)
    one, many = engine.alone(**options), engine.begin(**options)
    practised(one, 1), practised(many, 1)
    assert difference(one, many) <= 1e-12


def test_a_critic_is_that_of_one_rank(on: Callable[[MeshConfig], Engine]) -> None:
    """In what it says, and in what it learns."""
    engine = on(BOTH)
    one, many = engine.alone(policy=judge), engine.begin(policy=judge)
    batches = [crew.call(RankPolicy.tell, rollouts(), frozenset({"value", "final_value"})) for crew in (one, many)]
    for name in ("value", "final_value"):
        mine, theirs = (each.require(name) for each in batches)
        torch.testing.assert_close(theirs, mine, rtol=0, atol=1e-12, equal_nan=True)
    for crew in (one, many):
        crew.call(RankPolicy.imitate, pairs(), loss=RewardModelLoss())
    assert difference(one, many) <= 1e-12


def test_a_checkpoint_is_one_of_any_mesh(on: Callable[[MeshConfig], Engine], tmp_path: Path) -> None:
    """The same ranks as replicas of two shards read it, and one rank; all go on alike."""
    many = on(BOTH).begin()
    practised(many, 1)
    many.call(RankPolicy.save, CheckpointManager(tmp_path), 1)
    saved = many.call(RankPolicy.weights)[0]
    practised(many, 1, first=1)
    wanted = many.call(RankPolicy.weights)[0]
    for crew in (on(BOTH).alone(), on(REPLICAS).begin()):
        crew.call(RankPolicy.resume, tmp_path)
        assert all(same(saved, weights) for weights in crew.call(RankPolicy.weights))
        practised(crew, 1, first=1)
        found = crew.call(RankPolicy.weights)[0]
        assert max(float((found[name] - weight).abs().max()) for name, weight in wanted.items()) <= 1e-12


@pytest.mark.parametrize(("mesh", "layers"), [(MeshConfig(), 4), (BOTH, 2), (BOTH, 4), (REPLICAS, 2)])
def test_collective_calls_depend_on_layers_and_micro_batches_alone(
    on: Callable[[MeshConfig], Engine], mesh: MeshConfig, layers: int
) -> None:
    """Tensor parallel ranks gather and reduce tokens four times a layer besides, and replicas add up each gradient."""
    expected = calls_of_update(layers, micro_batches=2)
    if mesh.tensor > 1:
        expected |= {"tensor_gathers": 2 * (4 * layers + 2), "tensor_reduces": 2 * (4 * layers + 1)}
        expected |= {"small_gathers": 10, "sums": 3}
    if mesh.replicas > 1:
        expected["sums"] += expected["reduces"]
    crew = on(mesh).begin(policy=partial(model, layers=layers), max_tokens_per_micro_batch=120)
    for counts in crew.call(RankPolicy.collectives, rollouts(groups=4)):
        assert counts == expected, counts


def test_half_precision_is_the_same_on_every_rank(on: Callable[[MeshConfig], Engine]) -> None:
    engine = on(BOTH)
    one, many = engine.alone("bf16"), engine.begin("bf16")
    wanted, found = practised(one, 1, updates=1), practised(many, 1, updates=1)
    assert difference(one, many) <= 0.03  # an update moves a weight by up to 1e-2 in either direction
    assert found[0]["grad_norm"] == pytest.approx(wanted[0]["grad_norm"], rel=1e-2)


def test_a_pass_that_runs_out_of_memory_changes_nothing(on: Callable[[MeshConfig], Engine]) -> None:
    batch, results = rollouts(groups=4), []
    for fails in (False, True):
        crew = on(BOTH).begin(max_tokens_per_micro_batch=20)
        if fails:
            crew.call(RankPolicy.fail_twice, batch)
        crew.call(RankPolicy.imitate, batch)
        results.append(crew.call(RankPolicy.weights)[0])
    assert same(*results)


def test_a_model_is_loaded_in_shards(four: ProcessCrew, tmp_path: Path) -> None:
    """Each rank reads its blocks of rows and of columns."""
    save(create(tiny_config(VOCABULARY, family="llama", attention_bias=True), seed=1), tmp_path)
    expected = {name: weight.detach() for name, weight in load(tmp_path, dtype=torch.float32).named_weights()}
    assert all(same(expected, found) for found in four.call(RankPolicy.loaded, tmp_path, mesh=BOTH))
