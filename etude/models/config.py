"""The options of low-rank adapters, and the kinds of model head and of activation checkpointing.

`lora_layers` computes adapters, `lora` creates them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from etude.config import Config
from etude.config.resume_marks import MAY_CHANGE
from etude.errors import ConfigError

ActivationCheckpointing = Literal["none", "selective", "full", "offload"]
"""The activations of a layer that are computed again in its backward pass, or moved away; see `checkpointing`."""

Head = Literal["language", "seeing", "score", "value"]
"""The head on the hidden states: logits (`language`), one number (`score`), or one number that starts at 0 (`value`).

`seeing` has logits too, and the vision tower of a family whose text part is a model by itself. A reward model's files
contain the `score` head. A critic's `value` head starts at 0 if the files have none."""

ADAPTER_OPTIONS = ("rank", "alpha", "rslora", "targets")
"""The options that an adapter's own files set."""


class VisionConfig(Config):
    """The vision tower of a model that takes images, and the images that it takes."""

    tower: bool = Field(
        False,
        description="load the vision tower of Qwen3.5, so that it takes images; other families always have theirs",
    )
    train: bool = Field(
        False,
        description="train the tower too; by default its weights stay as they are, and an image is encoded once a pass",
    )
    max_pixels: int | None = Field(
        None,
        ge=1,
        description="most pixels that an image is resized to; fewer make fewer tokens; null is the processor's limit",
    )
    max_images: int = Field(
        16,
        ge=1,
        description="most images of a request or an example; more are refused, because each may have thousands of "
        "tokens",
    )


class LoraAdapterConfig(Config):
    """Adapters that are trained in place of the weights: a small product (α / r) · B A x is added to each product W x.

    A starts at random and B at zero, so that the policy starts as the model that it adapts.
    LoRA: Hu et al., 2021, arXiv:2106.09685. rsLoRA uses the factor α / √r: Kalajdzievski, 2023, arXiv:2312.03732.
    """

    rank: int = Field(0, ge=0, description="the adapters' inner width r; 0 trains the weights themselves")
    alpha: int = Field(32, ge=1, description="the factor on an adapter's product is alpha / rank")
    rslora: bool = Field(False, description="use the factor alpha / √rank instead, so that a high rank learns as fast")
    targets: tuple[str, ...] = Field(
        (),
        description="parts of the model that get an adapter, such as q_proj or layers.0.mlp; empty is every linear "
        "layer",
    )
    path: Path | None = Field(
        None,
        description="directory of the adapter to start from, in peft's format; its files set the four options above",
    )
    publish: Annotated[Literal["adapter", "merged"], MAY_CHANGE] = Field(
        "adapter",
        description="adapter: the engine adds the adapters' products; merged: it uses a copy of the weights with "
        "them merged",
    )

    @property
    def is_enabled(self) -> bool:
        """True if adapters are trained."""
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
                f"`lora.{changed[0]}` was given beside `lora.path`, but the adapter's own files set it. Leave it out, "
                f"or begin a new adapter without `lora.path`."
            )
        if not self.is_enabled and changed:
            raise ConfigError(
                f"`lora.{changed[0]}` does nothing while no adapter is trained. Set `lora.rank` (16 is usual), or "
                f"leave it out."
            )
        return self
