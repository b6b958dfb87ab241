"""Ranks that hold their rows of the weights alone learn what ranks do that hold them whole, bit for bit."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from etude.checkpoint import CheckpointManager
from etude.data.partition import partition_rollouts
from etude.dispatch import CrewConfig
from etude.dispatch.process_crew import ProcessCrew
from etude.errors import ConfigError, TrainingError
from etude.models import Model
from etude.train import MeshConfig
from tests.recipes.ranked import RankPolicy
from tests.recipes.test_ranks import EVERYTHING, alone, apart, practised, same
from tests.train.tasks import model, rollouts

pytestmark = pytest.mark.xdist_group("divided")  # what its tests share takes long to make

TENSOR, BOTH = MeshConfig(tensor=2), MeshConfig(tensor=2, sequence=2)
LEARNERS: dict[str, dict[str, Any]] = {
    "everything": {"algorithm": EVERYTHING, "epochs": 2, "max_tokens_per_micro_batch": 60},
    "float32": {"precision": "fp32", "max_tokens_per_micro_batch": 60},
    "half precision, and activations made twice": {"precision": "bf16", "activation_checkpointing": True},
    "biases": {"policy": partial(model, family="qwen2")},
    "another family's own layers": {"policy": partial(model, family="gpt2"), "activation_checkpointing": True},
    "a head of its own": {"policy": partial(model, tie_word_embeddings=False)},
}
SHAPES: dict[str, tuple[int, MeshConfig | None]] = {
    "2": (2, None),
    "4": (4, None),
    "tp2 x dp2": (4, TENSOR),
    "tp2 x sp2": (4, BOTH),
}
SHORT = [("2", learner) for learner in LEARNERS if learner not in ("biases", "a head of its own")]
SHORT += [("tp2 x dp2", "everything")]
EVERY = [
    pytest.param(shape, learner, marks=() if (shape, learner) in SHORT else pytest.mark.soak)
    for shape, (_, mesh) in SHAPES.items()
    for learner in LEARNERS
    if mesh is None or "family" not in learner  # transformers' own layers are not cut
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


def begun(crews: dict[int, ProcessCrew], shape: str, **options: Any) -> ProcessCrew:
    """So many ranks, which begin anew."""
    ranks, mesh = SHAPES[shape]
    crew = crews[ranks]
    crew._repeats = 1 if mesh is None else mesh.size
    crew.call(RankPolicy.begin, mesh=mesh, **options)
    return crew


@pytest.mark.parametrize(("shape", "learner"), EVERY)
def test_steps_are_those_of_ranks_with_whole_weights_bit_for_bit(
    crews: dict[int, ProcessCrew], shape: str, learner: str
) -> None:
    """In every weight, and in what is measured on the way."""
    result, results = [], []
    for weights in ("whole", "divided"):
        crew = begun(crews, shape, weights=weights, **LEARNERS[learner])
        results.append(practised(crew, 3))
        result.append(crew.call(RankPolicy.weights))
    for each in (*result[0], *result[1]):
        assert same(result[0][0], each)
    for whole, divided in zip(*results, strict=True):
        assert whole.keys() == divided.keys()
        assert (divided["loss"], divided["grad_norm"]) == (whole["loss"], whole["grad_norm"])


def test_ranks_with_nothing_to_compute_bring_every_layer_all_the_same(crews: dict[int, ProcessCrew]) -> None:
    """Fewer groups than ranks, update batches with nothing for some of them, micro-batches without an action."""
    result = []
    for weights in ("whole", "divided"):
        crew = begun(crews, "4", weights=weights, algorithm=EVERYTHING, max_tokens_per_micro_batch=1)
        practised(crew, 2, groups=1, updates=3)
        crew.call(
            RankPolicy.update, [crew.call(RankPolicy.ready, rollouts().select(torch.tensor([0, 1, 2, 3, 4, 5, 8])))]
        )
        for seen in (1, 0):
            crew.call(RankPolicy.imitate, rollouts(), seen=seen)
        result.append(crew.call(RankPolicy.weights))
    for each in (*result[0], *result[1]):
        assert same(result[0][0], each)


def test_weights_are_whole_for_an_engine_and_divided_again_for_the_next_update(crews: dict[int, ProcessCrew]) -> None:
    result, results = [], []
    for weights in ("whole", "divided"):
        crew = begun(crews, "2", weights=weights, precision="bf16")
        for step in range(2):
            assert all(crew.call(RankPolicy.assembled))
            results.append(practised(crew, 1, first=step)[0]["loss"])
        result.append(crew.call(RankPolicy.weights)[0])
    assert same(*result) and results[:2] == results[2:]


def test_an_engine_that_shares_them_rests_from_an_update_until_they_are_published(
    crews: dict[int, ProcessCrew],
) -> None:
    """Whatever it still computes when the update begins, and whatever it is asked for while that is made."""
    result = []
    for update in (RankPolicy.update, RankPolicy.disturbed):
        crew = begun(crews, "2", weights="divided", precision="fp32")
        metrics = crew.call(update, [crew.call(RankPolicy.ready, rollouts())]).reduce()
        result.append((metrics["loss"], crew.call(RankPolicy.weights)[0]))
    assert metrics["met"] == 0 and metrics["late_version"] == 2
    assert result[0][0] == result[1][0] and same(result[0][1], result[1][1])


def test_only_the_working_ranks_compute_with_divided_weights(crews: dict[int, ProcessCrew]) -> None:
    crew = begun(crews, "2", weights="divided", precision="fp32")
    assert all("Publish them first, and sample then." in message for message in crew.call(RankPolicy.another))
    practised(crew, 1)


def test_an_engine_with_weights_of_its_own_is_brought_them_by_all_ranks_together(crews: dict[int, ProcessCrew]) -> None:
    """Also where that of another rank takes none."""
    crew = begun(crews, "2", weights="divided", precision="fp32")
    count = len(list(model("fp32").named_weights()))
    assert crew.call(RankPolicy.beside, odd=-1) == [("", True, count)] * 2
    refused, took = crew.call(RankPolicy.beside, odd=0)
    assert "Give both the same model." in refused[0] and refused[1:] == (False, count)
    assert took == ("", True, count)


def test_what_an_engine_had_whole_makes_room_before_the_optimizer_comes_home(crews: dict[int, ProcessCrew]) -> None:
    crew = begun(crews, "2", weights="divided", precision="bf16")
    crew.call(RankPolicy.rest)
    batch = crew.call(RankPolicy.ready, rollouts())
    assert all(crew.call(RankPolicy.assembled))
    crew.call(RankPolicy.update, [batch])
    assert all(sizes and all(sizes) for sizes in crew.call(RankPolicy.woken))


def test_a_pass_without_gradients_takes_one_micro_batch_after_the_other(crews: dict[int, ProcessCrew]) -> None:
    results = []
    for weights in ("whole", "divided"):
        crew = begun(crews, "2", weights=weights, max_tokens_per_micro_batch=20)
        results.append(crew.call(RankPolicy.ordered, rollouts(groups=4)).entropy)
    assert results[0] is not None and results[1] is not None
    assert torch.equal(results[0].nan_to_num(), results[1].nan_to_num())


def test_exchanges_before_an_update_are_not_of_it(crews: dict[int, ProcessCrew]) -> None:
    crew = begun(crews, "2", weights="divided")
    batch = crew.call(RankPolicy.ready, rollouts())
    crew.call(RankPolicy.waited, 1000.0)
    metrics = crew.call(RankPolicy.update, [batch]).reduce()
    assert 0 < metrics["exchange_seconds"] < metrics["update_seconds"]


def test_frozen_weights_stay_whole_and_as_they_are(crews: dict[int, ProcessCrew]) -> None:
    """Those that share a product with others too."""
    result = []
    for weights in ("whole", "divided"):
        crew = begun(crews, "2", weights=weights, policy=partly)
        before = crew.call(RankPolicy.weights)[0]
        practised(crew, 2)
        result.append(crew.call(RankPolicy.weights)[0])
        moved = {name for name, weight in result[-1].items() if not torch.equal(weight, before[name])}
        assert moved and not any(frozen in name for name in moved for frozen in ("embed_tokens", "q_proj"))
    assert same(*result)


def partly(precision: str) -> Model:
    """A policy of which some is frozen."""
    made = model(precision, layers=3)
    made.freeze(["embed_tokens", "q_proj", "layers.0"])
    return made


def test_a_failed_update_leaves_the_weights_as_they_were(crews: dict[int, ProcessCrew]) -> None:
    crew = begun(crews, "2", weights="divided")
    batch = crew.call(RankPolicy.ready, rollouts())
    before = crew.call(RankPolicy.weights)[0]
    broken = batch.replace(advantage=torch.where(batch.action, torch.tensor(1e308).double(), 0.0))
    with pytest.raises(TrainingError, match=r"not finite in \d+ weights"):
        crew.call(RankPolicy.update, [broken])
    assert same(crew.call(RankPolicy.weights)[0], before)
    crew.call(RankPolicy.update, [batch])


def test_a_checkpoint_is_one_of_whole_weights_and_of_any_number_of_ranks(
    crews: dict[int, ProcessCrew], tmp_path: Path
) -> None:
    crew = begun(crews, "2", weights="divided")
    practised(crew, 2)
    crew.call(RankPolicy.save, CheckpointManager(tmp_path), 2)
    four, one = begun(crews, "4", weights="divided"), alone()
    for other in (one, four):
        other.call(RankPolicy.resume, tmp_path)
        assert apart(crew, other) == 0
        practised(other, 1, first=2)
    practised(crew, 1, first=2)
    assert apart(crew, one) <= 1e-12 and apart(crew, four) <= 1e-12


def test_what_rests_elsewhere_is_kept_and_read_where_it_rests(crews: dict[int, ProcessCrew], tmp_path: Path) -> None:
    """As far as a processor shows it; that a GPU's memory does not rise by it has not been run."""
    crew = begun(crews, "2", weights="divided")
    assert crew.call(RankPolicy.named) == [True, True]
    practised(crew, 1)
    crew.call(RankPolicy.save, CheckpointManager(tmp_path), 1)
    other = begun(crews, "4", weights="divided")
    other.call(RankPolicy.rest)
    other.call(RankPolicy.resume, tmp_path)
    assert apart(crew, other) == 0
    practised(crew, 1, first=1), practised(other, 1, first=1)
    assert apart(crew, other) <= 1e-12


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="glibc's own count of memory is read")
@pytest.mark.parametrize("ranks", ["2", pytest.param("4", marks=pytest.mark.soak)])
def test_a_rank_keeps_its_rows_and_has_one_layer_at_a_time(crews: dict[int, ProcessCrew], ranks: str) -> None:
    """By what the C library has given out, between updates; and by the memory of weights, while they are used."""
    large = partial(model, hidden=256, layers=6)
    policy = large("fp32")
    sizes = {name: weight.nbytes for name, weight in policy.named_weights()}
    layers = [sum(sizes[name] for name in names) for names in policy.layer_weights()]
    whole, rows = sum(sizes.values()), sum(sizes.values()) / int(ranks)
    taken = []
    for weights in ("whole", "divided") * 2:
        crew = begun(crews, ranks, weights=weights, precision="fp32", policy=large)
        batch = crew.call(RankPolicy.ready, rollouts(groups=4))  # something for every rank
        crew.call(RankPolicy.update, [batch])
        taken.append(crew.call(RankPolicy.taken))
    for one, other in zip(*taken[2:], strict=True):  # the first time round, connections take memory too
        assert one - other == pytest.approx(whole - rows, rel=0.05)
    crew.call(RankPolicy.watch)
    crew.call(RankPolicy.update, [batch])
    assert set(crew.call(RankPolicy.watched)) == {(0, whole - sum(layers) + max(layers))}


def test_one_rank_has_nothing_to_divide() -> None:
    with pytest.raises(ConfigError, match=r"`train\.weights=divided` has each of several ranks.*and there is one"):
        alone(weights="divided")
