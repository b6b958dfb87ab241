"""Rows with images, as a run of a vision-language model has them, and the same rows by transformers' own model.

Four prompts have three answers each: one picture, the same ids with another picture, two pictures, none. The first two
are in one group, so that their rows are apart only because of the picture. The last answer to a prompt with pictures is
followed by a tool's answer with one more, and by a second answer.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from etude.batch import Batch
from etude.images import ImageSpan, image_digest, read_image_layout
from etude.images.pixel_cache import PixelCache
from etude.records import Rollout, Sample
from tests.vlms import QWEN, make_vlm, picture

WRAPPED: Final = {
    "smolvlm": "<image>",
    "idefics3": "<image>",
    "gemma3": "<start_of_image>",
    "gemma4": "<|image|>",
    "gemma4_large": "<|image|>",
}
"""The text that a template writes for an image, by family; `QWEN_IMAGE` for others."""
QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
Picture = tuple[int, int, int]
"""A seed, a width and a height."""
PROMPTS: Final[tuple[tuple[int, str, tuple[Picture, ...]], ...]] = (
    (0, "user\nHow many red squares? {}\nassistant\n", ((0, 50, 40),)),
    (0, "user\nHow many red squares? {}\nassistant\n", ((3, 50, 40),)),
    (1, "look {} at two {}\n", ((1, 30, 90), (2, 64, 64))),
    (2, "user\nno picture here\n", ()),
)
"""The group, the text and the pictures of each prompt."""
CROPPED: Final = (7, 33, 47)
"""The picture that a tool shows."""
ANSWERS = 3


def png(shown: Picture) -> bytes:
    """Return a picture as a file."""
    file = io.BytesIO()
    picture(*shown).save(file, "PNG")
    return file.getvalue()


@dataclass
class Row:
    """A row under construction."""

    ids: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    action: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    spans: tuple[ImageSpan, ...] = ()
    pictures: tuple[Picture, ...] = ()

    def extended(self, ids: NDArray[np.int32], *, action: bool) -> Row:
        """Return the row with more tokens of text."""
        actions = np.full(len(ids), action)
        return Row(np.concatenate([self.ids, ids]), np.concatenate([self.action, actions]), self.spans, self.pictures)


class VisionRows:
    """The rows of a family: a batch, and each row for transformers."""

    def __init__(self, family: str) -> None:
        self.family = family
        self.where = make_vlm(family)
        layout = read_image_layout(self.where)
        assert layout is not None
        self.layout = layout
        self.tokenizer: Any = AutoTokenizer.from_pretrained(self.where)
        self.image_id: Any = self.tokenizer.convert_tokens_to_ids(layout.image_token)
        self.rows: list[Row] = []
        records: list[Rollout] = []
        rng = np.random.default_rng(0)
        for group, text, pictures in PROMPTS:
            prompt = self._shown(Row(), text, pictures)
            for answer in range(ANSWERS):
                row = prompt.extended(rng.integers(0, 256, rng.integers(3, 9), dtype=np.int32), action=True)
                if answer == ANSWERS - 1 and pictures:
                    row = self._shown(row, "\ncropped {} and now?", (CROPPED,))
                    row = row.extended(rng.integers(0, 256, 4, dtype=np.int32), action=True)
                records.append(Rollout(len(records), group, group, float(rng.normal())))
                self.rows.append(row)
        shown = {each for row in self.rows for each in row.pictures}
        self.contents = {image_digest(content): content for content in map(png, sorted(shown))}
        self.batch = Batch.from_records(
            [_sample(row, index) for index, row in enumerate(self.rows)], records, images=self.contents
        )

    def pixels(self) -> PixelCache:
        """Return a new cache of the pixels of this family."""
        return PixelCache.load(self.where)

    def reference(self, dtype: torch.dtype) -> Any:
        """Return transformers' own model of the same weights."""
        model = AutoModelForImageTextToText.from_pretrained(self.where, dtype=dtype, attn_implementation="sdpa")
        return model.eval()

    def reference_logp(self, module: Any) -> Tensor:
        """[N]: compute the log-prob of each action token by transformers, row by row, with its own processor."""
        return torch.cat([self._logp_of(module, row) for row in self.rows])

    def _logp_of(self, module: Any, row: Row) -> Tensor:
        ids = torch.from_numpy(row.ids).long()[None]
        inputs: dict[str, Any] = {"input_ids": ids}
        if row.pictures:
            processor = AutoImageProcessor.from_pretrained(self.where, backend="pil")
            read = processor(images=[picture(*shown) for shown in row.pictures], return_tensors="pt")
            names = ("pixel_values", "image_grid_thw", "pixel_attention_mask", "image_position_ids")
            inputs |= {name: read[name] for name in names if name in read}
        if self.family in (*QWEN, "gemma4_large"):
            inputs["mm_token_type_ids"] = (ids == self.image_id).int()
        elif self.family == "gemma3":
            inputs["token_type_ids"] = (ids == self.image_id).long()
        logits = module(**inputs, use_cache=False).logits[0]
        at = torch.from_numpy(np.flatnonzero(row.action))
        logp: Tensor = logits[at - 1].log_softmax(-1).gather(1, ids[0, at, None])[:, 0]
        return logp

    def _shown(self, row: Row, text: str, pictures: tuple[Picture, ...]) -> Row:
        """Return a row with more text in which pictures take the places of `{}`."""
        placeholder = self.layout.placeholder
        expanded = [
            WRAPPED.get(self.family, QWEN_IMAGE).replace(placeholder, self.layout.expand(width, height))
            for _, width, height in pictures
        ]
        ids = np.array(self.tokenizer.encode(text.format(*expanded), add_special_tokens=False), np.int32)
        longer = row.extended(ids, action=False)
        longer.spans += self._spans(ids, expanded, pictures, len(row.ids))
        longer.pictures += pictures
        return longer

    def _spans(
        self, ids: NDArray[np.int32], expanded: list[str], pictures: tuple[Picture, ...], start: int
    ) -> tuple[ImageSpan, ...]:
        places = iter(np.flatnonzero(ids == self.image_id).tolist())
        spans = list[ImageSpan]()
        for text, shown in zip(expanded, pictures, strict=True):
            digest = image_digest(png(shown))
            for feature in range(text.count(self.layout.image_token)):
                at = start + next(places)
                last = spans[-1] if spans else None
                if last is not None and (last.digest, last.stop) == (digest, at) and feature:
                    spans[-1] = ImageSpan(digest, last.start, at + 1, last.first)
                else:
                    spans.append(ImageSpan(digest, at, at + 1, feature))
        return tuple(spans)


def _sample(row: Row, rollout: int) -> Sample:
    zeros = np.zeros(len(row.ids), np.int32)
    logp = np.full(len(row.ids), -1, np.float32)
    return Sample(row.ids, row.action, logp, zeros, zeros, rollout, images=row.spans)
