"""The options that every engine has."""

from __future__ import annotations

from abc import ABC, abstractmethod

from pydantic import Field

from etude.config import Config
from etude.protocols import KvPolicy, RunningPolicy


class RolloutConfig(Config, ABC):
    """The options of an engine that samples."""

    running: RunningPolicy = Field(
        "continue",
        description="answers under way when weights arrive; `continue`: with the new weights, each token with its "
        "version; `finish`: first, while publishing waits; `restart`: from the beginning, at most three times",
    )
    kv: KvPolicy = Field(
        "keep",
        description="cached keys and values of answers that go on with new weights; `keep`: stay as they are; "
        "`recompute`: computed again with the new weights, which takes as long as their prompts and tokens so far",
    )
    update_timeout: float = Field(
        300.0, gt=0, description="seconds that an engine may take to finish its answers before new weights"
    )

    @abstractmethod
    def max_concurrency(self, ranks: int) -> int:
        """Return how many requests all engines of a run with `ranks` ranks compute at once."""
