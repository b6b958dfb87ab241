"""Packed rows with images have the log-probs and the gradients of transformers' own forward pass, row by row.

Each control is a mistake that such code can make. It must change log-probs by far more than rounding does, or the
comparison would not find it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, Final

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.batch import Batch, Pack
from etude.data.pack import pack_prefix_tree
from etude.images import image_digest
from etude.models import Model
from etude.models import vision as model_vision
from etude.models.vision import Features, axes_positions
from etude.train import images as train_images
from etude.train.forward import ForwardPass
from tests.vision_rows import PROMPTS, VisionRows, png
from tests.vlms import QWEN, TILED, load_vlm

FAMILIES: Final = (*QWEN, *TILED, "gemma3", "gemma4", "gemma4_large")
LOGP_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4
"""The largest differences in float32: of a log-prob, and of a gradient relative to the weight's largest one."""
STATES_TOLERANCE = 1e-3
"""The same for a gradient of a layer with states, which adds up rounding over all tokens."""
LEAST_CONTROL = 0.05
"""The least change of a log-prob that a mistake makes."""


@cache
def rows_of(family: str) -> VisionRows:
    return VisionRows(family)


def logp(model: Model, rows: VisionRows, batch: Batch | None = None, pack: Any = pack_prefix_tree) -> Tensor:
    """[N]: compute the log-prob of each action token, all rows in one pass."""
    batch = batch or rows.batch
    forward = ForwardPass(model, pack, 1.0, pixels=rows.pixels())
    return forward(batch, frozenset({"logp"})).columns["logp"][batch.action]


def gradients(module: Any, logp: Tensor) -> dict[str, Tensor]:
    (torch.linspace(-1, 1, len(logp), dtype=logp.dtype) * logp).sum().backward()
    return {name: weight.grad for name, weight in module.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_gradients_are_those_of_transformers(family: str) -> None:
    rows = rows_of(family)
    model, reference = load_vlm(rows.where), rows.reference(torch.float32)
    ours, theirs = logp(model, rows), rows.reference_logp(reference)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=LOGP_TOLERANCE)
    of_ours, of_theirs = gradients(model.module, ours), gradients(reference, theirs)
    for name, expected in of_theirs.items():
        scale = max(float(expected.abs().max()), 1e-3)
        difference = of_ours.get(name, torch.zeros_like(expected)) - expected
        tolerance = STATES_TOLERANCE if ".linear_attn." in name else GRADIENT_TOLERANCE
        assert float(difference.abs().max()) <= tolerance * scale, name
    assert of_theirs.keys() & model.tower_weights.keys() == of_ours.keys() & model.tower_weights.keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_equal_rows_alone(family: str) -> None:
    rows = rows_of(family)
    model = load_vlm(rows.where)
    with torch.no_grad():
        alone = torch.cat([logp(model, rows, rows.batch.select([index])) for index in range(rows.batch.num_rollouts)])
        torch.testing.assert_close(logp(model, rows), alone, rtol=0, atol=LOGP_TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_mistake_changes_log_probs(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(family)
    model = load_vlm(rows.where)
    assert rows.batch.image is not None
    with torch.no_grad():
        right = logp(model, rows)

        def change(name: str, batch: Batch | None = None, pack: Any = pack_prefix_tree) -> None:
            off = float((logp(model, rows, batch, pack) - right).abs().max())
            assert off > LEAST_CONTROL, f"{name}: {off}"

        image = rows.batch.image
        digests = [each.digest for each in rows.batch.images]
        first, last = (digests.index(image_digest(png(PROMPTS[prompt][2][0]))) for prompt in (0, 1))
        swapped = torch.where((image == first) | (image == last), first + last - image, image)
        change("the images of two prompts swapped", rows.batch.replace(image=swapped))
        change("no features at all", pack=lambda batch: replace(pack_prefix_tree(batch), images=None))
        change("prompts of equal ids merged", pack=merged_prompts)
        if family in QWEN:
            monkeypatch.setattr(train_images, "axes_positions", count_tokens)
            change("positions that count tokens")
            monkeypatch.undo()
        if model.image_attention != "causal":
            monkeypatch.setattr(train_images, "split_images", lambda pack, _: pack)
            change("images attended to as text is")
            monkeypatch.undo()
        if family == "qwen3_vl":
            encode = model_vision.VisionBackbone.encode
            monkeypatch.setattr(model_vision.VisionBackbone, "encode", lambda *of: Features(encode(*of).main))
            change("only the first level of features")


def merged_prompts(batch: Batch) -> Pack:
    """Pack rows by their ids alone, as if equal ids were equal prompts."""
    pack = pack_prefix_tree(batch.replace(image=None, feature=None, images=()))
    kept = pack_prefix_tree(batch)
    assert kept.images is not None and batch.image is not None and batch.feature is not None
    assert len(pack.ids) < len(kept.ids)
    places = pack.places(batch.offsets)
    first = torch.full((len(pack.ids),), batch.num_tokens).scatter_reduce(
        0, places, torch.arange(batch.num_tokens), "amin"
    )
    return replace(pack, images=replace(kept.images, image=batch.image[first], feature=batch.feature[first]))


def count_tokens(
    image: NDArray[np.integer], _feature: object, _grids: object, offsets: list[int], parent: list[int]
) -> NDArray[np.int64]:
    """Return positions that count an image's tokens as those of text."""
    none = np.full_like(image, -1)
    return axes_positions(none, none, [], offsets, parent)
