"""The options that every engine has."""

from __future__ import annotations

from abc import ABC, abstractmethod

from pydantic import Field

from etude.config import Config

__all__ = ["RolloutConfig"]


class RolloutConfig(Config, ABC):
    """The options of an engine that samples."""

    max_num_seqs: int = Field(
        128,
        ge=1,
        description="most requests computed at once; more is faster until memory for keys and values runs out",
    )

    @abstractmethod
    def max_concurrency(self, ranks: int) -> int:
        """Return how many requests all engines of a run with `ranks` ranks compute at once."""
