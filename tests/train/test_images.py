"""A learner of rows with images: its pixels, its tower, and what it refuses."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from etude.algorithms import AlgorithmConfig
from etude.data.pack import pack_prefix_tree
from etude.errors import BatchError, ConfigError
from etude.images.pixel_cache import PixelCache
from etude.models import LoraAdapterConfig, Model
from etude.recipes.run.builders.policy import choose_trained
from etude.train import FrozenModel, Learner, TrainConfig
from etude.train.images import compute_hidden
from tests.components import require
from tests.train.tasks import Improve, gradient, ready, weights
from tests.train.tasks import model as text_model
from tests.vision_rows import VisionRows
from tests.vlms import load_vlm

FAMILY = "qwen3_vl"


@cache
def rows_of(family: str = FAMILY) -> VisionRows:
    return VisionRows(family)


def seeing(*, tower: bool, family: str = FAMILY, **lora: Any) -> Model:
    """Return the model of the rows, prepared as a run does."""
    model = load_vlm(rows_of(family).where, torch.float64)
    return choose_trained(model, LoraAdapterConfig(**lora), (), tower=tower, seed=0)


def updated(model: Model, **options: Any) -> Learner:
    """Return a learner that made one update."""
    rows, algorithm = rows_of(), AlgorithmConfig()
    settings = {"precision": "fp64", "learning_rate": 1e-2, "max_grad_norm": None, **options}
    trainer = Learner(model, TrainConfig(**settings), steps=10, pixels=rows.pixels())
    trainer.update(ready(trainer, algorithm, rows.batch), Improve(algorithm))
    return trainer


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, rtol=1e-5, atol=1e-7)  # norms of transformers are in float32


@pytest.mark.parametrize("tower", [False, True])
def test_the_gradient_does_not_depend_on_micro_batches(tower: bool) -> None:
    whole = updated(seeing(tower=tower))
    expected = gradient(whole)
    assert bool(expected.keys() & whole.model.tower_weights.keys()) is tower
    for options in ({"max_tokens_per_micro_batch": 150}, {"activation_checkpointing": "full"}):
        assert_equal(gradient(updated(seeing(tower=tower), **options)), expected)


def test_a_frozen_tower_keeps_its_weights_and_changes_no_other_gradient() -> None:
    frozen, trained = updated(seeing(tower=False)), updated(seeing(tower=True))
    assert_equal(gradient(trained), gradient(frozen))
    before = weights(Learner(seeing(tower=True), TrainConfig(precision="fp64")))
    tower = trained.model.tower_weights.keys()
    for trainer, moved in ((frozen, before.keys() - tower), (trained, before.keys())):
        changed = {name for name, weight in trainer.weights() if not torch.equal(weight, before[name])}
        assert moved - {"lm_head.weight"} >= changed >= {name for name in moved if name.endswith("proj.weight")}


def test_a_pass_encodes_each_image_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, model = rows_of(), seeing(tower=False)
    encoded: list[int] = []
    encode = model.encode_images

    def counted(pixels: Any) -> Any:
        encoded.append(len(pixels))
        features = encode(pixels)
        assert not features.main.requires_grad, "a frozen tower keeps no activations"
        return features

    monkeypatch.setattr(model, "encode_images", counted)
    pack = pack_prefix_tree(rows.batch)
    assert compute_hidden(model, pack, rows.pixels()).requires_grad and encoded == [len(rows.contents)]
    text = rows.batch.select([rows.batch.num_rollouts - 1])
    compute_hidden(model, pack_prefix_tree(text), rows.pixels())
    assert encoded == [len(rows.contents)], "rows without images leave the tower out"


def test_a_frozen_model_reads_images_too() -> None:
    rows = rows_of()
    reference = FrozenModel(seeing(tower=False), 150, pixels=rows.pixels())
    trainer = Learner(seeing(tower=False), TrainConfig(precision="fp64"), pixels=rows.pixels())
    expected = trainer.annotate(rows.batch, frozenset({"old_logp"})).old_logp
    torch.testing.assert_close(reference.logp(rows.batch), expected, equal_nan=True)


def test_rows_that_the_model_cannot_read_are_refused() -> None:
    rows = rows_of()
    pack = pack_prefix_tree(rows.batch)
    with pytest.raises(BatchError, match="show 5 images, and this model takes text alone"):
        compute_hidden(text_model(), pack, None)
    narrow = PixelCache.load(rows.where, max_pixels=32 * 32)
    with pytest.raises(BatchError, match=r"features here, and a row has a token for feature .* `vision.max_pixels`"):
        compute_hidden(seeing(tower=False), pack, narrow)


def test_adapters_train_the_parts_that_options_name() -> None:
    require("lora")
    text: dict[str, Any] = {"rank": 4, "targets": ("q_proj",)}
    trainer = updated(seeing(tower=False, **text))
    assert gradient(trainer) and not trainer.model.tower_weights.keys() & gradient(trainer).keys()
    both = updated(seeing(tower=True, rank=4, targets=("q_proj", "visual.blocks.0.*.qkv")))
    assert {".visual." in name for name in gradient(both)} == {True, False}
    with pytest.raises(ConfigError, match=r"`lora.targets` names layers of the vision tower, and the tower is not"):
        seeing(tower=False, rank=4, targets=("visual",))
    with pytest.raises(ConfigError, match=r"`vision.train=true` trains the vision tower, and with `lora` only"):
        seeing(tower=True, **text)
