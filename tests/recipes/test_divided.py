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
from tests.recipes.ranked import Pupil
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
            made[ranks] = ProcessCrew(Pupil, ranks=ranks, share=partition_rollouts, logs=logs, config=config)
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
    crew.call(Pupil.begin, mesh=mesh, **options)
    return crew


@pytest.mark.parametrize(("shape", "learner"), EVERY)
def test_steps_are_those_of_ranks_with_whole_weights_bit_for_bit(
    crews: dict[int, ProcessCrew], shape: str, learner: str
) -> None:
    """In every weight, and in what is measured on the way."""
    found, told = [], []
    for weights in ("whole", "divided"):
        crew = begun(crews, shape, weights=weights, **LEARNERS[learner])
        told.append(practised(crew, 3))
        found.append(crew.call(Pupil.weights))
    for each in (*found[0], *found[1]):
        assert same(found[0][0], each)
    for whole, divided in zip(*told, strict=True):
        assert whole.keys() == divided.keys()
        assert (divided["loss"], divided["grad_norm"]) == (whole["loss"], whole["grad_norm"])


def test_ranks_with_nothing_to_compute_bring_every_layer_all_the_same(crews: dict[int, ProcessCrew]) -> None:
    """Fewer groups than ranks, update batches with nothing for some of them, micro-batches without an action."""
    found = []
    for weights in ("whole", "divided"):
        crew = begun(crews, "4", weights=weights, algorithm=EVERYTHING, max_tokens_per_micro_batch=1)
        practised(crew, 2, groups=1, updates=3)
        crew.call(Pupil.update, [crew.call(Pupil.ready, rollouts().select(torch.tensor([0, 1, 2, 3, 4, 5, 8])))])
        for seen in (1, 0):
            crew.call(Pupil.imitate, rollouts(), seen=seen)
        found.append(crew.call(Pupil.weights))
    for each in (*found[0], *found[1]):
        assert same(found[0][0], each)


def test_weights_are_whole_for_an_engine_and_divided_again_for_the_next_update(crews: dict[int, ProcessCrew]) -> None:
    found, told = [], []
    for weights in ("whole", "divided"):
        crew = begun(crews, "2", weights=weights, precision="bf16")
        for step in range(2):
            assert all(crew.call(Pupil.assembled))
            told.append(practised(crew, 1, first=step)[0]["loss"])
        found.append(crew.call(Pupil.weights)[0])
    assert same(*found) and told[:2] == told[2:]


def test_an_engine_that_shares_them_rests_from_an_update_until_they_are_published(
    crews: dict[int, ProcessCrew],
) -> None:
    """Whatever it still computes when the update begins, and whatever it is asked for while that is made."""
    found = []
    for update in (Pupil.update, Pupil.disturbed):
        crew = begun(crews, "2", weights="divided", precision="fp32")
        told = crew.call(update, [crew.call(Pupil.ready, rollouts())]).reduce()
        found.append((told["loss"], crew.call(Pupil.weights)[0]))
    assert told["met"] == 0 and told["late_version"] == 2
    assert found[0][0] == found[1][0] and same(found[0][1], found[1][1])


def test_nobody_but_who_plays_computes_with_divided_weights(crews: dict[int, ProcessCrew]) -> None:
    crew = begun(crews, "2", weights="divided", precision="fp32")
    assert all("Publish them first, and sample then." in told for told in crew.call(Pupil.another))
    practised(crew, 1)


def test_an_engine_with_weights_of_its_own_is_brought_them_by_all_ranks_together(crews: dict[int, ProcessCrew]) -> None:
    """Also where that of another rank takes none."""
    crew = begun(crews, "2", weights="divided", precision="fp32")
    count = len(list(model("fp32").named_weights()))
    assert crew.call(Pupil.beside, odd=-1) == [("", True, count)] * 2
    refused, took = crew.call(Pupil.beside, odd=0)
    assert "Give both the same model." in refused[0] and refused[1:] == (False, count)
    assert took == ("", True, count)


def test_what_an_engine_had_whole_makes_room_before_the_optimizer_comes_home(crews: dict[int, ProcessCrew]) -> None:
    crew = begun(crews, "2", weights="divided", precision="bf16")
    crew.call(Pupil.rest)
    batch = crew.call(Pupil.ready, rollouts())
    assert all(crew.call(Pupil.assembled))
    crew.call(Pupil.update, [batch])
    assert all(told and all(told) for told in crew.call(Pupil.woken))


def test_a_pass_without_gradients_takes_one_micro_batch_after_the_other(crews: dict[int, ProcessCrew]) -> None:
    told = []
    for weights in ("whole", "divided"):
        crew = begun(crews, "2", weights=weights, max_tokens_per_micro_batch=20)
        told.append(crew.call(Pupil.ordered, rollouts(groups=4)).entropy)
    assert told[0] is not None and told[1] is not None
    assert torch.equal(told[0].nan_to_num(), told[1].nan_to_num())


def test_exchanges_before_an_update_are_not_of_it(crews: dict[int, ProcessCrew]) -> None:
    crew = begun(crews, "2", weights="divided")
    batch = crew.call(Pupil.ready, rollouts())
    crew.call(Pupil.waited, 1000.0)
    told = crew.call(Pupil.update, [batch]).reduce()
    assert 0 < told["exchange_seconds"] < told["update_seconds"]


def test_frozen_weights_stay_whole_and_as_they_are(crews: dict[int, ProcessCrew]) -> None:
    """Those that share a product with others too."""
    found = []
    for weights in ("whole", "divided"):
        crew = begun(crews, "2", weights=weights, policy=partly)
        before = crew.call(Pupil.weights)[0]
        practised(crew, 2)
        found.append(crew.call(Pupil.weights)[0])
        moved = {name for name, weight in found[-1].items() if not torch.equal(weight, before[name])}
        assert moved and not any(frozen in name for name in moved for frozen in ("embed_tokens", "q_proj"))
    assert same(*found)


def partly(precision: str) -> Model:
    """A policy of which some is frozen."""
    made = model(precision, layers=3)
    made.freeze(["embed_tokens", "q_proj", "layers.0"])
    return made


def test_a_failed_update_leaves_the_weights_as_they_were(crews: dict[int, ProcessCrew]) -> None:
    crew = begun(crews, "2", weights="divided")
    batch = crew.call(Pupil.ready, rollouts())
    before = crew.call(Pupil.weights)[0]
    broken = batch.replace(advantage=torch.where(batch.action, torch.tensor(1e308).double(), 0.0))
    with pytest.raises(TrainingError, match=r"not finite in \d+ weights"):
        crew.call(Pupil.update, [broken])
    assert same(crew.call(Pupil.weights)[0], before)
    crew.call(Pupil.update, [batch])


def test_a_checkpoint_is_one_of_whole_weights_and_of_any_number_of_ranks(
    crews: dict[int, ProcessCrew], tmp_path: Path
) -> None:
    crew = begun(crews, "2", weights="divided")
    practised(crew, 2)
    crew.call(Pupil.save, CheckpointManager(tmp_path), 2)
    four, one = begun(crews, "4", weights="divided"), alone()
    for other in (one, four):
        other.call(Pupil.resume, tmp_path)
        assert apart(crew, other) == 0
        practised(other, 1, first=2)
    practised(crew, 1, first=2)
    assert apart(crew, one) <= 1e-12 and apart(crew, four) <= 1e-12


def test_what_rests_elsewhere_is_kept_and_read_where_it_rests(crews: dict[int, ProcessCrew], tmp_path: Path) -> None:
    """As far as a processor shows it; that a GPU's memory does not rise by it has not been run."""
    crew = begun(crews, "2", weights="divided")
    assert crew.call(Pupil.named) == [True, True]
    practised(crew, 1)
    crew.call(Pupil.save, CheckpointManager(tmp_path), 1)
    other = begun(crews, "4", weights="divided")
    other.call(Pupil.rest)
    other.call(Pupil.resume, tmp_path)
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
        batch = crew.call(Pupil.ready, rollouts(groups=4))  # something for every rank
        crew.call(Pupil.update, [batch])
        taken.append(crew.call(Pupil.taken))
    for one, other in zip(*taken[2:], strict=True):  # the first time round, connections take memory too
        assert one - other == pytest.approx(whole - rows, rel=0.05)
    crew.call(Pupil.watch)
    crew.call(Pupil.update, [batch])
    assert set(crew.call(Pupil.watched)) == {(0, whole - sum(layers) + max(layers))}


def test_one_rank_has_nothing_to_divide() -> None:
    with pytest.raises(ConfigError, match=r"`train\.weights=divided` has each of several ranks.*and there is one"):
        alone(weights="divided")
