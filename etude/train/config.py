"""The options of training: precision, optimizer, micro-batches, train engine and mesh."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from etude.config import Config
from etude.config.resume_marks import MAY_CHANGE
from etude.errors import ConfigError
from etude.models import ActivationCheckpointing


class TrainConfig(Config):
    """The precision and the optimizer of training, and its use of memory."""

    precision: Literal["auto", "bf16", "fp32", "fp16", "fp64"] = Field(
        "auto",
        description="dtype of forward passes; half precisions keep float32 weights beside it for the optimizer; auto: "
        "bf16 on a GPU, and on a processor where a short trial finds it faster, else fp32",
    )
    learning_rate: float = Field(1e-6, ge=0, description="AdamW's rate, at its highest")
    lr_scheduler: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="learning rate after warm-up: constant, or falling to 0 at the last update"
    )
    warmup_steps: int = Field(0, ge=0, description="updates over which the rate rises from 0")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decay of matrices; biases and norms have none")
    betas: tuple[float, float] = Field(
        (0.9, 0.999), description="AdamW's decay of its means of gradients and of their squares"
    )
    max_grad_norm: float | None = Field(
        1.0, gt=0, description="the largest norm that a gradient may have; none does not clip"
    )
    max_tokens_per_micro_batch: Annotated[int, MAY_CHANGE] = Field(
        16384, ge=1, description="tokens computed at once; fewer need less memory"
    )
    activation_checkpointing: Annotated[ActivationCheckpointing, MAY_CHANGE] = Field(
        "none",
        description="activations to compute again for the backward pass; selective: all but results of linear maps and "
        "attention, less memory for little work; full: all of a layer, least memory for a third more work; offload: "
        "full, and on a GPU the inputs of layers wait in the processor's memory",
    )
    compile: Annotated[bool | Literal["auto"], MAY_CHANGE] = Field(
        "auto",
        description="compile with torch.compile: on the engine `local` norms, rotary positions and activations; on "
        "`fsdp` whole layers but for attention; auto: those of `local`, on a GPU where a small trial succeeds",
    )
    engine: Annotated[Literal["auto", "local", "fsdp"], MAY_CHANGE] = Field(
        "auto",
        description="local: one rank with whole weights, which the embedded engine shares; fsdp: each rank has a shard "
        "of every weight, by PyTorch's FSDP2; auto: local for one rank, else fsdp",
    )
    offload: Annotated[bool, MAY_CHANGE] = Field(
        False, description="on a GPU, keep the optimizer in the processor's memory, or let the engine sleep, in turns"
    )

    def choose_engine(self, ranks: int) -> Literal["local", "fsdp"]:
        """Return the engine that trains on so many ranks."""
        if self.engine == "auto":
            return "local" if ranks == 1 else "fsdp"
        return self.engine

    @model_validator(mode="after")
    def _betas_are_shares(self) -> TrainConfig:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(
                f"`betas` are shares of what is remembered, from 0 to below 1; {self.betas} was given. Usual are 0.9 "
                f"and 0.999."
            )
        return self


class PolicyTrainConfig(TrainConfig):
    """The training of a policy on rollouts, whose experts were chosen before the update."""

    router_replay: Literal["none", "r2", "r3"] = Field(
        "none",
        description="experts of a mixture that passes over a batch choose; none: each pass chooses anew; r2: the pass "
        "that computes log-probs before the updates chooses for them too; r3: the engine that sampled chose for all",
    )
    balance: Literal["none", "loss"] = Field(
        "none",
        description="a loss beside the objective that evens how many tokens each expert of a mixture gets; none: no "
        "such loss; loss: one on the routers' scores, for routers without a bias; needs `router_replay`",
    )
    balance_rate: float = Field(
        1e-3,
        gt=0,
        description="with `balance=loss`, the loss's coefficient in each layer: larger evens more, and takes more from "
        "the objective",
    )

    @model_validator(mode="after")
    def _rate_is_of_a_balance(self) -> PolicyTrainConfig:
        if self.balance == "none" and self.balance_rate != type(self).model_fields["balance_rate"].default:
            raise ConfigError(
                f"`balance_rate={self.balance_rate:g}` is the coefficient of a loss, and `balance=none` has none. Set "
                f"`balance=loss`, or leave it out."
            )
        return self


def refuse_unreplayed_balance(config: PolicyTrainConfig, option: str) -> None:
    """Refuse a balance loss without routes. option: the configuration section that the error names."""
    if config.balance != "none" and config.router_replay == "none":
        raise ConfigError(
            f"`{option}.balance={config.balance}` needs the experts of the whole update batch before its first pass. "
            f"Set `{option}.router_replay=r2`, which records them in a pass before the updates, or `r3`."
        )


class MeshConfig(Config):
    """The division of ranks: those that compute the same rollouts together, and those that hold copies of the weights.

    The remaining factor of the ranks is data parallel: they shard the weights, and compute other rollouts.
    """

    replicas: int = Field(
        1,
        ge=1,
        description="copies of the sharded weights; more send less between machines, and take more memory on each rank",
    )
    tensor: int = Field(
        1,
        ge=1,
        description="ranks that split each layer, its heads and its inner width, and the tokens between layers; more "
        "need less memory for activations, and communicate in every layer",
    )
    context: int = Field(
        1,
        ge=1,
        description="ranks that split the tokens of each rollout, and in attention the heads; more need less memory "
        "for activations, and exchange queries, keys, values and results in every layer",
    )
    expert: int = Field(
        1,
        ge=1,
        description="ranks that divide the experts of each layer of a mixture among them; more gather fewer weights, "
        "and send each token to the ranks of its experts",
    )

    @property
    def ranks_per_rollout(self) -> int:
        """The number of ranks that compute the same rollouts."""
        return self.context * self.tensor

    def check_ranks(self, ranks: int) -> None:
        """Refuse a number of ranks that is not a multiple of the mesh."""
        sizes = {"replicas": self.replicas, "context": self.context, "tensor": self.tensor}
        block = math.prod(sizes.values())
        if ranks % block:
            factors = " × ".join(f"`mesh.{name}={size}`" for name, size in sizes.items() if size > 1)
            raise ConfigError(
                f"`ranks={ranks}` is no multiple of {block}, which is {factors}. Set "
                f"`ranks={max(block, ranks - ranks % block)}`, or a smaller mesh."
            )
        shards = ranks // self.replicas
        if shards % self.expert:
            fits = max(count for count in range(1, self.expert) if not shards % count)
            raise ConfigError(
                f"`mesh.expert={self.expert}` divides the ranks of one copy of the weights, and `ranks={ranks}` over "
                f"`mesh.replicas={self.replicas}` are {shards}. Choose a divisor, such as {fits}."
            )
