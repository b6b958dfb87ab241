"""The options of training: precision, optimizer, and how much of a batch is computed at once."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from etude.config import Config
from etude.errors import ConfigError

__all__ = ["MeshConfig", "Precision", "TrainConfig"]

Precision = Literal["bf16", "fp32", "fp16", "fp64"]


class TrainConfig(Config):
    """How weights follow a gradient, and what it costs in memory."""

    precision: Precision = Field(
        "bf16", description="what the model computes in; half precisions keep float32 weights beside it to step on"
    )
    learning_rate: float = Field(1e-6, ge=0, description="AdamW's rate, at its highest")
    lr_scheduler: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="how the rate goes on after warm-up: as it is, or down to 0 after the last update"
    )
    warmup_steps: int = Field(0, ge=0, description="updates over which the rate rises from 0")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decay of matrices; biases and norms have none")
    betas: tuple[float, float] = Field((0.9, 0.999), description="how long AdamW remembers gradients and their squares")
    max_grad_norm: float | None = Field(
        1.0, gt=0, description="the largest norm that a gradient may have; none does not clip"
    )
    max_tokens_per_micro_batch: int = Field(16384, ge=1, description="tokens computed at once; fewer need less memory")
    activation_checkpointing: bool = Field(
        False, description="compute activations again for the backward pass: less memory, a third more work"
    )
    compile: bool = Field(
        False, description="run norms, rotary positions and activations by what torch.compile makes of them"
    )
    weights: Literal["whole", "divided"] = Field(
        "whole",
        description="what each of several ranks holds of the weights: all, or its rows, with each layer brought "
        "together while it is computed. An embedded engine has them whole while it samples",
    )
    offload: bool = Field(
        False, description="on a GPU, keep the optimizer in the processor's memory, and the engine asleep, in turns"
    )

    @model_validator(mode="after")
    def _betas_are_shares(self) -> TrainConfig:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(
                f"`betas` are shares of what is remembered, from 0 to below 1; {self.betas} was given. Usual are 0.9 "
                f"and 0.999."
            )
        return self


class MeshConfig(Config):
    """How many ranks work on the same rollouts, and how they divide that. The others work on other rollouts."""

    replicas: int = Field(
        1, ge=1, description="copies of sharded weights; more of them exchange less between machines and need memory"
    )
    tensor: int = Field(
        1, ge=1, description="ranks that have a part of each layer: some of its heads, and some of its inner width"
    )
    sequence: int = Field(
        1, ge=1, description="ranks that have a part of each sequence, and trade tokens for heads where they attend"
    )

    @property
    def size(self) -> int:
        """The ranks that compute the same rollouts together."""
        return self.tensor * self.sequence

    def check_ranks(self, ranks: int) -> None:
        """Refuse so many ranks, if they are not whole meshes."""
        if ranks % self.size:
            whole = max(self.size, ranks - ranks % self.size)
            raise ConfigError(
                f"`mesh.tensor={self.tensor}` times `mesh.sequence={self.sequence}` are {self.size} ranks to the same "
                f"rollouts, and `ranks={ranks}` is no multiple of that. Set `ranks={whole}`, or a smaller mesh."
            )
        copies = self.replicas * self.size
        if ranks % copies:
            raise ConfigError(
                f"`mesh.replicas={self.replicas}` copies of the weights over whole meshes of {self.size} ranks each "
                f"need a multiple of {copies} ranks, and `ranks={ranks}` is none. Set "
                f"`ranks={max(copies, ranks - ranks % copies)}`, or fewer replicas."
            )
