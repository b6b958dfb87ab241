"""The images of requests to servers, without a server: their encoding, and what is refused or left out."""

from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch

from etude.errors import ConfigError, DataError, EngineError
from etude.images import ImageSpan, PatchGrid, Tiles, read_image_layout
from etude.images.pixel_cache import PixelCache
from etude.images.pixels import PixelReader
from etude.rollout import SglangConfig, VllmConfig
from etude.rollout.served_images import MAX_SENT, ImageOptions, ImageSupport, SentImages, ServedImages
from etude.rollout.server_backend import LaunchSpec
from etude.rollout.sglang_images import check_count, collapse
from etude.rollout.vllm_images import describe_images, image_refusal
from tests.rollout.shown import png, shown_to
from tests.vlms import make_vlm


def support_of(dtype: str) -> ImageSupport:
    pixels = PixelCache(PixelReader.load(make_vlm("qwen3_vl")))
    return ImageSupport(pixels, dtype, ImageOptions(max_images=3), is_joined=False)


def decode(item: str) -> Any:
    """Return an item of vLLM, read by an own reader of MessagePack."""
    return msgpack.unpackb(base64.b64decode(item), ext_hook=lambda code, data: (code, data))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_an_image_is_sent_in_the_type_of_the_servers_weights(dtype: str) -> None:
    shown = shown_to("qwen3_vl")
    _, images = shown.prompt("look ", png(0, 50, 40), " at ", png(1, 30, 90), "\n")
    assert images is not None
    support = support_of(dtype)
    described, omits = describe_images(ServedImages(images, support, "", SentImages()), send_all=False)
    assert not omits and described["mm_hashes"]["image"] == [span.digest for span in images.spans]
    for span, item in zip(images.spans, described["kwargs_data"]["image"], strict=True):
        pixels = support.pixels.read(span.digest, images.contents[span.digest])
        sent = decode(item)
        kind, shape, (code, data) = sent["pixel_values"]["data"]
        patches = torch.from_numpy(np.array(pixels.arrays["pixel_values"]))
        wanted = patches.to(getattr(torch, dtype))
        assert (kind, code, shape) == (dtype, 3, list(patches.shape))
        assert torch.equal(torch.frombuffer(bytearray(data), dtype=wanted.dtype).view(shape), wanted)
        assert sent["pixel_values"]["field"][1]["slices"] == [[0, len(patches), None]]
        grid = sent["image_grid_thw"]["data"]
        assert grid[:2] == ["int64", [3]]
        assert np.frombuffer(grid[2][1], np.int64).tolist() == pixels.arrays["image_grid_thw"][0].tolist()


def test_a_trained_tower_has_its_pixels_sent_for_each_version() -> None:
    _, images = shown_to("qwen3_vl").prompt("look ", png(0, 50, 40))
    assert images is not None
    sent = SentImages()
    for weights, omitted in (("-1", False), ("-1", True), ("-2", False)):
        served = ServedImages(images, support_of("float32"), weights, sent)
        described, omits = describe_images(served, send_all=False)
        assert omits is omitted and (described["kwargs_data"]["image"] == [None]) is omitted
        sent.add(map(served.key, images.contents))
    sent.add(str(number) for number in range(MAX_SENT))
    assert served.key(images.spans[0].digest) not in sent


def test_servers_are_started_for_images_and_other_families_are_refused_in_sentences() -> None:
    backend = VllmConfig().create_backend()
    backend.images = support_of("float32")
    launch = LaunchSpec(VllmConfig(), Path("model"), Path("python"), "float32", "cpu")
    command = backend.command(launch)
    assert "--no-mm-device-do-normalize" in command and '{"image": 3, "video": 0}' in command
    again = LaunchSpec(
        VllmConfig(server_args=("--mm-device-do-normalize",)), Path("model"), Path("python"), "float32", "cpu"
    )
    with pytest.raises(ConfigError, match="Leave `--mm-device-do-normalize` out"):
        backend.command(again)
    tiles, fixed = (read_image_layout(make_vlm(family)) for family in ("smolvlm", "gemma3"))
    assert isinstance(tiles, Tiles) and fixed is not None
    assert "one run, and this processor cuts images into tiles" in image_refusal(tiles)
    assert "is of another family" in image_refusal(fixed)
    assert image_refusal(PatchGrid(28, 1, 9)) == ""
    sglang = SglangConfig().create_backend()
    assert sglang.image_refusal(PatchGrid(28, 1, 9)) == ""
    assert "is of another family" in sglang.image_refusal(tiles) and "is of another family" in sglang.image_refusal(
        fixed
    )
    sglang.images = support_of("float32")
    command = sglang.command(replace(launch, config=SglangConfig()))
    assert command[command.index("--image-processor-backend") + 1] == "pil"


def test_sglang_gets_one_token_for_each_image_and_its_count_is_compared() -> None:
    spans = [ImageSpan("00" * 32, 1, 4), ImageSpan("11" * 32, 4, 6)]
    assert collapse([5, 9, 9, 9, 9, 9, 6], spans) == [5, 9, 9, 6]
    with pytest.raises(DataError, match="the policy has sampled it"):
        collapse([5, 9, 9, 9, 9, 9, 6, 9], spans)
    check_count({"prompt_tokens": 9}, 9)
    with pytest.raises(EngineError, match="prompt of 7 tokens, and 9 were meant"):
        check_count({"prompt_tokens": 7}, 9)
