"""The sizes of each layer's attention: a layer may have other heads than its neighbour, or not attend at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

WITHOUT_ATTENTION = frozenset({"linear_attention", "conv", "mlp", "moe"})
"""The kinds of layers without attention, among transformers' `layer_types`."""


@dataclass(frozen=True)
class AttentionShape:
    """The heads with which a layer attends. Latent attention is expanded to whole heads."""

    query_heads: int
    key_heads: int
    key_width: int
    value_width: int

    @property
    def width(self) -> int:
        """The width that attention computes in: narrower keys or values are padded with zeros."""
        return max(self.key_width, self.value_width)

    @property
    def values_per_token(self) -> int:
        """The count of numbers in the keys and values of one token."""
        return 2 * self.key_heads * self.width

    @property
    def products_per_pair(self) -> int:
        """The multiplications for each token that a token attends to."""
        return self.query_heads * (self.key_width + self.value_width)


def attention_shapes(config: PreTrainedConfig) -> tuple[AttentionShape | None, ...]:
    """Return the attention of each layer of a text model's config; None for a layer without attention."""
    count = config.num_hidden_layers
    own = getattr(config, "per_layer_config", None) or [config] * count
    kinds = getattr(config, "layer_types", None) or [""] * count
    return tuple(None if kinds[index] in WITHOUT_ATTENTION else _attention_shape(own[index]) for index in range(count))


def _attention_shape(config: Any) -> AttentionShape | None:
    heads = getattr(config, "num_attention_heads", None)
    if heads is None:
        return None
    if getattr(config, "kv_lora_rank", None):
        width = config.qk_nope_head_dim + config.qk_rope_head_dim
        return AttentionShape(heads, heads, width, config.v_head_dim)
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return AttentionShape(heads, getattr(config, "num_key_value_heads", None) or heads, width, width)
