"""Vision-language models of transformers: their parts, and their passes with images."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForImageTextToText

from etude.batch import Pack, PackImages
from etude.errors import BatchError, ConfigError
from etude.images.pixels import PixelReader, Pixels
from etude.models import Model, PackedAttention, create, load, tiny_config, verification
from etude.models.loading import copy_with_score_head
from etude.models.transformers_backbone import decoder_layers
from etude.models.vision import Features, PassImages, axes_positions, place_features
from etude.models.whole_images import split_images
from tests.models.packs import paths
from tests.vlms import FAMILIES, QWEN, TILED, load_vlm, make_vlm, picture, vlm_config

SEEING = (*QWEN, *TILED, "gemma4")
SIZES = ((50, 40), (30, 90), (64, 64))
"""Of three pictures."""


@pytest.mark.parametrize("family", FAMILIES)
def test_decoder_layers_are_those_of_the_text_part(family: str) -> None:
    with torch.device("meta"):
        module: Any = AutoModelForImageTextToText.from_config(vlm_config(family))
    lists = [part for part in module.modules() if isinstance(part, torch.nn.ModuleList) and len(part) == 3]
    assert len(lists) > 1, "the tower has as many layers"
    layers = set(decoder_layers(module, 3))
    names = [name for name, part in module.named_modules() if part in layers]
    assert len(names) == 3 and all(".text_model." in name or ".language_model." in name for name in names)


class Forest:
    """A pack of rows with images: segments of text (a number of tokens) and of pictures (their index)."""

    def __init__(self, family: str, segments: list[tuple[int, list[int | str]]], cut: int = 0) -> None:
        """segments: the parent of each, and its parts: a number of random tokens, or `image 0` for a picture.

        cut: the number of tokens that move from the end of the first segment to the beginning of its children.
        """
        reader = PixelReader.load(make_vlm(family))
        self.pixels = [reader.read(picture(seed, *size)) for seed, size in enumerate(SIZES)]
        self.image_id: int = vlm_config(family).image_token_id
        chance = np.random.default_rng(0)
        made = [self._segment(parts, chance) for _, parts in segments]
        parent = [above for above, _ in segments]
        if cut:
            root, made[0] = made[0], tuple(column[:-cut] for column in made[0])
            for child in (index for index, above in enumerate(parent) if above == 0):
                moved = (column[-cut:] for column in root)
                made[child] = tuple(np.concatenate(pair) for pair in zip(moved, made[child], strict=True))
        ids, self.image, self.feature = (np.concatenate(column) for column in zip(*made, strict=True))
        lengths = [len(own[0]) for own in made]
        ends: list[int] = []
        positions = []
        for above, length in zip(parent, lengths, strict=True):
            start = ends[above] if above >= 0 else 0
            positions.append(torch.arange(start, start + length))
            ends.append(start + length)
        self.pack = Pack(
            ids=torch.from_numpy(ids),
            positions=torch.cat(positions),
            offsets=torch.tensor([0, *lengths]).cumsum(0),
            parent=torch.tensor(parent),
            source=torch.arange(-1, len(ids) - 1),
        )

    def _segment(self, parts: list[int | str], chance: np.random.Generator) -> tuple[NDArray[np.int32], ...]:
        ids, image, feature = ([np.zeros(0, np.int32)] for _ in range(3))
        for part in parts:
            count = part if isinstance(part, int) else self.pixels[int(part[-1])].features
            if isinstance(part, int):
                ids.append(chance.integers(0, 256, count, dtype=np.int32))
                image.append(np.full(count, -1, np.int32))
            else:
                ids.append(np.full(count, self.image_id, np.int32))
                image.append(np.full(count, int(part[-1]), np.int32))
            feature.append(np.arange(count, dtype=np.int32))
        return tuple(map(np.concatenate, (ids, image, feature)))

    @property
    def positions(self) -> Tensor:
        grids = [each.grid for each in self.pixels if each.grid is not None]
        if not grids:
            return self.pack.positions
        offsets, parent = self.pack.offsets.tolist(), self.pack.parent.tolist()
        return torch.from_numpy(axes_positions(self.image, self.feature, grids, offsets, parent))

    def images(self, features: Features) -> PassImages:
        placed = place_features(self.image, self.feature, [each.features for each in self.pixels])
        return PassImages(features, *map(torch.from_numpy, placed))

    def hidden(self, model: Model, features: Features | None = None) -> Tensor:
        """[P, H]: by Etude, all rows in one pass."""
        images = self.images(features or model.encode_images(self.pixels))
        return model.hidden(self.pack.ids, self.positions, PackedAttention(self.pack), images)

    def rows(self) -> list[tuple[Tensor, dict[str, Tensor]]]:
        """Return the packed tokens of each row, and transformers' inputs for it."""
        return [(row, self._inputs(row)) for row in paths(self.pack)]

    def _inputs(self, row: Tensor) -> dict[str, Tensor]:
        ids, image = self.pack.ids[row].long()[None], self.image[row]
        shown = [self.pixels[index] for index in dict.fromkeys(image[image >= 0].tolist())]
        inputs = {"input_ids": ids, **({} if not shown else _joined(shown))}
        if "image_grid_thw" in inputs:
            inputs["mm_token_type_ids"] = (ids == self.image_id).int()
        return inputs


def _joined(pixels: list[Pixels]) -> dict[str, Tensor]:
    joined = {
        name: torch.from_numpy(np.concatenate([each.arrays[name] for each in pixels])) for name in pixels[0].arrays
    }
    in_tiles = "pixel_attention_mask" in joined
    return {name: array[None] for name, array in joined.items()} if in_tiles else joined


def forest(family: str, cut: int = 0) -> Forest:
    """A prompt with two answers, of which one goes on with another picture; a prompt of two pictures; a text."""
    segments: list[tuple[int, list[int | str]]] = [
        (-1, [5, "image 0", 3]),
        (0, [4]),
        (0, [6, "image 2", 2]),
        (-1, [2, "image 1", 1, "image 2", 4]),
        (-1, [7]),
    ]
    return Forest(family, segments, cut)


def reference(family: str) -> Any:
    """Return transformers' own model of the same weights."""
    return AutoModelForImageTextToText.from_pretrained(make_vlm(family), dtype=torch.float32).eval()


@pytest.mark.parametrize("family", QWEN)
@pytest.mark.parametrize("cut", [0, 8])
def test_tokens_of_an_image_have_the_positions_of_transformers(family: str, cut: int) -> None:
    rows = forest(family, cut)
    base = reference(family).model
    assert not cut or rows.feature[rows.pack.offsets[1]] > 0, "the children begin inside the image"
    for row, inputs in rows.rows():
        if "image_grid_thw" not in inputs:
            expected = torch.arange(len(row)).expand(3, -1)
        else:
            expected = base.get_rope_index(inputs["input_ids"], inputs["mm_token_type_ids"], inputs["image_grid_thw"])[
                0
            ][:, 0]
        assert torch.equal(rows.positions[:, row], expected)


@pytest.mark.parametrize("family", SEEING)
def test_a_pack_with_images_equals_its_rows_by_transformers(family: str) -> None:
    rows, theirs = forest(family, cut=8), reference(family)
    ours = rows.hidden(load_vlm(make_vlm(family)))
    for row, inputs in rows.rows():
        expected = theirs.model(**inputs, use_cache=False).last_hidden_state[0]
        torch.testing.assert_close(ours[row], expected, rtol=0, atol=2e-5)


def test_a_sampled_image_token_takes_no_feature() -> None:
    rows, model = forest("qwen3_vl"), load_vlm(make_vlm("qwen3_vl"))
    row = paths(rows.pack)[-1]
    assert rows.image[row].max() < 0
    before = rows.hidden(model)[row]
    rows.pack.ids[row[-1]] = rows.image_id
    after = rows.hidden(model)[row]
    assert torch.equal(after[:-1], before[:-1]) and not torch.equal(after[-1], before[-1])


def test_each_level_of_features_counts() -> None:
    rows, model = forest("qwen3_vl"), load_vlm(make_vlm("qwen3_vl"))
    features = model.encode_images(rows.pixels)
    assert len(features.deep) == 2
    alone = Features.joined([model.encode_images([each]) for each in rows.pixels])
    for whole, apart in zip(features.levels(), alone.levels(), strict=True):
        torch.testing.assert_close(whole, apart)
    assert not torch.allclose(rows.hidden(model, Features(features.main)), rows.hidden(model, features), atol=0.1)


@pytest.mark.parametrize("family", ["qwen3_vl", "smolvlm"])
def test_a_tower_that_is_computed_again_has_the_same_gradients(family: str) -> None:
    rows, model = forest(family), load_vlm(make_vlm(family))
    gradients = []
    for kind in ("none", "full"):
        model.activation_checkpointing = kind
        rows.hidden(model).square().sum().backward()
        gradients.append([weight.grad for weight in model.parameters()])
        model.module.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True) if a is not None)
    assert sum(weight is not None for weight in gradients[0]) > len(model.tower_weights)


def test_a_model_that_takes_features_in_another_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_vlm(make_vlm("qwen2_5_vl"))
    monkeypatch.setattr(verification, "axes_positions", lambda image, *_: np.arange(len(image)))
    with pytest.raises(ConfigError, match="puts images among its tokens in a way that Etude does not know"):
        model.verify()


def test_a_critic_of_a_model_that_is_used_for_text_too_takes_none() -> None:
    critic = load(make_vlm("gemma3"), dtype=torch.float32, head="value")
    assert critic.has_score_head and not critic.has_vision
    policy = load(make_vlm("gemma3"), dtype=torch.float32)
    assert policy.has_vision and policy.image_attention == "both ways"
    assert not copy_with_score_head(policy, torch.float32).has_vision


def test_an_image_that_attends_both_ways_is_whole() -> None:
    rows = forest("gemma3")
    shown = PackImages(torch.from_numpy(rows.image), torch.from_numpy(rows.feature), ())
    whole = split_images(replace(rows.pack, images=shown), "both ways")
    assert whole.parent.tolist() == [-1, 0, 1, 2, 2, 4, 5, -1, 7, 8, 9, 10, -1]
    assert whole.both_ways.nonzero()[:, 0].tolist() == [1, 5, 8, 10]
    assert split_images(rows.pack, "both ways") is rows.pack, "a pack without images"
    cut = forest("gemma3", cut=8)
    shown = PackImages(torch.from_numpy(cut.image), torch.from_numpy(cut.feature), ())
    with pytest.raises(BatchError, match="Segment 1 begins inside an image, and this model reads an image as a whole"):
        split_images(replace(cut.pack, images=shown), "both ways")


def test_a_vision_model_has_no_other_head() -> None:
    where = make_vlm("smolvlm")
    for head, sentence in (("value", "a critic of a vision-language model"), ("score", "A reward model that is")):
        with pytest.raises(ConfigError, match=sentence):
            load(where, dtype=torch.float32, head=head)
    with pytest.raises(ConfigError, match="a critic of a vision-language model"):
        copy_with_score_head(load_vlm(where), torch.float32)


def test_a_tower_is_loaded_on_request_where_the_text_part_is_a_model() -> None:
    where = make_vlm("qwen3_5")
    text, seeing = load(where, dtype=torch.float32), load_vlm(where)
    assert not text.has_vision and not text.tower_weights and seeing.has_vision
    weights = dict(seeing.named_weights())
    for name, weight in text.named_weights():
        assert torch.equal(weight, weights[name.replace("model.", "model.language_model.", 1)]), name
    assert copy_with_score_head(text, torch.float32).has_score_head


def test_only_weights_outside_of_the_text_part_and_the_head_are_a_tower() -> None:
    assert not create(tiny_config(50), seed=0).tower_weights
    for family in SEEING:
        model = load_vlm(make_vlm(family))
        text = {name for name, _ in model.named_weights()} - set(model.tower_weights)
        assert all(".language_model." in name or ".text_model." in name or "lm_head" in name for name in text)
        assert all(
            name.startswith(("model.visual.", "model.vision_", "model.connector.", "model.embed_vision."))
            for name in model.tower_weights
        )
