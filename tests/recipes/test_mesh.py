"""Ranks that compute the same rollouts together learn what one learns: parts of layers, parts of sequences, both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from etude.algorithms import AlgorithmConfig
from etude.algorithms.kl import KLS
from etude.algorithms.losses.preference import RewardModelLoss
from etude.checkpoint import CheckpointManager
from etude.data.partition import partition_rollouts
from etude.dispatch import CrewConfig
from etude.dispatch.process_crew import ProcessCrew
from etude.errors import ConfigError
from etude.train import MeshConfig
from etude.train.shards import BUCKET
from tests.components import require
from tests.recipes.ranked import RankPolicy, adapted, judge
from tests.recipes.test_ranks import EVERYTHING, TIMES, alone, apart, practised, same
from tests.train.tasks import model, rollouts
from tests.train.test_scoring import pairs

pytestmark = pytest.mark.xdist_group("mesh")  # what its tests share takes long to make

TENSOR, SEQUENCE = MeshConfig(tensor=2), MeshConfig(sequence=2)
BOTH, TENSORS, SEQUENCES = MeshConfig(tensor=2, sequence=2), MeshConfig(tensor=4), MeshConfig(sequence=4)
SHAPES = {
    "tp2": (2, TENSOR),
    "sp2": (2, SEQUENCE),
    "tp2 x dp2": (4, TENSOR),
    "sp2 x dp2": (4, SEQUENCE),
    "tp2 x sp2": (4, BOTH),
    "tp4": (4, TENSORS),
    "sp4": (4, SEQUENCES),
    "dp2": (2, MeshConfig()),
}
"""tp4 and sp4 have fewer key heads than ranks."""
SMALL = 2048
"""Bytes of a bucket that holds less than most weights here, as the usual one holds less than those of real models."""
SPREAD = [shape for shape in SHAPES if "dp2" in shape]
LEARNERS: dict[str, dict[str, Any]] = {
    "everything": {"algorithm": EVERYTHING, "epochs": 2, "max_tokens_per_micro_batch": 60},
    "biases, and activations made twice": {"policy": partial(model, family="qwen2"), "activation_checkpointing": True},
    "windows": {"policy": partial(model, family="mistral", sliding_window=4)},
    "adapters, held to what they adapt": {
        "policy": adapted,
        "algorithm": AlgorithmConfig(kl=KLS["reverse"](coefficient=0.3)),
    },
    "whole distributions": {
        "algorithm": AlgorithmConfig(kl=KLS["full"](coefficient=0.3)),
        "max_tokens_per_micro_batch": 40,
    },
}
NEAR = 1e-10
SHORT = [
    *((shape, "everything") for shape in ("tp2", "sp2", "tp2 x dp2", "sp2 x dp2", "tp2 x sp2")),
    *(("tp2 x sp2", learner) for learner in LEARNERS if learner != "everything"),
]
EVERY = [
    pytest.param(shape, learner, marks=() if (shape, learner) in SHORT else pytest.mark.soak)
    for shape in SHAPES
    for learner in LEARNERS
]


@pytest.fixture(scope="module")
def crews(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, ProcessCrew]]:
    """Of two ranks, and of four."""
    made: dict[int, ProcessCrew] = {}
    try:
        for ranks in (2, 4):
            logs, config = tmp_path_factory.mktemp("ranks"), CrewConfig(timeout=120)
            made[ranks] = ProcessCrew(RankPolicy, ranks=ranks, share=partition_rollouts, logs=logs, config=config)
        yield made
    finally:
        for crew in made.values():
            with closing(crew):
                pass


def meshed(crews: dict[int, ProcessCrew], shape: str, **options: Any) -> ProcessCrew:
    """So many ranks, which begin anew as such a mesh."""
    ranks, mesh = SHAPES[shape]
    crew = crews[ranks]
    crew._repeats = mesh.size
    crew.call(RankPolicy.begin, mesh=mesh, **options)
    return crew


@pytest.mark.parametrize(
    ("shape", "bucket"), [*((shape, BUCKET) for shape in [*SHAPES][:5]), *((shape, SMALL) for shape in SPREAD)]
)
def test_a_gradient_is_that_of_one_rank(crews: dict[int, ProcessCrew], shape: str, bucket: int) -> None:
    """And its norm, clipped or not."""
    for max_grad_norm in (None, 1e-3):
        one, many = alone(max_grad_norm=max_grad_norm), meshed(crews, shape, max_grad_norm=max_grad_norm, bucket=bucket)
        results = []
        for crew in (one, many):
            batch = crew.call(RankPolicy.ready, rollouts())
            results.append(crew.call(RankPolicy.update, [batch]).reduce())
        wanted, result = one.call(RankPolicy.gradient), many.call(RankPolicy.gradient)
        assert wanted.keys() == result.keys()
        for name, gradient in wanted.items():
            torch.testing.assert_close(result[name], gradient, rtol=0, atol=NEAR, msg=name)
        assert max(float(gradient.abs().max()) for gradient in wanted.values()) > 1e3 * NEAR
        assert results[1]["grad_norm"] == pytest.approx(results[0]["grad_norm"], rel=NEAR)
        assert results[1]["loss"] == pytest.approx(results[0]["loss"], abs=NEAR)


@pytest.mark.parametrize(("shape", "learner"), EVERY)
def test_some_steps_are_those_of_one_rank(crews: dict[int, ProcessCrew], shape: str, learner: str) -> None:
    """In loss, gradient norm and weights, and in every other number that is measured of the learning."""
    if "adapters" in learner:
        require("lora")
    one, many = alone(**LEARNERS[learner]), meshed(crews, shape, **LEARNERS[learner])
    agree(practised(one, 2), practised(many, 2), shape)
    assert apart(one, many) <= NEAR


def agree(wanted: list[dict[str, float]], found: list[dict[str, float]], shape: str) -> None:
    """What one rank measures of some steps, and what many do."""
    spread = {"imbalance"} if "dp2" in shape else set()
    for mine, theirs in zip(wanted, found, strict=True):
        assert mine.keys() | {"exchange_seconds"} | spread == theirs.keys()
        assert theirs["loss"] == pytest.approx(mine["loss"], abs=NEAR)
        assert theirs["grad_norm"] == pytest.approx(mine["grad_norm"], rel=1e-9)
        for name in mine.keys() - TIMES:  # what the sampler said is in float32 always
            assert theirs[name] == pytest.approx(mine[name], rel=1e-3, abs=1e-6), name
        assert theirs["exchange_seconds"] < theirs["update_seconds"]
        assert 0 <= theirs.get("imbalance", 0) < 1


@pytest.mark.parametrize(
    "shape", [pytest.param(shape, marks=pytest.mark.soak) if "sp2" in shape else shape for shape in SPREAD]
)
@pytest.mark.parametrize(
    "name", ["everything", pytest.param("biases, and activations made twice", marks=pytest.mark.soak)]
)
def test_many_small_buckets_bring_what_one_large_one_does(crews: dict[int, ProcessCrew], shape: str, name: str) -> None:
    """Weights are cut over buckets, which are sent while the backward pass exchanges activations too."""
    learner = LEARNERS[name]
    one, many = alone(**learner), meshed(crews, shape, bucket=SMALL, **learner)
    agree(practised(one, 5), practised(many, 5), shape)
    assert apart(one, many) <= NEAR
    for each in many.call(RankPolicy.buckets):
        assert each["all"] > 20 and each["cut"] > 10 and each["during"] > each["after"], each


def test_what_a_bucket_holds_changes_no_bit(crews: dict[int, ProcessCrew]) -> None:
    """Each number is added up in the same order; also where what is exchanged is wider than what is computed with."""
    weights = []
    for bucket in (SMALL, BUCKET):
        crew = meshed(crews, "dp2", precision="bf16", bucket=bucket, **LEARNERS["everything"])
        practised(crew, 1)
        weights.append(crew.call(RankPolicy.weights)[0])
    assert same(*weights)


@pytest.mark.parametrize("shape", ["tp2 x sp2", pytest.param("tp2 x dp2", marks=pytest.mark.soak)])
def test_scores_and_values_are_those_of_one_rank(crews: dict[int, ProcessCrew], shape: str) -> None:
    one, many = alone(policy=judge), meshed(crews, shape, policy=judge)
    batches = [crew.call(RankPolicy.tell, rollouts(), frozenset({"value", "final_value"})) for crew in (one, many)]
    for name in ("value", "final_value"):
        mine, theirs = (each.require(name) for each in batches)
        torch.testing.assert_close(theirs, mine, rtol=0, atol=NEAR, equal_nan=True)
    for crew in (one, many):
        crew.call(RankPolicy.imitate, pairs(), loss=RewardModelLoss())
    assert apart(one, many) <= NEAR


def test_a_micro_batch_of_a_few_tokens_leaves_some_ranks_without_any(crews: dict[int, ProcessCrew]) -> None:
    """One action among all, or none, and update batches with nothing for some of the blocks."""
    for shape in ("sp4", "tp2 x dp2"):
        one, many = alone(max_tokens_per_micro_batch=1), meshed(crews, shape, max_tokens_per_micro_batch=1)
        for crew in (one, many):
            practised(crew, 1, groups=1, updates=3)
            for seen in () if "dp2" in shape else (1, 0):
                crew.call(RankPolicy.imitate, rollouts(), seen=seen)
        assert apart(one, many) <= NEAR


def test_models_of_other_families_are_cut_along_the_sequence_alone(crews: dict[int, ProcessCrew]) -> None:
    for family, near in (("gemma2", 1e-5), ("gpt2", NEAR)):  # Gemma's norms compute in float32
        policy = partial(model, family=family)
        one, many = alone(policy=policy, max_grad_norm=None), meshed(crews, "sp2", policy=policy, max_grad_norm=None)
        for crew in (one, many):
            crew.call(RankPolicy.update, [crew.call(RankPolicy.ready, rollouts())])
        wanted, result = one.call(RankPolicy.gradient), many.call(RankPolicy.gradient)
        for name, gradient in wanted.items():
            torch.testing.assert_close(result[name], gradient, rtol=0, atol=near, msg=name)
    with pytest.raises(ConfigError, match=r"`mesh\.tensor=2` divides the layers of the Llama.* a gpt2 model"):
        meshed(crews, "tp2", policy=policy)


def test_a_checkpoint_of_one_mesh_is_one_of_any(crews: dict[int, ProcessCrew], tmp_path: Path) -> None:
    """And its weights are whole on every rank."""
    four = meshed(crews, "tp2 x sp2")
    practised(four, 2)
    four.call(RankPolicy.save, CheckpointManager(tmp_path), 2)
    one, two = alone(), meshed(crews, "sp2")
    for other in (one, two):
        other.call(RankPolicy.resume, tmp_path)
        assert apart(four, other) == 0
        practised(other, 1, first=2)
    practised(four, 1, first=2)
    assert apart(four, one) <= NEAR and apart(four, two) <= NEAR


def test_half_precision_and_the_same_bits_again(crews: dict[int, ProcessCrew]) -> None:
    weights = []
    for _ in range(2):
        four = meshed(crews, "tp2 x sp2", precision="bf16")
        practised(four, 2)
        each = four.call(RankPolicy.weights)
        assert all(same(each[0], other) for other in each)
        weights.append(each[0])
    assert same(*weights)
    one = alone("bf16")
    practised(one, 2)
    assert apart(one, four) < 0.1  # a weight moves by up to 0.04, and the sign of a small gradient is chance


@pytest.mark.parametrize(
    ("shape", "sizes", "told"),
    [
        ("tp2", {"heads": 3, "kv_heads": 3}, "3 query heads over 2 ranks are 1.5 each"),
        ("tp4", {"heads": 12, "kv_heads": 6}, "6 key heads over 4 ranks are 1.5 each.* such as 3"),
        ("tp4", {"intermediate": 30}, "an inner width of 30 over 4 ranks is 7.5 each.* such as 2"),
        ("sp4", {"heads": 6, "kv_heads": 3}, "the 6 over 4 ranks are 1.5 each.* such as 3"),
        ("tp2 x sp2", {"heads": 2}, "the 1 that `mesh.tensor=2` leaves each rank over 2 ranks are 0.5 each"),
    ],
)
def test_shapes_that_do_not_divide_are_refused_with_the_arithmetic(
    crews: dict[int, ProcessCrew], shape: str, sizes: dict[str, int], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        meshed(crews, shape, policy=partial(model, head_dim=8, **sizes))


def test_ranks_that_make_no_whole_meshes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"are 4 ranks to the same rollouts, and `ranks=6` is no multiple.*`ranks=4`"):
        BOTH.check_ranks(6)
    with pytest.raises(ConfigError, match=r"Set `ranks=2`"):
        TENSOR.check_ranks(1)
