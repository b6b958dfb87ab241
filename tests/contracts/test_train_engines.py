"""The promises of every train engine: several ranks compute the same updates as one, with whole or sharded weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from etude.algorithms import AlgorithmConfig
from etude.algorithms.advantages import ADVANTAGES
from etude.algorithms.entropy import EntropyConfig
from etude.algorithms.kl import KLS
from etude.algorithms.losses import LOSSES
from etude.algorithms.losses.clip import PPO
from etude.algorithms.losses.preference import RewardModelLoss
from etude.algorithms.losses.supervised import ValueLoss
from etude.checkpoint import CheckpointManager, export
from etude.data.partition import partition_rollouts
from etude.dispatch import LocalCrew
from etude.dispatch.process_crew import ProcessCrew
from etude.errors import ConfigError, TrainingError
from etude.images.pixel_cache import PixelCache
from etude.models import Head, LoraAdapterConfig, Model, adapt, create, load, save, tiny_config
from etude.protocols import Crew
from etude.train import FrozenModel, MeshConfig, load_weights
from etude.train.device_mesh import ShardMeshes
from etude.train.fsdp import ShardedModel
from tests.recipes.ranked import (
    RankPolicy,
    adapted_model,
    family_policy,
    get_mesh,
    model_with_unused_weight,
    partly_frozen_model,
    score_model,
    seeing_policy,
    start_crew,
    unfused_model,
)
from tests.train.tasks import VOCABULARY, answered, model, rollouts
from tests.train.test_scoring import pairs
from tests.vision_rows import ANSWERS, VisionRows
from tests.vlms import load_vlm, make_vlm

pytestmark = pytest.mark.xdist_group("ranks")  # the crews that its tests share are slow to start

EVERYTHING = AlgorithmConfig(
    loss=PPO(reduction="seq-mean-token-mean"),
    advantage=ADVANTAGES["reinforce++"](),
    entropy=EntropyConfig(coefficient=0.1, top_share=0.8),
    correction={"weight": "truncate", "high": 2.0, "normalize": "tokens"},
    echo=0.3,
)
WHOLE = AlgorithmConfig(kl=KLS["full"](coefficient=0.3))
COVARIANCE = AlgorithmConfig(loss=LOSSES["clip_cov"](share=0.2), advantage=ADVANTAGES["gpg"]())
TOLERANCE = {"fp64": 1e-12, "fp32": 2e-5}
"""The largest difference of a weight after five steps of four updates, each of which moves it by up to 1e-2."""
TIMES = {"update_seconds", "trained_tokens_per_second", "peak_memory_gb", "memory_share", "mfu", "micro_batches"}
"""Metrics of the computation, not of the learning."""


@dataclass(frozen=True)
class Engine:
    """The ranks of an engine. It can also start one rank that computes the same."""

    crew: ProcessCrew
    name: Literal["local", "fsdp"]
    mesh: MeshConfig | None = None

    def start(self, *args: Any, policy: Callable[[str], Model] = model, **options: Any) -> Crew:
        """Build a new policy on every rank."""
        layers = self._layers(policy)
        self.crew.call(RankPolicy.start, *args, engine=self.name, policy=layers, mesh=self.mesh, **options)
        return self.crew

    def start_one(self, *args: Any, policy: Callable[[str], Model] = model, **options: Any) -> Crew:
        """Start one rank of the local engine, in this process."""
        crew = LocalCrew(RankPolicy())
        crew.call(RankPolicy.start, *args, policy=self._layers(policy), **options)
        return crew

    def _layers(self, policy: Callable[[str], Model]) -> Callable[[str], Model]:
        return policy if self.name == "local" else partial(unfused_model, policy=policy)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCrew]:
    with closing(start_crew(2, tmp_path_factory.mktemp("two"))) as crew:
        yield crew


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCrew]:
    with closing(start_crew(3, tmp_path_factory.mktemp("three"))) as crew:
        yield crew


@pytest.fixture(params=["fsdp", "local"])
def engine(request: pytest.FixtureRequest) -> Engine:
    crew = request.getfixturevalue("two") if request.param == "fsdp" else LocalCrew(RankPolicy())
    return Engine(crew, request.param)


@pytest.fixture
def fsdp(two: ProcessCrew) -> Engine:
    return Engine(two, "fsdp")


@pytest.fixture
def one_rank() -> Iterator[LocalCrew]:
    """A single rank in this process. With the engine of several it makes a process group, which ends with the test."""
    yield LocalCrew(RankPolicy())
    get_mesh.cache_clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def run_steps(
    crew: Crew, steps: int = 5, *, updates: int = 2, groups: int = 3, first: int = 0
) -> list[dict[str, float]]:
    """Make some steps on batches of unequal groups, and return their metrics."""
    measured = []
    for step in range(first, first + steps):
        batch = crew.call(RankPolicy.prepare, rollouts(seed=step, groups=groups))
        measured.append(crew.call(RankPolicy.update, batch.split(updates, by="rollout")).reduce())
    return measured


def weight_difference(one: Crew, other: Crew) -> float:
    """Return the largest difference of the weights of two crews. All ranks of a crew must have the same weights."""
    one_weights, other_weights = one.call(RankPolicy.weights), other.call(RankPolicy.weights)
    for of_ranks in (one_weights, other_weights):
        assert all(weights_equal(of_ranks[0], of_rank) for of_rank in of_ranks)
    return max(float((weight - other_weights[0][name]).abs().max()) for name, weight in one_weights[0].items())


def weights_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("precision", sorted(TOLERANCE))
@pytest.mark.parametrize(
    "algorithm", [AlgorithmConfig(), EVERYTHING, COVARIANCE], ids=["grpo", "everything", "covariance"]
)
def test_five_steps_equal_those_of_one_rank(fsdp: Engine, algorithm: AlgorithmConfig, precision: str) -> None:
    """Loss, gradient norm and weights are compared, and every other metric of learning."""
    options: dict[str, Any] = {
        "precision": precision,
        "algorithm": algorithm,
        "epochs": 2,
        "max_tokens_per_micro_batch": 60,
    }
    one, many = fsdp.start_one(**options), fsdp.start(**options)
    before = one.call(RankPolicy.weights)[0]
    expected_metrics, all_metrics = run_steps(one), run_steps(many)
    tolerance = TOLERANCE[precision]
    assert weight_difference(one, many) <= tolerance
    assert max(float((w - before[name]).abs().max()) for name, w in one.call(RankPolicy.weights)[0].items()) > 0.05
    for expected, metrics in zip(expected_metrics, all_metrics, strict=True):
        assert expected.keys() | {"imbalance"} == metrics.keys()
        assert 0 <= metrics["imbalance"] <= fsdp.crew.ranks - 1
        for name in ("loss", "grad_norm", "policy_loss"):
            assert metrics[name] == pytest.approx(expected[name], rel=50 * tolerance, abs=tolerance), name
        for name in expected.keys() - TIMES:  # the sampler's log-probs are always in float32
            assert metrics[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-6), name


def test_ranks_without_a_rollout_take_part(fsdp: Engine) -> None:
    """There are fewer groups than ranks, and update batches that are empty for some ranks."""
    one, many = fsdp.start_one(algorithm=EVERYTHING), fsdp.start(algorithm=EVERYTHING)
    run_steps(one, 2, groups=1, updates=3), run_steps(many, 2, groups=1, updates=3)
    assert weight_difference(one, many) <= 1e-12


def test_ranks_with_unequally_many_micro_batches_do_not_hang(fsdp: Engine) -> None:
    options = {"algorithm": AlgorithmConfig(), "max_tokens_per_micro_batch": 1}
    one, many = fsdp.start_one(**options), fsdp.start(**options)
    lengths = torch.tensor([0, 1, 2, 3, 4, 5, 8])  # groups of four, of two and of one
    batch = rollouts(groups=3).select(lengths)
    for crew in (one, many):
        crew.call(RankPolicy.update, [crew.call(RankPolicy.prepare, batch)])
    assert weight_difference(one, many) <= 1e-12


def test_an_update_without_gradients_changes_no_weight(engine: Engine) -> None:
    """Without a gradient on any rank, weight decay and AdamW's moments do not act either."""
    two = engine.start(weight_decay=0.5)
    two.call(RankPolicy.supervised_update, rollouts())
    before = two.call(RankPolicy.weights)[0]
    metrics = two.call(RankPolicy.supervised_update, rollouts(), num_actions=0).reduce()
    assert metrics["grad_norm"] == 0 and metrics["action_tokens"] == 0
    assert weights_equal(two.call(RankPolicy.weights)[0], before)


def test_every_rank_refuses_a_gradient_that_is_not_finite(engine: Engine) -> None:
    two = engine.start()
    batch = two.call(RankPolicy.prepare, rollouts())
    before = two.call(RankPolicy.weights)[0]
    broken = batch.replace(advantage=torch.where(batch.action, torch.tensor(1e308).double(), 0.0))
    with pytest.raises(TrainingError, match=r"not finite in \d+ weights, `model\.embed_tokens\.weight` first"):
        two.call(RankPolicy.update, [broken])
    assert weights_equal(two.call(RankPolicy.weights)[0], before)
    two.call(RankPolicy.update, [batch])


@pytest.mark.parametrize("readers", [1, pytest.param(3, marks=pytest.mark.soak)])
def test_any_number_of_ranks_resumes_a_checkpoint_of_two(
    fsdp: Engine, readers: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """The readers continue as the two ranks do. A model without a learner loads its weights too."""
    two = fsdp.start(algorithm=EVERYTHING)
    run_steps(two, 2)
    two.call(RankPolicy.save, CheckpointManager(tmp_path), 2)
    if readers == 1:
        other = fsdp.start_one(algorithm=EVERYTHING)
    else:
        other = replace(fsdp, crew=request.getfixturevalue("three")).start(algorithm=EVERYTHING)
    assert weight_difference(two, other) > 0.01
    other.call(RankPolicy.resume, tmp_path)
    assert weight_difference(two, other) == 0
    policy, checkpoints = model(seed=5), CheckpointManager(tmp_path)
    newest = checkpoints.newest()
    assert newest is not None
    load_weights(policy, checkpoints, newest)
    assert weights_equal({name: w.detach() for name, w in policy.named_weights()}, two.call(RankPolicy.weights)[0])
    run_steps(two, 2, first=2), run_steps(other, 2, first=2)
    assert 0 < weight_difference(two, other) <= 1e-12


def test_two_ranks_resume_a_checkpoint_of_one(fsdp: Engine, tmp_path: Path) -> None:
    one = fsdp.start_one()
    run_steps(one, 2)
    one.call(RankPolicy.save, CheckpointManager(tmp_path), 2)
    two = fsdp.start()
    two.call(RankPolicy.resume, tmp_path)
    assert weight_difference(one, two) == 0
    run_steps(one, 2, first=2), run_steps(two, 2, first=2)
    assert weight_difference(one, two) <= 1e-12


def test_the_same_ranks_compute_the_same_bits(engine: Engine) -> None:
    weights = []
    for _ in range(2):
        many = engine.start("fp32")
        run_steps(many, 3)
        weights.append(many.call(RankPolicy.weights)[0])
    assert weights_equal(*weights)


def test_half_precision_is_the_float32_weights_rounded_on_every_rank(engine: Engine, tmp_path: Path) -> None:
    many = engine.start("bf16")
    run_steps(many, 2)
    weights, counts = many.call(RankPolicy.weights), many.call(RankPolicy.count_master_elements)
    assert all(weights_equal(weights[0], of_rank) for of_rank in weights)
    assert sum(counts) == sum(weight.numel() for weight in weights[0].values()) and max(counts) <= 1.2 * min(counts)
    many.call(RankPolicy.save, CheckpointManager(tmp_path), 1)
    one = engine.start_one("bf16")
    one.call(RankPolicy.resume, tmp_path)
    assert weights_equal(one.call(RankPolicy.weights)[0], weights[0])


def test_an_overflow_lowers_the_loss_scale_on_every_rank(engine: Engine) -> None:
    for crew in (engine.start_one("fp16"), engine.start("fp16")):
        batch = crew.call(RankPolicy.prepare, rollouts())
        large = batch.replace(advantage=batch.require("advantage") * 1e6)
        before = crew.call(RankPolicy.weights)[0]
        steps = [crew.call(RankPolicy.update, [part]).reduce() for part in (large, batch)]
        assert [step["skipped_updates"] for step in steps] == [1, 0]
        assert steps[1]["loss_scale"] == steps[0]["loss_scale"] / 2
        assert not weights_equal(crew.call(RankPolicy.weights)[0], before)


def test_an_update_that_runs_out_of_memory_changes_nothing(engine: Engine) -> None:
    """Neither the weights, nor the log-probs of a batch, nor the next update change."""
    batch, results = rollouts(groups=4), []
    for fails in (False, True):
        crew = engine.start(max_tokens_per_micro_batch=20)
        if fails:
            crew.call(RankPolicy.fail_twice, batch)
            crew.call(RankPolicy.fail_in_first_layer, batch)
        logp = crew.call(RankPolicy.annotate, batch, frozenset({"old_logp"})).require("old_logp").nan_to_num()
        crew.call(RankPolicy.supervised_update, batch)
        results.append({"old_logp": logp, **crew.call(RankPolicy.weights)[0]})
    assert weights_equal(*results)


@pytest.mark.parametrize("policy", [model, adapted_model])
def test_a_reference_that_runs_out_of_memory_changes_nothing(fsdp: Engine, policy: Callable[[str], Model]) -> None:
    """The reference is another sharded model, or the policy without its adapters."""
    batch, results = rollouts(groups=4), []
    for fails in (False, True):
        crew = fsdp.start(algorithm=WHOLE, policy=policy, max_tokens_per_micro_batch=20)
        ready = crew.call(RankPolicy.prepare, batch)
        if fails:
            crew.call(RankPolicy.fail_in_reference, ready)
            assert all(crew.call(RankPolicy.has_only_shards))
        logp = crew.call(RankPolicy.annotate_with_teacher, batch).require("ref_logp").nan_to_num()
        crew.call(RankPolicy.update, [ready])
        assert all(crew.call(RankPolicy.has_only_shards))
        results.append({"ref_logp": logp, **crew.call(RankPolicy.weights)[0]})
    assert weights_equal(*results)


def test_a_weight_that_no_pass_reads_does_not_decay(engine: Engine) -> None:
    crew = engine.start(policy=model_with_unused_weight, weight_decay=0.5)
    run_steps(crew, 1)
    assert torch.equal(crew.call(RankPolicy.weights)[0]["model.unused"], torch.ones(6, 3, dtype=torch.float64))


LEARNERS: dict[str, dict[str, Any]] = {
    "whole distributions": {"algorithm": WHOLE},
    "adapters, held to what they adapt": {
        "policy": adapted_model,
        "algorithm": AlgorithmConfig(kl=KLS["reverse"](coefficient=0.3)),
    },
    "adapters, whole distributions": {"policy": adapted_model, "algorithm": WHOLE},
    "adapters, activations made twice": {"policy": adapted_model, "activation_checkpointing": "full"},
    "adapters, activations but products made twice": {"policy": adapted_model, "activation_checkpointing": "selective"},
    "a layer and the embedding frozen": {
        "policy": partial(partly_frozen_model, parts=["embed_tokens", "layers.0", "k_proj"])
    },
    "all but the head frozen": {"policy": partial(partly_frozen_model, parts=["embed_tokens", "layers", "model.norm"])},
}


@pytest.mark.parametrize("learner", LEARNERS)
def test_every_learner_equals_that_of_one_rank(fsdp: Engine, learner: str) -> None:
    """Ranks may have unequally many micro-batches, or no rollout."""
    options = {"max_tokens_per_micro_batch": 40, **LEARNERS[learner]}
    one, many = fsdp.start_one(**options), fsdp.start(**options)
    before = one.call(RankPolicy.weights)[0]
    for crew in (one, many):
        run_steps(crew, 1)
        run_steps(crew, 1, groups=1, updates=3, first=1)
    assert weight_difference(one, many) <= 1e-12
    assert max(float((w - before[name]).abs().max()) for name, w in one.call(RankPolicy.weights)[0].items()) > 0.02


@pytest.mark.parametrize("name", ["qwen3_5_text", "nemotron_h", "gpt_oss", "gemma4_text"])
def test_layers_of_many_kinds_have_the_gradients_of_one_rank(fsdp: Engine, name: str) -> None:
    """In float32, in which transformers computes recurrences; in the second update one rank has no rollout."""
    options: dict[str, Any] = {"policy": partial(family_policy, name=name), "max_tokens_per_micro_batch": 40}
    crews = fsdp.start_one("fp32", **options), fsdp.start("fp32", **options)
    for groups in (6, 1):
        gradients = []
        for crew in crews:
            run_steps(crew, 1, groups=groups, updates=1)
            gradients.append(crew.call(RankPolicy.gradient))
        for weight, expected in gradients[0].items():
            off = float((gradients[1][weight] - expected).abs().max())
            assert off <= 1e-3 * float(expected.abs().max()) + 1e-7, (groups, weight)


def test_weights_that_stay_in_float32_are_whole_on_every_rank(fsdp: Engine, tmp_path: Path) -> None:
    """In half precision, FSDP2 has no part in them. In the second update one rank has no rollout."""
    policy = partial(family_policy, name="qwen3_5_text")
    two, one = (start("bf16", policy=policy, max_tokens_per_micro_batch=40) for start in (fsdp.start, fsdp.start_one))
    for crew in (one, two):
        run_steps(crew, 1, groups=6, updates=1)
    expected, found = (crew.call(RankPolicy.gradient) for crew in (one, two))
    for weight in (name for name in expected if name.endswith(("A_log", "dt_bias"))):
        off = (found[weight] - expected[weight]).norm()
        assert off <= 0.2 * expected[weight].norm(), weight  # other roundings of half precision, but no missing part
    run_steps(two, 1, groups=1, updates=1)
    two.call(RankPolicy.save, CheckpointManager(tmp_path), 2)
    one.call(RankPolicy.resume, tmp_path)
    assert weight_difference(one, two) == 0
    weights = two.call(RankPolicy.weights)[0].items()
    assert {weight.dtype for name, weight in weights if name.endswith("A_log")} == {torch.float32}


@pytest.mark.parametrize("kind", ["selective", "full"])
def test_activation_checkpointing_does_not_change_gradients(engine: Engine, kind: str) -> None:
    options: dict[str, Any] = {"algorithm": EVERYTHING, "max_tokens_per_micro_batch": 40}
    gradients = []
    for checkpointing in ("none", kind):
        crew = engine.start(activation_checkpointing=checkpointing, **options)
        run_steps(crew, 1, updates=1)
        gradients.append(crew.call(RankPolicy.gradient))
    assert max(float((gradients[1][name] - expected).abs().max()) for name, expected in gradients[0].items()) <= 1e-12
    assert max(float(expected.abs().max()) for expected in gradients[0].values()) > 1e-3


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["none", "full"])
def test_compiled_layers_give_the_same_losses_and_gradients(
    fsdp: Engine, one_rank: LocalCrew, kind: str, ranks: int
) -> None:
    engine = replace(fsdp, crew=one_rank) if ranks == 1 else fsdp
    check_compiled_layers(engine, "aot_eager", activation_checkpointing=kind)


def test_layers_compiled_for_a_processor_give_the_same_losses_and_gradients(fsdp: Engine, one_rank: LocalCrew) -> None:
    engine = replace(fsdp, crew=one_rank)
    check_compiled_layers(engine, "inductor", activation_checkpointing="full")


def test_compiled_layers_compute_with_adapters_and_without_them(fsdp: Engine, one_rank: LocalCrew) -> None:
    """The reference is the policy without its adapters. The first layer has graphs of its own: it has no gradient."""
    engine = replace(fsdp, crew=one_rank)
    check_compiled_layers(engine, "aot_eager", policy=adapted_model, graphs=6)


def check_compiled_layers(engine: Engine, compiler: str, *, graphs: int = 4, **options: Any) -> None:
    """Compare log-probs, loss and gradient with those of layers that are not compiled. Packs have several lengths."""
    options |= {"max_grad_norm": None, "max_tokens_per_micro_batch": 40, "compiler": compiler}
    batch, results, metrics = rollouts(groups=4), [], dict[str, float]()
    for compiled in (False, True):
        crew = engine.start("fp32", compile=compiled, **options)
        logp = crew.call(RankPolicy.annotate_with_teacher, batch).require("ref_logp").nan_to_num()
        old_logp = crew.call(RankPolicy.annotate, batch, frozenset({"old_logp"})).require("old_logp").nan_to_num()
        metrics = crew.call(RankPolicy.supervised_update, batch).reduce()
        loss = torch.tensor(metrics["loss"])
        results.append({"ref_logp": logp, "logp": old_logp, "loss": loss, **crew.call(RankPolicy.gradient)})
    assert metrics["micro_batches"] > 4 and metrics["compiled_graphs"] == graphs
    for name, expected in results[0].items():
        assert float((results[1][name] - expected).abs().max()) <= 1e-5 * float(expected.abs().max()), name


def test_layers_are_not_compiled_where_checkpointing_keeps_their_products(one_rank: LocalCrew) -> None:
    with pytest.raises(ConfigError, match=r"`train.activation_checkpointing=selective` keeps .* Set .*=none`"):
        one_rank.call(RankPolicy.start, engine="fsdp", compile=True, activation_checkpointing="selective")


@pytest.mark.parametrize("policy", [model, adapted_model])
def test_offloaded_activations_give_the_same_bits(engine: Engine, policy: Callable[[str], Model]) -> None:
    options: dict[str, Any] = {"algorithm": EVERYTHING, "max_tokens_per_micro_batch": 40, "policy": policy}
    gradients = []
    for changes in ({}, {"offload_activations": True}):
        crew = engine.start(precision="fp32", **options, **changes)
        run_steps(crew, 1, updates=1)
        gradients.append(crew.call(RankPolicy.gradient))
    assert weights_equal(*gradients)
    assert max(float(gradient.abs().max()) for gradient in gradients[0].values()) > 1e-3


def test_scores_and_values_equal_those_of_one_rank(fsdp: Engine) -> None:
    one, many = fsdp.start_one(policy=score_model), fsdp.start(policy=score_model)
    batches = [crew.call(RankPolicy.annotate, rollouts(), frozenset({"value", "final_value"})) for crew in (one, many)]
    for name in ("value", "final_value"):
        expected, actual = (annotated.require(name) for annotated in batches)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12, equal_nan=True)
    for crew in (one, many):
        batch = crew.call(RankPolicy.annotate, rollouts(), frozenset({"value"}))
        returns = torch.where(batch.action, 1.0, torch.nan).to(batch.value)
        crew.call(RankPolicy.supervised_update, batch.replace(returns=returns), loss=ValueLoss())
        crew.call(RankPolicy.supervised_update, pairs(), loss=RewardModelLoss())
    assert weight_difference(one, many) <= 1e-12


@pytest.mark.parametrize("groups", [3, 1])
def test_a_frozen_model_computes_the_same_as_on_one_rank(fsdp: Engine, groups: int) -> None:
    """Ranks have unequally many micro-batches, or one has none."""
    batch = rollouts(groups=groups, longest=30)
    for policy in (model, adapted_model):
        one, many = (
            crew.call(RankPolicy.annotate_with_teacher, batch)
            for crew in (fsdp.start_one(policy=policy), fsdp.start(policy=policy))
        )
        assert torch.equal(one.require("teacher_topk_ids"), many.require("teacher_topk_ids"))
        for name in ("ref_logp", "teacher_topk_logp"):
            torch.testing.assert_close(one.require(name), many.require(name), rtol=0, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("sources", [[0, 1, 0, 1], [0, 0, 1, 1], [1, 1, 1, 1]], ids=["mixed", "apart", "one"])
def test_teachers_of_data_sources_compute_the_same_as_on_one_rank(fsdp: Engine, sources: list[int]) -> None:
    """A rank without a rollout of a teacher's source still takes part in gathering that teacher's weights."""
    batch = rollouts(groups=4, longest=30)
    batch = batch.replace(source=torch.tensor(sources)[batch.group], source_names=("code", "math"))
    one, many = (crew.call(RankPolicy.annotate_with_two_teachers, batch) for crew in (fsdp.start_one(), fsdp.start()))
    assert torch.equal(one.require("teacher_topk_ids"), many.require("teacher_topk_ids"))
    for name in ("teacher_logp", "teacher_topk_logp"):
        torch.testing.assert_close(one.require(name), many.require(name), rtol=0, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_adapters_are_written_and_resumed_as_with_one_rank(fsdp: Engine, precision: str, tmp_path: Path) -> None:
    """The files are the merged model, the model without adapters, and the adapters.

    Checkpoints go from two ranks to one, and back.
    """
    two, one = (start(precision, policy=adapted_model) for start in (fsdp.start, fsdp.start_one))
    run_steps(two, 1)
    two.call(RankPolicy.save, CheckpointManager(tmp_path / "two"), 1)
    one.call(RankPolicy.resume, tmp_path / "two")
    for crew, where in ((one, tmp_path / "by one"), (two, tmp_path / "by two")):
        where.mkdir()
        (where / "tokenizer.json").write_text("{}")
        assert crew.call(RankPolicy.write_files, where) == 4
    for part in ("merged/model", "bare/model", "adapter/adapter_model"):
        assert weights_equal(*(load_file(tmp_path / by / f"{part}.safetensors") for by in ("by one", "by two")))
    for part in ("merged/config", "bare/config", "adapter/adapter_config"):
        assert len({(tmp_path / by / f"{part}.json").read_text() for by in ("by one", "by two")}) == 1
    if precision == "fp64":
        run_steps(one, 1, first=1), run_steps(two, 1, first=1)
        assert weight_difference(one, two) <= 1e-12
        one.call(RankPolicy.save, CheckpointManager(tmp_path / "one"), 2)
        fsdp.start(policy=adapted_model).call(RankPolicy.resume, tmp_path / "one")
        assert weight_difference(one, two) == 0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_sharded_frozen_model_is_offloaded_between_calls(device: str) -> None:
    batch, compute_device = rollouts(), torch.device(device)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        shards = ShardedModel(unfused_model("fp32"), ShardMeshes.from_mesh(init_device_mesh(device, (1,))))
        offloaded = FrozenModel(shards, 50, compute_device=compute_device)
        for _ in range(2):
            assert {weight.device.type for weight in offloaded.model.parameters()} == {"cpu"}
            logp = offloaded.logp(batch)
            torch.testing.assert_close(logp, FrozenModel(unfused_model("fp32"), 50).logp(batch), equal_nan=True)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("layers", [2, 8])
def test_collective_calls_depend_only_on_layers_and_micro_batches(fsdp: Engine, layers: int) -> None:
    """A micro-batch gathers each layer twice and the root once, and reduces each gradient once; an update adds eight
    small calls."""
    policy = partial(model, layers=layers)
    for tokens, micro_batches in ((10_000, 1), (120, 2)):
        crew = fsdp.start(policy=policy, max_tokens_per_micro_batch=tokens)
        for counts in crew.call(RankPolicy.count_collectives, rollouts(groups=4)):
            assert counts == expected_calls(layers, micro_batches), counts


@pytest.mark.parametrize("policy", [model, adapted_model])
@pytest.mark.parametrize("groups", [4, 1])
def test_a_frozen_model_annotates_during_a_measurement(
    fsdp: Engine, policy: Callable[[str], Model], groups: int
) -> None:
    """Ranks have unequally many micro-batches. The frozen model may be the measured one without its adapters."""
    batch = pairs() if groups == 4 else pairs().select([0, 1])
    one, many = (
        start(policy=policy, max_tokens_per_micro_batch=1).call(RankPolicy.measure, batch).reduce()
        for start in (fsdp.start_one, fsdp.start)
    )
    assert one.keys() == many.keys()
    for name, expected in one.items():
        assert many[name] == pytest.approx(expected, rel=1e-12, abs=1e-12), name


def test_frozen_shards_have_the_dtype_of_forward_passes(fsdp: Engine) -> None:
    all_dtypes = fsdp.start("bf16", policy=adapted_model).call(RankPolicy.weight_dtypes)
    for dtypes in all_dtypes:
        assert {dtypes[name] for name in dtypes if ".lora_" in name} == {torch.float32}
        assert {dtypes[name] for name in dtypes if ".lora_" not in name} == {torch.bfloat16}


def test_sharded_moments_are_offloaded(fsdp: Engine) -> None:
    crew = fsdp.start()
    run_steps(crew, 1)
    assert crew.call(RankPolicy.offloads_moments) == [True, True]


def test_shards_are_published_to_an_embedded_engine(fsdp: Engine) -> None:
    assert fsdp.start("fp32", policy=adapted_model).call(RankPolicy.publish, adapted_model) == [True, True]


@pytest.mark.parametrize(
    ("family", "tied", "files", "head", "lora"),
    [
        ("qwen3", True, 1, "language", 4),
        ("llama", False, 3, "value", 0),
        ("gpt2", True, 1, "language", 0),
    ],
)
def test_a_model_is_loaded_in_shards(
    two: ProcessCrew, tmp_path: Path, family: str, tied: bool, files: int, head: Head, lora: int
) -> None:
    """The weights equal those of a model loaded whole: from one file or several, with new adapters or a new head."""
    where = tmp_path / "model"
    source = create(tiny_config(VOCABULARY, family=family, tied=tied), seed=1)
    size = sum(weight.nbytes for weight in source.parameters())
    export(source.named_weights(), source.config_dict(), where, max_shard_bytes=size // files + 1)
    assert len(list(where.glob("*.safetensors"))) >= files
    loaded = load(where, dtype=torch.float32, head=head)
    loaded = adapt(loaded, LoraAdapterConfig(rank=lora), seed=3) if lora else loaded
    expected = {name: weight.detach() for name, weight in loaded.named_weights()}
    assert all(weights_equal(expected, weights) for weights in two.call(RankPolicy.load_weights, where, head, lora))


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_experts_are_read_in_blocks(two: ProcessCrew, tmp_path: Path, name: str) -> None:
    """The files may hold the experts one by one, where the model fuses them."""
    save(family_policy("fp32", name, num_experts=3, n_routed_experts=3, num_local_experts=3), tmp_path)
    expected = {name: weight.detach() for name, weight in load(tmp_path, dtype=torch.float32).named_weights()}
    assert all(weights_equal(expected, weights) for weights in two.call(RankPolicy.load_weights, tmp_path))


def test_a_head_besides_a_tied_one_is_refused(two: ProcessCrew, tmp_path: Path) -> None:
    source = create(tiny_config(VOCABULARY), seed=1)
    head = ("lm_head.weight", source.head_weight.detach() + 1)
    export([*source.named_weights(), head], source.config_dict(), tmp_path / "model")
    with pytest.raises(ConfigError, match=r"ties the head to the embedding. Set `tie_word_embeddings` to false"):
        two.call(RankPolicy.load_weights, tmp_path / "model")


def test_no_rank_holds_a_whole_model_while_it_loads(two: ProcessCrew, tmp_path: Path) -> None:
    save(create(tiny_config(4096, hidden=256, layers=4), seed=1), tmp_path)
    for rank in two.call(RankPolicy.measure_loading, tmp_path):
        assert rank["peak"] <= rank["shards"] + rank["largest"] + 2**18, rank


def test_files_without_all_weights_are_refused_on_every_rank(two: ProcessCrew, tmp_path: Path) -> None:
    source = create(tiny_config(VOCABULARY), seed=1)
    weights = {name: weight for name, weight in source.named_weights() if "layers.1.mlp" not in name}
    export(weights.items(), source.config_dict(), tmp_path / "model")
    with pytest.raises(ConfigError, match=r"lacks 3 of its weights, model\.layers\.1\.mlp\.down_proj\.weight"):
        two.call(RankPolicy.load_weights, tmp_path / "model")


def test_imbalance_is_the_excess_of_the_busiest_rank_over_the_mean(fsdp: Engine) -> None:
    even, long_prompt, short_answers = (5, [4, 4]), (40, [2] * 4), (2, [40] * 4)
    long, short = pass_cost(*short_answers), pass_cost(*long_prompt)
    assert 3.4 * short < long < 20 * short, "both have as many tokens"
    expected = [
        ([even], 1.0),
        ([even] * 2, 0.0),
        ([even] * 3, 1 / 3),
        ([long_prompt, short_answers], 2 * long / (long + short) - 1),
    ]
    for groups, imbalance in expected:
        two = fsdp.start()
        metrics = two.call(RankPolicy.update, [two.call(RankPolicy.prepare, answered(*groups))]).reduce()
        assert metrics["imbalance"] == pytest.approx(imbalance, abs=1e-9), groups


def expected_calls(layers: int, micro_batches: int) -> dict[str, int]:
    """Return the number of collective calls per rank in an update of the `fsdp` engine with data parallelism only."""
    return {
        "gathers": micro_batches * (2 * layers + 1),
        "reduces": micro_batches * (layers + 1),
        "tensor_gathers": 0,
        "tensor_reduces": 0,
        "small_gathers": 6,
        "sums": 1,
        "exchanges": 0,
        "micro_batches": micro_batches,
    }


def pass_cost(prompt: int, answers: list[int]) -> float:
    """Return the multiplications of a pass over a group.

    They are those of weights with each token, of the head with each action token, and of attention.
    """
    policy = model()
    head = policy.head_weight.numel()
    layers = sum(weight.numel() for _, weight in policy.named_weights() if weight.ndim == 2) - head
    pairs = prompt * (prompt + 1) / 2 + sum(answer * prompt + answer * (answer + 1) / 2 for answer in answers)
    attended = 2 * policy.num_layers * policy.heads.query_heads * policy.heads.width * pairs
    return layers * (prompt + sum(answers)) + head * sum(answers) + attended


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3_vl", {"tower": False}),
        ("qwen3_vl", {"tower": True}),
        ("gemma4", {"tower": True}),
        ("smolvlm", {"tower": True, "rank": 4, "targets": ("q_proj", "vision_model.*.q_proj")}),
    ],
)
def test_a_rank_without_images_takes_part(two: ProcessCrew, family: str, options: dict[str, Any]) -> None:
    """One group has images and one has none, so a rank sees none; in one of two sizes of micro-batches, some frames
    have images and others have none on any rank."""
    rows = VisionRows(family)
    halves = rows.batch.select([*range(2 * ANSWERS), *range(3 * ANSWERS, 4 * ANSWERS)])
    shown = [bool(halves.select(part).images) for part in partition_rollouts(halves, 2)]
    assert sorted(shown) == [False, True]
    for tokens in (10_000, 60):
        start: dict[str, Any] = {
            "policy": partial(seeing_policy, where=rows.where, **options),
            "pixels": partial(PixelCache.load, rows.where),
            "max_tokens_per_micro_batch": tokens,
        }
        rank = RankPolicy()
        one = LocalCrew(rank)
        one.call(RankPolicy.start, **start)
        two.call(RankPolicy.start, engine="fsdp", **start)
        for crew in (one, two):
            annotated = crew.call(RankPolicy.annotate, halves, frozenset({"old_logp"}))
            crew.call(RankPolicy.supervised_update, annotated)
        expected, gradient = one.call(RankPolicy.gradient), two.call(RankPolicy.gradient)
        tower = rank.learner.model.tower_weights.keys()
        assert expected.keys() == gradient.keys() and bool(expected.keys() & tower) is options["tower"]
        for name, exact in expected.items():
            torch.testing.assert_close(gradient[name], exact, rtol=1e-5, atol=1e-7, msg=name)
        assert weight_difference(one, two) < 5e-5


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "smolvlm", "gemma4"])
def test_a_vision_model_is_read_in_shards(two: ProcessCrew, family: str) -> None:
    """The sharded model passes the check with an image, and its tower's weights are found block by block."""
    expected = dict(load_vlm(make_vlm(family)).named_weights())
    assert all(weights_equal(weights, expected) for weights in two.call(RankPolicy.load_weights, make_vlm(family)))
