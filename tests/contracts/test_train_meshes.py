"""The promises of the sharded train engine for its meshes: replicas of shards, and layers split over ranks.

All tests share one crew of four ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from etude.algorithms.losses.preference import RewardModelLoss
from etude.checkpoint import CheckpointManager
from etude.dispatch.process_crew import ProcessCrew
from etude.errors import ConfigError
from etude.models import LoraAdapterConfig, Model, adapt, create, load, save, tiny_config
from etude.train import MeshConfig
from tests.contracts.test_train_engines import (
    EVERYTHING,
    WHOLE,
    Engine,
    expected_calls,
    run_steps,
    weight_difference,
    weights_equal,
)
from tests.recipes.ranked import RankPolicy, adapted_model, family_policy, score_model, start_crew
from tests.train.tasks import VOCABULARY, model, rollouts
from tests.train.test_scoring import pairs

pytestmark = pytest.mark.xdist_group("meshes")  # the crew that its tests share is slow to start

BOTH, TENSOR = MeshConfig(tensor=2), MeshConfig(tensor=4)
REPLICAS, REPLICAS_AND_TENSOR = MeshConfig(replicas=2), MeshConfig(replicas=2, tensor=2)
MESHES = {
    "data 2 x tensor 2": (BOTH, model),
    "tensor 4": (TENSOR, partial(model, kv_heads=4, tied=False)),
    "replica 2 x data 2": (REPLICAS, model),
    "replica 2 x tensor 2": (REPLICAS_AND_TENSOR, partial(model, tied=False)),
    "context 4": (MeshConfig(context=4), partial(model, tied=False)),
    "context 2 x tensor 2": (MeshConfig(context=2, tensor=2), model),
}
"""The meshes of four ranks, each with a model. Its head may be tied to the embedding."""
SIX = {"num_experts": 6, "num_local_experts": 6}
"""Experts that two pairs of ranks cannot shard whole: they shard their rows."""
MIXTURE = partial(family_policy, name="qwen3_moe")
ADAPTED: dict[str, tuple[MeshConfig, Callable[[str], Model]]] = {
    "tensor 4": (TENSOR, partial(model, kv_heads=4)),
    "data 2 x tensor 2, biases": (BOTH, partial(model, family="qwen2")),
    "context 2 x tensor 2": (MeshConfig(context=2, tensor=2), model),
    "data 2 x context 2": (MeshConfig(context=2), model),
    "data 4, expert 2": (MeshConfig(expert=2), MIXTURE),
    "data 2 x tensor 2, expert 2": (MeshConfig(tensor=2, expert=2), MIXTURE),
}
"""The meshes of models with adapters, each with a model."""
BALANCED = {"balance": "loss", "balance_rate": 0.1}
MIXTURES: dict[str, tuple[MeshConfig, str, dict[str, Any]]] = {
    "expert 4": (MeshConfig(expert=4), "gpt_oss", {}),
    "expert 2, rows sharded": (MeshConfig(expert=2), "qwen3_moe", {"sizes": SIX}),
    "data 2 x tensor 2": (BOTH, "qwen3_moe", {}),
    "data 2 x tensor 2, expert 4": (MeshConfig(tensor=2, expert=4), "qwen3_moe", {}),
    "context 2 x tensor 2, expert 2, routes replayed": (
        MeshConfig(context=2, tensor=2, expert=2),
        "qwen3_moe",
        {"router_replay": "r2", "activation_checkpointing": "full", **BALANCED},
    ),
    "replica 2 x data 2, expert 2": (MeshConfig(replicas=2, expert=2), "qwen3_moe", {}),
    "expert 2, activations made twice": (MeshConfig(expert=2), "qwen3_moe", {"activation_checkpointing": "full"}),
    "expert 4, activations but products made twice": (
        MeshConfig(expert=4),
        "gpt_oss",
        {"activation_checkpointing": "selective"},
    ),
    "data 2 x context 2, expert 2": (
        MeshConfig(context=2, expert=2),
        "qwen3_moe",
        {"router_replay": "r2", "activation_checkpointing": "full", **BALANCED},
    ),
    "replica 2 x context 2": (MeshConfig(replicas=2, context=2), "gpt_oss", {}),
    "context 2 x tensor 2, expert 4": (MeshConfig(context=2, tensor=2, expert=4), "qwen3_moe", {}),
}
"""The meshes of mixtures of experts, each with a family and options."""
LEARNERS: dict[str, tuple[MeshConfig, dict[str, Any]]] = {
    "biases, and activations made twice": (
        TENSOR,
        {"policy": partial(model, family="qwen2", kv_heads=4), "activation_checkpointing": "full"},
    ),
    "offloaded activations": (BOTH, {"offload_activations": True, "max_tokens_per_micro_batch": 40}),
    "windows and capped scores, activations made twice": (
        MeshConfig(context=2),
        {
            "policy": partial(model, family="gemma2", sliding_window=5),
            "activation_checkpointing": "full",
            "max_tokens_per_micro_batch": 40,
        },
    ),
    "latent attention, without experts": (
        MeshConfig(context=4),
        {
            "policy": partial(family_policy, name="deepseek_v3", first_k_dense_replace=2),
            "max_tokens_per_micro_batch": 40,
        },
    ),
    "whole distributions": (BOTH, {"algorithm": WHOLE, "max_tokens_per_micro_batch": 40}),
}


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCrew]:
    with closing(start_crew(4, tmp_path_factory.mktemp("four"))) as crew:
        yield crew


@pytest.fixture
def on_mesh(four: ProcessCrew) -> Callable[[MeshConfig], Engine]:
    """Return a function that starts the engine of a mesh on the four ranks."""

    def engine(mesh: MeshConfig) -> Engine:
        four._repeats = mesh.ranks_per_rollout
        return Engine(four, "fsdp", mesh)

    return engine


@pytest.mark.parametrize("mesh", MESHES)
def test_steps_equal_those_of_one_rank(on_mesh: Callable[[MeshConfig], Engine], mesh: str) -> None:
    """Loss, gradient norm and weights are compared. Some micro-batches and one update are empty for some ranks."""
    config, policy = MESHES[mesh]
    engine = on_mesh(config)
    options: dict[str, Any] = {"policy": policy, "algorithm": EVERYTHING, "max_tokens_per_micro_batch": 60}
    one, many = engine.start_one(**options), engine.start(**options)
    expected_metrics, all_metrics = (
        run_steps(crew, 2) + run_steps(crew, 1, groups=1, updates=3, first=2) for crew in (one, many)
    )
    assert weight_difference(one, many) <= 1e-12
    for expected, metrics in zip(expected_metrics, all_metrics, strict=True):
        for name in ("loss", "grad_norm", "trained_tokens", "action_tokens"):
            assert metrics[name] == pytest.approx(expected[name], rel=1e-10, abs=1e-12), name


@pytest.mark.parametrize("mesh", ADAPTED)
def test_adapters_equal_those_of_one_rank(on_mesh: Callable[[MeshConfig], Engine], mesh: str) -> None:
    """In the last updates most ranks have no rollout. A mixture has adapters of its attention."""
    config, policy = ADAPTED[mesh]
    engine = on_mesh(config)
    options: dict[str, Any] = {"policy": partial(adapted_model, policy=policy), "max_tokens_per_micro_batch": 60}
    one, many = engine.start_one(**options), engine.start(**options)
    expected_metrics, all_metrics = (
        run_steps(crew, 1) + run_steps(crew, 1, groups=1, updates=3, first=1) for crew in (one, many)
    )
    assert weight_difference(one, many) <= 1e-12
    for expected, metrics in zip(expected_metrics, all_metrics, strict=True):
        assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-10)


def test_split_adapters_are_written_and_resumed_as_with_one_rank(
    on_mesh: Callable[[MeshConfig], Engine], tmp_path: Path
) -> None:
    """Also merged into their model, and published to an embedded engine."""
    engine = on_mesh(BOTH)
    one, many = (start("bf16", policy=adapted_model) for start in (engine.start_one, engine.start))
    run_steps(many, 1)
    many.call(RankPolicy.save, CheckpointManager(tmp_path / "many"), 1)
    one.call(RankPolicy.resume, tmp_path / "many")
    for crew, where in ((one, tmp_path / "by one"), (many, tmp_path / "by many")):
        where.mkdir()
        (where / "tokenizer.json").write_text("{}")
        assert crew.call(RankPolicy.write_files, where) == 4
    for part in ("merged/model", "bare/model", "adapter/adapter_model"):
        assert weights_equal(*(load_file(tmp_path / by / f"{part}.safetensors") for by in ("by one", "by many")))
    run_steps(one, 1, first=1)
    one.call(RankPolicy.save, CheckpointManager(tmp_path / "one"), 2)
    many.call(RankPolicy.resume, tmp_path / "one")
    assert weight_difference(one, many) == 0
    assert engine.start("fp32", policy=adapted_model).call(RankPolicy.publish, adapted_model) == [True] * 4


@pytest.mark.parametrize("learner", LEARNERS)
def test_every_learner_equals_that_of_one_rank(on_mesh: Callable[[MeshConfig], Engine], learner: str) -> None:
    mesh, options = LEARNERS[learner]
    engine = on_mesh(mesh)
    one, many = engine.start_one(**options), engine.start(**options)
    run_steps(one, 1), run_steps(many, 1)
    assert weight_difference(one, many) <= 1e-12


@pytest.mark.parametrize("mesh", MIXTURES)
def test_mixtures_equal_those_of_one_rank(on_mesh: Callable[[MeshConfig], Engine], mesh: str) -> None:
    """Each rank sends its tokens to the ranks of their experts; in the last updates most ranks have no rollout."""
    config, name, more = MIXTURES[mesh]
    engine, options = on_mesh(config), {"max_tokens_per_micro_batch": 40, **more}
    options["policy"] = partial(family_policy, name=name, **options.pop("sizes", {}))
    one, many = engine.start_one(**options), engine.start(**options)
    expected_metrics, all_metrics = (
        run_steps(crew, 1) + run_steps(crew, 1, groups=1, updates=3, first=1) for crew in (one, many)
    )
    assert weight_difference(one, many) <= 1e-12
    for expected, metrics in zip(expected_metrics, all_metrics, strict=True):
        assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-10)
        rel = 1e-9 if config.ranks_per_rollout == 1 else 0.2  # each rank may compute a token of padding
        for measured in ("moe/load", "moe/load_max", "moe/router_entropy"):
            assert metrics[measured] == pytest.approx(expected[measured], rel=rel), measured
        assert metrics.get("moe/balance_loss", 0.0) == pytest.approx(expected.get("moe/balance_loss", 0.0), rel=1e-9)


@pytest.mark.parametrize("mesh", [MeshConfig(expert=4), MeshConfig(tensor=2, expert=2), MeshConfig(replicas=2)])
def test_any_mesh_resumes_divided_experts(
    on_mesh: Callable[[MeshConfig], Engine], mesh: MeshConfig, tmp_path: Path
) -> None:
    policy = partial(family_policy, name="qwen3_moe")
    many = on_mesh(MeshConfig(context=2, expert=2)).start(policy=policy)
    run_steps(many, 1)
    many.call(RankPolicy.save, CheckpointManager(tmp_path), 1)
    saved = many.call(RankPolicy.weights)[0]
    run_steps(many, 1, first=1)
    expected = many.call(RankPolicy.weights)[0]
    for crew in (on_mesh(mesh).start_one(policy=policy), on_mesh(mesh).start(policy=policy)):
        crew.call(RankPolicy.resume, tmp_path)
        assert all(weights_equal(saved, weights) for weights in crew.call(RankPolicy.weights))
        run_steps(crew, 1, first=1)
        weights = crew.call(RankPolicy.weights)[0]
        assert max(float((weights[name] - weight).abs().max()) for name, weight in expected.items()) <= 1e-12


@pytest.mark.parametrize(("expert", "shares"), [(2, True), (4, False)])
def test_tokens_are_exchanged_once_for_each_product_of_a_mixture(
    on_mesh: Callable[[MeshConfig], Engine], expert: int, shares: bool
) -> None:
    """Their numbers, the tokens and the results; and two more in the backward pass. Experts on one rank alone need no
    gather. Two small gathers of an update measure the experts' loads."""
    layers = 2
    expected = expected_calls(layers, micro_batches=2) | {"exchanges": 2 * 5 * layers, "sums": 2, "small_gathers": 8}
    if shares:
        expected |= {"gathers": 2 * (4 * layers + 1), "reduces": 2 * (2 * layers + 1)}
    policy = partial(family_policy, name="qwen3_moe")
    crew = on_mesh(MeshConfig(expert=expert)).start(policy=policy, max_tokens_per_micro_batch=120)
    for counts in crew.call(RankPolicy.count_collectives, rollouts(groups=4)):
        assert counts == expected, counts


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_divided_experts_are_written_as_one_rank_writes_them(
    on_mesh: Callable[[MeshConfig], Engine], name: str, tmp_path: Path
) -> None:
    """One at a time; and published to an embedded engine. Their files may have all in one tensor."""
    policy = partial(family_policy, name=name)
    engine = on_mesh(MeshConfig(expert=2))
    one, many = engine.start_one("fp32", policy=policy), engine.start("fp32", policy=policy)
    for crew, where in ((one, tmp_path / "by one"), (many, tmp_path / "by many")):
        where.mkdir()
        (where / "tokenizer.json").write_text("{}")
        crew.call(RankPolicy.write_model, where)
    written = [load_file(tmp_path / by / "model" / "model.safetensors") for by in ("by one", "by many")]
    assert weights_equal(*written)
    assert many.call(RankPolicy.publish, policy) == [True] * 4


@pytest.mark.parametrize("mesh", [MeshConfig(), MeshConfig(expert=2), MeshConfig(tensor=2, expert=4)])
def test_no_rank_holds_a_whole_mixture_while_it_loads(four: ProcessCrew, mesh: MeshConfig, tmp_path: Path) -> None:
    """Each rank reads its own blocks. The check of the model gathers two layers, as every pass does, each by way of a
    buffer of its size."""
    experts, hidden, inner, layers = 8, 256, 128, 8
    sizes: dict[str, Any] = {"hidden_size": hidden, "moe_intermediate_size": inner, "num_hidden_layers": layers}
    sizes |= {"num_experts": experts, "num_local_experts": experts}
    save(family_policy("fp32", "qwen3_moe", **sizes), tmp_path)
    layer = 4 * 3 * experts * hidden * inner
    for rank in four.call(RankPolicy.measure_loading, tmp_path, mesh):
        assert rank["peak"] <= rank["shards"] + 4 * layer // mesh.expert + 2**21 < layers * layer, rank
    expected = {name: weight.detach() for name, weight in load(tmp_path, dtype=torch.float32).named_weights()}
    assert all(weights_equal(expected, weights) for weights in four.call(RankPolicy.load_weights, tmp_path, mesh=mesh))


def test_split_layers_are_not_compiled(on_mesh: Callable[[MeshConfig], Engine]) -> None:
    with pytest.raises(ConfigError, match=r"`train.compile` does not compile layers that `mesh.tensor=2` splits"):
        on_mesh(BOTH).start(compile=True)


def test_a_critic_equals_that_of_one_rank(on_mesh: Callable[[MeshConfig], Engine]) -> None:
    """Its values and its updates are compared."""
    engine = on_mesh(BOTH)
    one, many = engine.start_one(policy=score_model), engine.start(policy=score_model)
    batches = [crew.call(RankPolicy.annotate, rollouts(), frozenset({"value", "final_value"})) for crew in (one, many)]
    for name in ("value", "final_value"):
        expected, actual = (annotated.require(name) for annotated in batches)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12, equal_nan=True)
    for crew in (one, many):
        crew.call(RankPolicy.supervised_update, pairs(), loss=RewardModelLoss())
    assert weight_difference(one, many) <= 1e-12


def test_any_mesh_resumes_a_checkpoint(on_mesh: Callable[[MeshConfig], Engine], tmp_path: Path) -> None:
    """One rank resumes it, and so do the same ranks as replicas of two shards. All continue alike."""
    many = on_mesh(BOTH).start()
    run_steps(many, 1)
    many.call(RankPolicy.save, CheckpointManager(tmp_path), 1)
    saved = many.call(RankPolicy.weights)[0]
    run_steps(many, 1, first=1)
    expected = many.call(RankPolicy.weights)[0]
    for crew in (on_mesh(BOTH).start_one(), on_mesh(REPLICAS).start()):
        crew.call(RankPolicy.resume, tmp_path)
        assert all(weights_equal(saved, weights) for weights in crew.call(RankPolicy.weights))
        run_steps(crew, 1, first=1)
        weights = crew.call(RankPolicy.weights)[0]
        assert max(float((weights[name] - weight).abs().max()) for name, weight in expected.items()) <= 1e-12


@pytest.mark.parametrize(
    ("mesh", "layers"), [(MeshConfig(), 4), (BOTH, 2), (BOTH, 4), (MeshConfig(context=2), 4), (REPLICAS, 2)]
)
def test_collective_calls_depend_only_on_layers_and_micro_batches(
    on_mesh: Callable[[MeshConfig], Engine], mesh: MeshConfig, layers: int
) -> None:
    """Tensor-parallel ranks also gather and reduce tokens four times per layer, and replicas sum each gradient. Ranks
    that split the heads exchange them twice per layer and pass."""
    expected = expected_calls(layers, micro_batches=2)
    if mesh.tensor > 1:
        expected |= {"tensor_gathers": 2 * (4 * layers + 2), "tensor_reduces": 2 * (4 * layers + 1)}
        expected |= {"small_gathers": 7, "sums": 3}
    if mesh.context > 1:
        expected |= {"tensor_gathers": 2 * 2, "tensor_reduces": 2, "exchanges": 2 * 4 * layers}
    if mesh.replicas > 1:
        expected["sums"] += expected["reduces"]
    crew = on_mesh(mesh).start(policy=partial(model, layers=layers), max_tokens_per_micro_batch=120)
    for counts in crew.call(RankPolicy.count_collectives, rollouts(groups=4)):
        assert counts == expected, counts


@pytest.mark.parametrize("mesh", [BOTH, MeshConfig(context=2)])
def test_half_precision_is_the_same_on_every_rank(on_mesh: Callable[[MeshConfig], Engine], mesh: MeshConfig) -> None:
    """Also where weights that stay in float32, the sinks, belong to heads of several ranks."""
    engine = on_mesh(mesh)
    policy = model if mesh == BOTH else partial(family_policy, name="gpt_oss")
    one, many = engine.start_one("bf16", policy=policy), engine.start("bf16", policy=policy)
    expected, metrics = run_steps(one, 1, updates=1), run_steps(many, 1, updates=1)
    assert weight_difference(one, many) <= 0.03  # an update moves a weight by up to 1e-2 in either direction
    assert metrics[0]["grad_norm"] == pytest.approx(expected[0]["grad_norm"], rel=1e-2)


def test_a_pass_that_runs_out_of_memory_changes_nothing(on_mesh: Callable[[MeshConfig], Engine]) -> None:
    batch, results = rollouts(groups=4), []
    for fails in (False, True):
        crew = on_mesh(BOTH).start(max_tokens_per_micro_batch=20)
        if fails:
            crew.call(RankPolicy.fail_twice, batch)
        crew.call(RankPolicy.supervised_update, batch)
        results.append(crew.call(RankPolicy.weights)[0])
    assert weights_equal(*results)


def test_a_model_is_loaded_in_shards(four: ProcessCrew, tmp_path: Path) -> None:
    """Each rank reads its blocks of rows and of columns, and keeps those of new adapters."""
    save(create(tiny_config(VOCABULARY, family="llama", attention_bias=True), seed=1), tmp_path)
    adapted = adapt(load(tmp_path, dtype=torch.float32), LoraAdapterConfig(rank=4), seed=3)
    expected = {name: weight.detach() for name, weight in adapted.named_weights()}
    loaded = four.call(RankPolicy.load_weights, tmp_path, lora=4, mesh=BOTH)
    assert all(weights_equal(expected, weights) for weights in loaded)
