"""Ranks that hold their rows of the weights alone learn what ranks do that hold them whole, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from etude.algorithms import Algorithm
from etude.checkpoint import Checkpoints
from etude.data.share import shares
from etude.dispatch import CrewConfig
from etude.dispatch.processes import ProcessCrew
from etude.errors import ConfigError, TrainingError
from etude.train import MeshConfig
from tests.recipes.ranked import Pupil, judge
from tests.recipes.test_ranks import EVERYTHING, alone, apart, practised, same
from tests.train.tasks import model, rollouts

TENSOR, BOTH = MeshConfig(tensor=2), MeshConfig(tensor=2, sequence=2)
LEARNERS: dict[str, dict[str, Any]] = {
    "everything": {"algorithm": EVERYTHING, "epochs": 2, "micro_tokens": 60},
    "float32": {"precision": "fp32", "micro_tokens": 60},
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
SHORT = [*(("2", learner) for learner in LEARNERS), ("tp2 x dp2", "everything"), ("4", "everything")]
EVERY = [
    pytest.param(shape, learner, marks=() if (shape, learner) in SHORT else pytest.mark.soak)
    for shape, (_, mesh) in SHAPES.items()
    for learner in LEARNERS
    if mesh is None or "family" not in learner
]


@pytest.fixture(scope="module")
def crews(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, ProcessCrew]]:
    """Of two ranks, and of four."""
    made: dict[int, ProcessCrew] = {}
    try:
        for ranks in (2, 4):
            logs, config = tmp_path_factory.mktemp("ranks"), CrewConfig(timeout=120)
            made[ranks] = ProcessCrew(Pupil, ranks=ranks, share=shares, logs=logs, config=config)
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
