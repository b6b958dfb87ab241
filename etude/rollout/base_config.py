"""What the options of every engine have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod

from pydantic import Field

from etude.config import Config

__all__ = ["RolloutConfig"]


class RolloutConfig(Config, ABC):
    """An engine that samples."""

    max_num_seqs: int = Field(128, ge=1, description="most requests computed at once; others wait")

    @abstractmethod
    def max_concurrency(self, ranks: int) -> int:
        """How many requests are computed at once by all of it, where a run has so many ranks."""
