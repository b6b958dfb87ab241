"""The sizes of each layer: one may have other heads than its neighbour, or a state instead of keys, or both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from etude.errors import ConfigError

WITHOUT_ATTENTION = frozenset({"linear_attention", "conv", "mlp", "moe"})
"""The kinds of layers without attention, among transformers' `layer_types`."""
RECURRENT = frozenset({"linear_attention", "conv", "hybrid"})
"""The kinds of layers that hand a state from token to token, among transformers' `layer_types`."""


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


@dataclass(frozen=True)
class StateShape:
    """The states that a recurrent layer hands from one token to the next."""

    num_bytes: int
    """The bytes of its states for one sequence."""
    products: int
    """The multiplications of its recurrence and of its short convolution for each token."""


@dataclass(frozen=True)
class LayerSizes:
    """The sizes of the layers of a model, in order."""

    attention: tuple[AttentionShape | None, ...]
    """The heads of each layer; None for a layer that does not attend."""
    states: tuple[StateShape | None, ...]
    """The states of each layer; None for a layer without any, and for all until the model is verified."""

    @property
    def kv_values_per_token(self) -> int:
        """The count of numbers that the embedded engine keeps for a token: the keys and values of all layers."""
        return sum(shape.values_per_token for shape in self.attention if shape is not None)

    @property
    def state_bytes(self) -> int:
        """The bytes of the states of one sequence in all layers."""
        return sum(shape.num_bytes for shape in self.states if shape is not None)

    @property
    def state_products(self) -> int:
        """The multiplications of all recurrences and short convolutions for each token."""
        return sum(shape.products for shape in self.states if shape is not None)

    def repeated(self, total: int, period: int, start: int = 0) -> LayerSizes:
        """Return the sizes of a model with so many layers, in which each is like the one a period before.

        start: the first layers, which may differ.
        """
        layers = [layer if layer < start else start + (layer - start) % period for layer in range(total)]
        return LayerSizes(
            tuple(self.attention[layer] for layer in layers), tuple(self.states[layer] for layer in layers)
        )


def read_text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of the text model. Refuse a config of several text models, or of one without layers."""
    try:
        text: PreTrainedConfig = config.get_text_config()
    except ValueError as error:
        raise ConfigError(
            f"This {config.model_type} model has several text models, and Etude trains one. Choose a language model."
        ) from error
    if getattr(text, "num_hidden_layers", None) is None:
        raise ConfigError(
            f"The config.json of this {config.model_type} model has no `num_hidden_layers`, so it is no plain language "
            f"model. Choose another one."
        )
    return text


def read_context_length(config: PreTrainedConfig) -> int:
    """Return the longest sequence that the positions of a text model support."""
    longest: int | None = getattr(config, "max_position_embeddings", None)
    if longest is None:
        raise ConfigError(
            f"The config.json of this {config.model_type} model has no `max_position_embeddings`, so the longest "
            f"sequence that it supports is not known. Set it there, or choose another model."
        )
    return longest


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
