"""Images for vLLM: places, hashes and pixels of ours, so that the server has nothing of them to compute but features.

The server checks nothing of this: with a token too few for an image it answers with other tokens. So the counts are
compared here. An item is MessagePack, of which only the types that an item has are written.
"""

from __future__ import annotations

import base64
import json
import re
import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from etude.errors import ConfigError, DataError, EngineError
from etude.images import ImageLayout, PatchGrid, Tiles
from etude.rollout.served_images import ImageSupport, ServedImages
from etude.rollout.server_client import HttpClient, ServerUnreachableError

if TYPE_CHECKING:
    from etude.images.pixels import Pixels

PLAIN_PIXELS = "--no-mm-device-do-normalize"
"""The argument with which vLLM does not normalize pixels, which ours are already."""
_NORMALIZES = re.compile(r'"mm_device_do_normalize":\s*(\w+)')
_RAW = 3
"""The code of MessagePack's extension that holds the bytes of a tensor."""


def image_args(support: ImageSupport, server_args: Sequence[str]) -> list[str]:
    """Return the arguments of a server that takes images. server_args: what the user adds to them."""
    if any(arg.startswith("--mm-device-do-normalize") for arg in server_args):
        raise ConfigError(
            "`rollout.server_args` has the server normalize the pixels of images, and Etude sends normalized ones. "
            "Leave `--mm-device-do-normalize` out."
        )
    return [PLAIN_PIXELS, "--limit-mm-per-prompt", json.dumps({"image": support.options.max_images, "video": 0})]


def image_refusal(layout: ImageLayout) -> str:
    """Return the sentence that refuses images of this layout; empty if they are sent."""
    if isinstance(layout, PatchGrid):
        return ""
    if isinstance(layout, Tiles) and layout.splits:
        return (
            "vLLM takes an image's features in one run, and this processor cuts images into tiles. Choose "
            "`rollout=embedded`."
        )
    return (
        "Images are sent to vLLM for Qwen2-VL, Qwen2.5-VL and Qwen3-VL, and this model is of another family. Choose "
        "`rollout=embedded`."
    )


async def check_server(client: HttpClient) -> None:
    """Refuse a server that normalizes pixels itself: it would do so twice, and sample from another distribution."""
    try:
        found = _NORMALIZES.search(await client.get("/server_info?config_format=json"))
    except ServerUnreachableError:
        raise
    except EngineError as error:  # a server without pip cannot list its packages there, which it must
        raise ConfigError(
            f"{error} Etude reads there whether the server takes pixels as they are. Start it with "
            f"VLLM_SERVER_DEV_MODE=1, from an environment that has pip."
        ) from error
    if found is None or found[1] != "false":
        raise ConfigError(
            f"The server at {client.url} normalizes the pixels of images, and Etude sends normalized ones. Start it "
            f"with `{PLAIN_PIXELS}`."
        )


def describe_images(images: ServedImages, *, send_all: bool) -> tuple[dict[str, Any], bool]:
    """Return the field `features` of a request, and True if it leaves out pixels that the server was sent before.

    send_all: leave out none. Raises if an image has more or fewer features than tokens.
    """
    resized = images.resize_all()
    for span in images.spans:
        if span.stop - span.start != resized[span.digest].features:
            raise DataError("vLLM takes an image's features in one run, and the prompt has them in several.")
    omitted = {digest for digest in resized if images.key(digest) in images.sent and not send_all}
    compute = images.support.pixels.reader.compute
    items = {
        digest: _encode(compute(each), images.support.dtype)
        for digest, each in resized.items()
        if digest not in omitted
    }
    described = {
        "mm_hashes": {"image": [images.key(span.digest) for span in images.spans]},
        "mm_placeholders": {
            "image": [{"offset": span.start, "length": span.stop - span.start} for span in images.spans]
        },
        "kwargs_data": {"image": [items.get(span.digest) for span in images.spans]},
    }
    return described, bool(omitted)


def _encode(pixels: Pixels, dtype: str) -> str:
    """Return an item of Qwen's models: the patches of one image, and its grid."""
    patches = pixels.arrays["pixel_values"]
    grid = pixels.arrays["image_grid_thw"][0]
    item = {
        "pixel_values": {
            "data": _tensor(patches, dtype),
            "field": ["flat", {"slices": [[0, len(patches), None]], "dim": 0, "keep_on_cpu": False}],
        },
        "image_grid_thw": {"data": _tensor(grid, "int64"), "field": ["batched", {"keep_on_cpu": True}]},
    }
    return base64.b64encode(pack(item)).decode()


def _tensor(values: NDArray[Any], dtype: str) -> list[Any]:
    """Return a tensor as vLLM reads it: its type, its shape, and its bytes."""
    if dtype == "bfloat16":  # numpy has none: the upper half of a float32, rounded to the nearest even
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        stored: NDArray[Any] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    else:
        stored = np.ascontiguousarray(values, dtype)
    return [dtype, list(values.shape), stored.tobytes()]


def pack(value: bool | int | str | bytes | Sequence[Any] | Mapping[str, Any] | None) -> bytes:
    """Return a value as MessagePack, bytes as the extension of tensors."""
    match value:
        case None:
            return b"\xc0"
        case bool():
            return b"\xc3" if value else b"\xc2"
        case int():
            return struct.pack(">Bq", 0xD3, value)
        case str():
            text = value.encode()
            return struct.pack(">BI", 0xDB, len(text)) + text
        case bytes():
            return struct.pack(">BIB", 0xC9, len(value), _RAW) + value
        case Mapping():
            return struct.pack(">BI", 0xDF, len(value)) + b"".join(pack(k) + pack(v) for k, v in value.items())
        case _:
            return struct.pack(">BI", 0xDD, len(value)) + b"".join(map(pack, value))
