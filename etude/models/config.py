"""The options of low-rank adapters, and what a model may have for a head.

What computes adapters is in `lora_layers`, what makes them in `lora`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from etude.config import Config
from etude.errors import ConfigError

__all__ = ["Head", "LoraAdapterConfig"]

Head = Literal["language", "score", "value"]
"""What stands on the hidden states: logits; one number, as a reward model's files have it; or one number that begins at
0 where the files have none, as a critic's does."""

ADAPTER_OPTIONS = ("rank", "alpha", "rslora", "targets")
"""What an adapter's own files say of it."""


class LoraAdapterConfig(Config):
    """Adapters that are trained in place of the weights: to a product W x is added a small one, (α / r) · B A x, in
    which A begins at random and B at zero, so that the policy begins as the model it adapts.

    LoRA: Hu et al., 2021, arXiv:2106.09685. rsLoRA counts α / √r: Kalajdzievski, 2023, arXiv:2312.03732.
    """

    rank: int = Field(0, ge=0, description="the adapters' inner width r; 0 trains the weights themselves")
    alpha: int = Field(32, ge=1, description="an adapter's product counts alpha / rank times")
    rslora: bool = Field(False, description="it counts alpha / √rank times, so that a high rank learns as fast")
    targets: tuple[str, ...] = Field(
        (), description="parts of the model that get one, such as q_proj or layers.0.mlp; empty is every linear layer"
    )
    path: Path | None = Field(
        None, description="an adapter to go on from, a directory as peft writes it; it says the four above itself"
    )
    publish: Literal["adapter", "merged"] = Field(
        "adapter", description="the engine adds the adapters' products, or has weights of its own with them added in"
    )

    @property
    def is_enabled(self) -> bool:
        """Whether adapters are trained."""
        return self.rank > 0 or self.path is not None

    @model_validator(mode="after")
    def _check_adapter_options(self) -> LoraAdapterConfig:
        changed = [
            name
            for name in (*ADAPTER_OPTIONS, "publish")
            if getattr(self, name) != type(self).model_fields[name].default
        ]
        if self.path is not None and changed and changed[0] in ADAPTER_OPTIONS:
            raise ConfigError(
                f"`lora.{changed[0]}` was given beside `lora.path`, and the adapter there says its own. Leave it out, "
                f"or begin a new adapter without `lora.path`."
            )
        if not self.is_enabled and changed:
            raise ConfigError(
                f"`lora.{changed[0]}` does nothing while no adapter is trained. Set `lora.rank` (16 is usual), or "
                f"leave it out."
            )
        return self
