"""Images of prompts: bytes with a hash, and the tokens that take their features.

spans        an image by its hash, the places of its tokens in a prompt, and ids that tell images apart
addresses    images as text: an address in the store, or a data URL
encoding     images of programs as data URLs
layouts      the tokens of an image in each family of models
decoding     encoded images: what may come in, and the one decoder
pixels       the arrays that a model's vision tower takes

The last two load Pillow, so they are imported by their own names.
"""

from __future__ import annotations

from etude.errors import ImageError
from etude.images.layouts import (
    FixedCount,
    ImageLayout,
    PatchBudget,
    PatchGrid,
    Tiles,
    read_image_layout,
    read_processor,
)
from etude.images.spans import (
    ImageRef,
    ImageSpan,
    PromptImages,
    check_features,
    check_spans,
    cut_spans,
    image_digest,
    keyed_ids,
)

__all__ = [
    "FixedCount",
    "ImageError",
    "ImageLayout",
    "ImageRef",
    "ImageSpan",
    "PatchBudget",
    "PatchGrid",
    "PromptImages",
    "Tiles",
    "check_features",
    "check_spans",
    "cut_spans",
    "image_digest",
    "keyed_ids",
    "read_image_layout",
    "read_processor",
]
