"""Prompts that show pictures to tiny vision-language models, and the log-probs of their answers by the model alone."""

from __future__ import annotations

import io
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from etude.batch import Pack, PackImages
from etude.chat import Tokenizer
from etude.images import ImageSpan, PromptImages, image_digest, read_image_layout
from etude.images.decoding import open_image
from etude.images.pixels import PixelReader
from etude.models import Model, PackedAttention
from etude.models.vision import PassImages, axes_positions, place_features
from etude.models.whole_images import split_images
from etude.records import Completion
from tests.vlms import load_vlm, make_vlm, picture

Ids: TypeAlias = NDArray[np.int32]
Part: TypeAlias = str | bytes | Ids
"""A part of a prompt: text, the bytes of an image, or ids."""


@cache
def png(seed: int, width: int, height: int) -> bytes:
    """Return a picture of noise as a file."""
    file = io.BytesIO()
    picture(seed, width, height).save(file, "PNG")
    return file.getvalue()


class Shown:
    """A tiny model, and what turns pictures into its tokens. Treat the model as read-only."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.model = load_vlm(self.directory)
        self.tokenizer = Tokenizer.load(self.directory)
        self.reader = PixelReader.load(self.directory)
        layout = read_image_layout(self.directory)
        image_id = None if layout is None else self.tokenizer.token_to_id(layout.image_token)
        assert layout is not None and image_id is not None
        self.layout = layout
        self.image_id: int = image_id

    def prompt(self, *parts: Part) -> tuple[Ids, PromptImages | None]:
        """Return the ids of a prompt and its images."""
        ids: list[int] = []
        spans: list[ImageSpan] = []
        contents: dict[str, bytes] = {}
        for part in parts:
            if not isinstance(part, bytes):
                ids += (self.tokenizer.encode(part) if isinstance(part, str) else part).tolist()
                continue
            digest = image_digest(part)
            contents[digest] = part
            image = open_image(part)
            own = self.tokenizer.encode(self.layout.expand(image.width, image.height))
            shown = np.concatenate([[False], own == self.image_id, [False]])
            first = 0
            for start, stop in np.flatnonzero(shown[1:] != shown[:-1]).reshape(-1, 2).tolist():
                spans.append(ImageSpan(digest, len(ids) + start, len(ids) + stop, first))
                first += stop - start
            ids += own.tolist()
        return np.array(ids, np.int32), PromptImages(tuple(spans), contents) if spans else None

    def logp(
        self, prompt: Ids, images: PromptImages | None, answer: Completion, model: Model | None = None
    ) -> NDArray[np.float32]:
        """Return the log-probs of an answer's tokens: one sequence, no cache, every image anew."""
        model = model or self.model
        ids = np.concatenate([prompt, answer.ids])
        pack = Pack(
            ids=torch.from_numpy(ids),
            positions=torch.arange(len(ids)),
            offsets=torch.tensor([0, len(ids)]),
            parent=torch.tensor([-1]),
            source=torch.arange(-1, len(ids) - 1),
        )
        positions = pack.positions
        shown = None
        if images is not None:
            digests = list(images.contents)
            image = np.full(len(ids), -1)
            feature = np.zeros(len(ids), np.int64)
            for span in images.spans:
                image[span.start : span.stop] = digests.index(span.digest)
                feature[span.start : span.stop] = np.arange(span.stop - span.start) + span.first
            pixels = [self.reader.read(open_image(content)) for content in images.contents.values()]
            grids = [each.grid for each in pixels if each.grid is not None]
            if grids:
                positions = torch.from_numpy(axes_positions(image, feature, grids))
            places = place_features(image, feature, [each.features for each in pixels])
            with torch.no_grad():
                shown = PassImages(model.encode_images(pixels), *(torch.from_numpy(each) for each in places))
            placed = PackImages(torch.from_numpy(image), torch.from_numpy(feature), ())
            pack = split_images(replace(pack, images=placed), model.image_attention)
        with torch.no_grad():
            hidden = model.hidden(pack.ids, positions, PackedAttention(pack), shown)[len(prompt) - 1 : -1]
            logp = model.logits(hidden).log_softmax(-1).gather(1, pack.ids[len(prompt) :, None].long())
        found: NDArray[np.float32] = logp[:, 0].numpy()
        return found


@cache
def shown_to(family: str) -> Shown:
    """Return a family's model once a process."""
    return Shown(make_vlm(family))
