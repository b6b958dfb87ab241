"""The options of checkpoints."""

from __future__ import annotations

from pydantic import Field

from etude.config import Config

__all__ = ["CheckpointConfig"]


class CheckpointConfig(Config):
    """How often a run is saved, and how much of that stays."""

    every: int = Field(10, ge=1, description="steps from one checkpoint to the next; the last step is always saved")
    keep: int = Field(2, ge=1, description="how many of the newest checkpoints stay; the best one stays besides")
    fall_back: bool = Field(False, description="where the newest is damaged, resume from the newest that is whole")
