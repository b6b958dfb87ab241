"""Images of prompts: bytes with a hash, and the tokens that take their features.

spans        an image by its hash, the places of its tokens in a prompt, and ids that tell images apart
"""

from __future__ import annotations

from etude.images.spans import ImageRef, ImageSpan, PromptImages, check_spans, image_digest, keyed_ids

__all__ = ["ImageRef", "ImageSpan", "PromptImages", "check_spans", "image_digest", "keyed_ids"]
