"""The options of checkpoints."""

from __future__ import annotations

from pydantic import Field

from etude.config import Config


class CheckpointConfig(Config):
    """The interval of checkpoints, and the number that is kept."""

    every: int = Field(
        10,
        ge=1,
        description="steps between checkpoints; smaller loses less work in a crash and writes more; the last step is "
        "always saved",
    )
    keep: int = Field(
        2,
        ge=1,
        description="newest checkpoints to keep, besides the best one; more allow older steps and use more disk",
    )
    async_save: bool = Field(
        False,
        description="write a checkpoint while the next steps run, from a copy in the processor's memory; a step waits "
        "only for the copy, which needs room for the trained weights and the optimizer's moments once more",
    )
    fall_back: bool = Field(False, description="resume from the newest whole checkpoint if the newest is damaged")
