"""A run like a real one, to test configuration with: choices, nested choices, an optional one, and sections."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from etude.config import Choice, Config


class Loss(Config):
    """The base of losses."""


class PPO(Loss):
    """The clipped objective."""

    clip_low: float = Field(0.2, ge=0, description="How far below 1 the ratio may fall.")
    clip_high: float = Field(0.2, ge=0, description="How far above 1 the ratio may rise.")
    dual_clip: float | None = Field(None, gt=1, description="The cap for negative advantages; null leaves it out.")

    @model_validator(mode="after")
    def _bounds_agree(self) -> Self:
        if self.clip_low > 10 * self.clip_high:
            raise ValueError("clip_low is more than ten times clip_high: lower clip_low or raise clip_high.")
        return self


class GSPO(Loss):
    """The sequence-level objective."""

    clip_low: float = Field(3e-4, ge=0, description="How far below 1 the ratio may fall.")
    clip_high: float = Field(4e-4, ge=0, description="How far above 1 the ratio may rise.")


class MyLoss(Loss):
    """A loss that is in no table."""

    my_knob: int = Field(1, description="Turns.")


class Named(Loss):
    """A plug-in with a field called `name`."""

    name: str = Field("x", description="Not allowed.")


class NotAConfig:
    """A class that is no loss."""


LOSSES = {"ppo": PPO, "gspo": GSPO}


class Controller(Config):
    """The base of controllers."""


class Fixed(Controller):
    """A constant coefficient."""

    coef: float = Field(0.001, ge=0, description="The coefficient.")


class Adaptive(Controller):
    """A coefficient that follows a target."""

    target: float = Field(6.0, gt=0, description="The divergence aimed at.")
    horizon: int = Field(10_000, ge=1, description="How slowly it follows.")


CONTROLLERS = {"fixed": Fixed, "adaptive": Adaptive}


class KL(Config):
    """The base of penalties."""


class K3(KL):
    """The low-variance form."""

    controller: Annotated[Controller, Choice(CONTROLLERS)] = Field(Fixed(), description="What sets the coefficient.")


class K1(KL):
    """The plain form."""

    controller: Annotated[Controller, Choice(CONTROLLERS)] = Field(Adaptive(target=3.0), description="What sets it.")
    clamp: tuple[float, float] = Field((-10.0, 10.0), description="The bounds of one token's term.")


KLS = {"k3": K3, "k1": K1}


class Precision(Enum):
    """Number formats."""

    FP32 = "fp32"
    BF16 = "bf16"


class Schedule(Config):
    """The schedule of the learning rate."""

    warmup: int = Field(0, ge=0, description="Steps of warm-up.")
    shape: Literal["constant", "cosine"] = Field("constant", description="What follows the warm-up.")
    points: tuple[int, ...] = Field((), description="Steps at which it is halved.")


class Optim(Config):
    """The optimizer."""

    lr: float = Field(1e-6, gt=0, description="Learning rate.")
    betas: tuple[float, float] = Field((0.9, 0.999), description="Decay of the two moments.")
    schedule: Schedule = Field(Schedule(), description="How the rate moves.")


class Reward(Config):
    """One part of a reward."""

    weight: float = Field(1.0, description="Its share.")


class Run(Config):
    """The root of all options."""

    seed: int = Field(1, ge=0, description="What every random number derives from.")
    title: str = Field("study", description="What the run is called.")
    api_key: str | None = Field(None, description="What the endpoint asks for.")
    max_tokens: int = Field(256, ge=1, description="Longest completion.")
    steps: int | Literal["auto"] = Field("auto", description="How many steps.")
    shuffle: bool = Field(True, description="Whether tasks are shuffled.")
    precision: Precision = Field(Precision.FP32, description="What the weights are kept in.")
    output: Path | None = Field(None, description="Where results go.")
    stop: list[str] = Field([], description="What ends a completion.")
    rewards: dict[str, Reward] = Field({"exact": Reward()}, description="The parts of the reward.")
    limits: dict[str, int] = Field({}, description="Bounds by name.")
    loss: Annotated[Loss, Choice(LOSSES)] = Field(PPO(), description="What the policy minimizes.")
    kl: Annotated[KL | None, Choice(KLS)] = Field(None, description="What keeps the policy near its reference.")
    optim: Optim = Field(Optim(), description="How weights move.")
    extra_losses: list[Annotated[Loss, Choice(LOSSES)]] = Field([], description="Losses added to the first.")

    @field_validator("max_tokens")
    @classmethod
    def _even(cls, value: int) -> int:
        if value % 2:
            raise ValueError("must be even.")
        return value


PLUG_IN = "tests.config.sample_run:MyLoss"


def written(folder: Path, text: str) -> Path:
    """Return a configuration file with this text."""
    file = folder / "mine.yaml"
    file.write_text(text, encoding="utf-8")
    return file
