"""Images for SGLang: one placeholder an image among our ids, and our decoded picture as PNG.

Over HTTP it takes no tensors, so the server computes the pixels, by the processor that Pillow runs, as ours are. It
replaces each placeholder by as many image tokens as it counts itself. Where it cannot, it tokenizes the prompt's text
anew, with no more than a warning. So the number of prompt tokens that it reports must be ours.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

from etude.errors import ConfigError, DataError, EngineError
from etude.images import ImageLayout, ImageSpan, PatchGrid
from etude.rollout.served_images import ImageSupport, ServedImages
from etude.rollout.server_client import HttpClient

PIL_PROCESSOR = ("--image-processor-backend", "pil")
"""The arguments with which SGLang prepares images by Pillow."""


def image_args(support: ImageSupport, server_args: Sequence[str]) -> list[str]:
    """Return the arguments of a server that takes images. server_args: what the user adds to them."""
    if any(arg.startswith(PIL_PROCESSOR[0]) for arg in server_args):
        raise ConfigError(
            f"`rollout.server_args` has SGLang prepare images in another way than Etude's trainer. Leave "
            f"`{PIL_PROCESSOR[0]}` out."
        )
    return [*PIL_PROCESSOR, "--limit-mm-data-per-request", json.dumps({"image": support.options.max_images})]


def image_refusal(layout: ImageLayout) -> str:
    """Return the sentence that refuses images of this layout; empty if they are sent."""
    if isinstance(layout, PatchGrid):
        return ""
    return (
        "Images are sent to SGLang for Qwen2-VL, Qwen2.5-VL and Qwen3-VL, and this model is of another family. Choose "
        "`rollout=embedded`."
    )


async def check_server(client: HttpClient) -> None:
    """Refuse a server that prepares images in another way."""
    info = json.loads(await client.get("/server_info"))
    if info.get("image_processor_backend") != "pil" and not info.get("disable_fast_image_processor"):
        raise ConfigError(
            f"The SGLang server at {client.url} resizes images in another way than Etude's trainer, so their features "
            f"would differ. Start it with `{' '.join(PIL_PROCESSOR)}`."
        )


def describe_images(prompt: Sequence[int], images: ServedImages) -> dict[str, Any]:
    """Return the fields of a request that has these images in its prompt."""
    if images.support.options.trains_tower:
        raise ConfigError(
            "`vision.train=true` changes the features of images, and SGLang keeps them by their pixels alone. Set "
            "`vision.train=false`, or choose `rollout=vllm` or `rollout=embedded`."
        )
    resized = images.resize_all()
    if any(span.stop - span.start != resized[span.digest].features for span in images.spans):
        raise DataError("SGLang takes an image's features in one run, and the prompt has them in several.")
    contents = images.prompt.contents
    pngs = {digest: images.support.pixels.as_png(digest, contents[digest]) for digest in resized}
    return {
        "input_ids": collapse(prompt, images.spans),
        "image_data": [base64.b64encode(pngs[span.digest]).decode() for span in images.spans],
    }


def collapse(prompt: Sequence[int], spans: Sequence[ImageSpan]) -> list[int]:
    """Return the ids with one token for each image. Raises if another token would be taken for an image's."""
    placeholder = prompt[spans[0].start]
    kept: list[int] = []
    end = 0
    for span in spans:
        kept += prompt[end : span.start + 1]
        end = span.stop
    kept += prompt[end:]
    if kept.count(placeholder) != len(spans):
        raise DataError(
            f"The prompt has the token {placeholder}, which stands for an image, and there is none at its place: the "
            f"policy has sampled it. SGLang cannot take such a prompt. Choose `rollout=vllm` or `rollout=embedded`."
        )
    return kept


def check_count(meta: Mapping[str, Any], wanted: int) -> None:
    """Refuse an answer to a prompt that the server has read in another way."""
    if meta.get("prompt_tokens") != wanted:
        raise EngineError(
            f"SGLang answered to a prompt of {meta.get('prompt_tokens')} tokens, and {wanted} were meant: it has "
            f"tokenized the text anew, or counted an image otherwise. Compare its version and its processor."
        )
