"""The sizes of a served model, read from its `config.json`. No weights are loaded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.errors import ConfigError


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model."""

    vocab_size: int
    """The model knows ids from 0 to one below this. A server may crash on any other."""
    context_length: int
    kv_values_per_token: int
    """The count of numbers in the keys and values of one token."""

    @classmethod
    def read(cls, directory: Path) -> ModelShape:
        """Read the shape of the model in a directory."""
        try:
            config: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
            config = config.get("text_config") or config
            heads = int(config["num_attention_heads"])
            head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
            kv_heads = int(config.get("num_key_value_heads") or heads)
            layers = int(config["num_hidden_layers"])
            return cls(
                int(config["vocab_size"]), int(config["max_position_embeddings"]), 2 * layers * kv_heads * head_dim
            )
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(
                f"{directory / 'config.json'} does not have the sizes of a model ({error!r}). Name a Hugging "
                f"Face model directory."
            ) from error

    def tokens_in(self, gib: float, bytes_of_value: int) -> int:
        """Return how many tokens have their keys and values in `gib` GiB."""
        return int(gib * 2**30) // (self.kv_values_per_token * bytes_of_value)
