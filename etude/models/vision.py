"""Images in a pass: pixels become features, and features replace the embeddings of the tokens that take them.

    pixels of each image ──► vision tower ──► features [F, H]; of some towers (DeepStack) more for the first layers
    token ids ──► embeddings, of image tokens replaced ──► layers, with positions in time, rows and columns

The tower and the layers are transformers' own. Tokens take features by their places, never by their ids: a policy may
sample the id of an image token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from types import MethodType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from etude.images.layouts import TOWER_ON_REQUEST
from etude.images.pixels import Pixels
from etude.models.backbone import AttentionFn
from etude.models.checkpointing import checkpoint_layer
from etude.models.config import ActivationCheckpointing, Head
from etude.models.mixers import use_mixer
from etude.models.transformers_backbone import ATTENTION_NAME, TransformersBackbone, use_checkpointing
from etude.models.vision_types import BOTH_WAYS, BY_BUDGET, IN_TILES, ON_A_GRID, VISION_TYPES, ImageAttention

_tower_checkpointing: ContextVar[ActivationCheckpointing] = ContextVar("tower_checkpointing", default="none")


def takes_images(config: PreTrainedConfig, head: Head = "seeing") -> bool:
    """Return true if a model of this config with this head is computed with images."""
    kind = config.model_type
    return kind in VISION_TYPES and (head == "seeing" or kind not in TOWER_ON_REQUEST)


def image_attention(config: Any) -> ImageAttention:
    """Return how the tokens of an image attend to each other in a model that is computed with images."""
    if config.model_type in BOTH_WAYS:
        return "both ways"
    in_windows = config.model_type in BY_BUDGET and config.text_config.use_bidirectional_attention is not None
    return "in windows" if in_windows else "causal"


def attention_names(config: PreTrainedConfig, head: Head = "seeing") -> str | dict[str, str]:
    """Return transformers' names of the attention of each part of a model: Etude's for text, torch's in the tower."""
    if not takes_images(config, head):
        return ATTENTION_NAME
    return {"": ATTENTION_NAME, "text_config": ATTENTION_NAME, "vision_config": "sdpa"}


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """The features of images, end to end."""

    main: Tensor  # [F, H]: what replaces embeddings
    deep: tuple[Tensor, ...] = ()  # [F, H] each: what is added to the outputs of the first layers (DeepStack)

    @classmethod
    def joined(cls, parts: Sequence[Features]) -> Features:
        """Return the features of several images, or groups of them, end to end. parts: one or more."""
        deep = zip(*(part.deep for part in parts), strict=True)
        return cls(torch.cat([part.main for part in parts]), tuple(torch.cat(level) for level in deep))

    def levels(self) -> tuple[Tensor, ...]:
        """Return all tensors."""
        return (self.main, *self.deep)


@dataclass(frozen=True, slots=True, eq=False)
class PassImages:
    """The features of one pass, and the tokens that take them. Two tokens may take the same feature."""

    features: Features
    tokens: Tensor  # [N] int64, ascending: the tokens of the pass that take a feature
    rows: Tensor  # [N] int64: the row of `features` that each of them takes


def place_features(
    image: NDArray[np.integer], feature: NDArray[np.integer], counts: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """[P], [P] → [N], [N]: return `tokens` and `rows` of `PassImages`.

    image: each token's image, −1 for none. feature: its place among the image's features. counts: the number of
    features of each image, in the order in which they are end to end.
    """
    tokens = np.flatnonzero(image >= 0)
    starts = np.cumsum([0, *counts])
    return tokens, starts[image[tokens]] + feature[tokens].astype(np.int64)


def axes_positions(
    image: NDArray[np.integer],
    feature: NDArray[np.integer],
    grids: Sequence[tuple[int, int, int]],
    offsets: Sequence[int] | None = None,
    parent: Sequence[int] = (-1,),
) -> NDArray[np.int64]:
    """[P], [P] → [3, P]: return the time, row and column of each token.

    A text token counts on from the largest position before it. An image begins there, its tokens have their own times,
    rows and columns, and the token after it counts on from its longer side.

    image, feature: as for `place_features`. grids: the times, rows and columns of each image. offsets, parent: the
    segments of a pack, parents first; one sequence by default. A segment may begin or end within an image.
    """
    bounds = [0, len(image)] if offsets is None else list(offsets)
    axes = np.empty((3, len(image)), np.int64)
    cut = np.ones(len(image) + 1, np.bool_)
    cut[1:-1] = (image[1:] != image[:-1]) | ((image[1:] >= 0) & (feature[1:] != feature[:-1] + 1))
    cut[bounds] = True
    ends: list[int] = []
    for segment, above in enumerate(parent):
        position = ends[above] if above >= 0 else 0
        for start, stop in _runs(cut, bounds[segment], bounds[segment + 1]):
            if image[start] < 0:
                axes[:, start:stop] = np.arange(position, position + stop - start)
                position += stop - start
                continue
            _, rows, columns = grids[image[start]]
            first = position if feature[start] == 0 else position - max(rows, columns)
            place = feature[start:stop].astype(np.int64)
            axes[0, start:stop] = first + place // (rows * columns)
            axes[1, start:stop] = first + place // columns % rows
            axes[2, start:stop] = first + place % columns
            position = first + max(rows, columns)
        ends.append(position)
    return axes


def _runs(cut: NDArray[np.bool_], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the stretches between two places that a cut ends."""
    places = np.flatnonzero(cut[start : stop + 1]) + start
    yield from zip(places[:-1].tolist(), places[1:].tolist(), strict=True)


def small_pixels(config: Any, rows: int = 1, columns: int = 1) -> Pixels:
    """Return the pixels of a small image of noise. rows, columns: of its features, for a model with a grid."""
    vision = config.vision_config
    noise = np.random.default_rng(0)
    if config.model_type in ON_A_GRID:
        merge = vision.spatial_merge_size
        width = 3 * vision.temporal_patch_size * vision.patch_size**2
        arrays: dict[str, NDArray[Any]] = {
            "pixel_values": noise.standard_normal((rows * columns * merge**2, width), np.float32),
            "image_grid_thw": np.array([[1, rows * merge, columns * merge]], np.int64),
        }
        return Pixels(arrays, rows * columns, (1, rows, columns))
    if config.model_type in BY_BUDGET:
        height, width = (count * vision.pooling_kernel_size for count in (rows, columns))
        places = np.stack(np.divmod(np.arange(height * width), width)[::-1], axis=-1)[None]
        values = noise.random((1, height * width, 3 * vision.patch_size**2), np.float32)
        return Pixels({"pixel_values": values, "image_position_ids": places}, rows * columns)
    side = vision.image_size
    values = noise.standard_normal((1, 3, side, side), np.float32)
    if config.model_type in BOTH_WAYS:
        return Pixels({"pixel_values": values}, config.mm_tokens_per_image)
    arrays = {
        "pixel_values": values,
        "pixel_attention_mask": np.ones((1, side, side), np.int64),
    }
    return Pixels(arrays, (side // vision.patch_size // config.scale_factor) ** 2)


def tower_arguments(config: PreTrainedConfig, pixels: Sequence[Pixels], device: torch.device) -> dict[str, Tensor]:
    """Return the tower's arguments for these images, as the family's `get_image_features` takes them."""
    joined = {
        name: torch.from_numpy(np.concatenate([image.arrays[name] for image in pixels])).to(device)
        for name in pixels[0].arrays
    }
    if config.model_type in IN_TILES:  # all tiles, as those of one prompt
        return {name: array[None] for name, array in joined.items()}
    return joined


class VisionBackbone(TransformersBackbone):
    """A vision-language model of transformers: its tower, and its text part for a flat list of tokens."""

    def __init__(self, module: PreTrainedModel) -> None:
        super().__init__(module)
        for name, part in module.base_model.named_children():
            if "audio" in name:
                part.requires_grad_(False)  # a pass has no sound
        for block in tower_blocks(module):
            block.forward = MethodType(_block_forward, block)

    def encode(self, pixels: Sequence[Pixels], checkpointing: ActivationCheckpointing) -> Features:
        """Compute the features of images by the tower. checkpointing: as for a pass, for the tower's blocks."""
        arguments = tower_arguments(self.module.config, pixels, self.module.device)
        token = _tower_checkpointing.set(checkpointing)
        try:
            out = self.module.base_model.get_image_features(**arguments, return_dict=True)
        finally:
            _tower_checkpointing.reset(token)
        deep = getattr(out, "deepstack_features", None) or ()
        return Features(_flat(out.pooler_output), tuple(_flat(level) for level in deep))

    def __call__(
        self,
        ids: Tensor,
        positions: Tensor,
        attend: AttentionFn,
        checkpointing: ActivationCheckpointing,
        images: PassImages | None = None,
    ) -> Tensor:
        """[P], [P] or [3, P] → [P, H]: compute the final normed hidden states; see `Backbone`."""
        text = self.module.get_decoder()
        embeddings = text.get_input_embeddings()(ids[None].long())
        more: dict[str, Any] = {}
        if self.module.config.model_type in BY_BUDGET:
            more["per_layer_inputs"] = _layer_inputs(text, ids, images)
        if images is not None:
            taken = images.features.main.index_select(0, images.rows).to(embeddings.dtype)
            embeddings = embeddings.index_copy(1, images.tokens, taken[None])
            if images.features.deep:
                mask = torch.zeros(ids.shape, dtype=torch.bool, device=ids.device)
                more["visual_pos_masks"] = mask.index_fill(0, images.tokens, True)[None]
                more["deepstack_visual_embeds"] = [level.index_select(0, images.rows) for level in images.features.deep]
        places = positions[None] if positions.ndim == 1 else positions[:, None]
        with (
            use_checkpointing(checkpointing),
            use_mixer(attend),
            nullcontext() if self.compiled is None else self.compiled.active(),
        ):
            out = text(inputs_embeds=embeddings, position_ids=places, use_cache=False, **more)
        hidden: Tensor = out.last_hidden_state[0]
        return hidden


def _layer_inputs(text: Any, ids: Tensor, images: PassImages | None) -> Tensor | None:
    """[1, P, layers, …]: return the embeddings of each token for each layer, if the layers have some."""
    if not text.config.hidden_size_per_layer_input:
        return None
    if images is not None:
        ids = ids.index_fill(0, images.tokens, text.config.pad_token_id)
    inputs: Tensor = text.get_per_layer_inputs(ids[None].long())
    return inputs


def tower_blocks(module: Any) -> list[nn.Module]:
    """Return the blocks of the tower, each of which is computed again under activation checkpointing."""
    vision = module.config.vision_config
    count = vision.depth if module.config.model_type in ON_A_GRID else vision.num_hidden_layers
    tower: nn.Module = module.get_encoder(modality="image")
    lists = (part for part in tower.modules() if isinstance(part, nn.ModuleList) and len(part) == count)
    return list(next(lists))


def _block_forward(block: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run a block of the tower; with checkpointing, the backward pass runs it again."""
    forward: Callable[..., Any] = type(block).forward
    run = checkpoint_layer(MethodType(forward, block), _tower_checkpointing.get())
    return run(hidden_states, *args, **kwargs)


def _flat(parts: Any) -> Tensor:
    """Return features that transformers gives image by image, end to end."""
    return torch.cat([part.flatten(0, -2) for part in parts])
