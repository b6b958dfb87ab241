"""Who samples for the endpoint: anything that takes ids and gives ids, each with its log-prob and its version."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from etude.chat.tokenizer import Ids
from etude.records import Completion, SamplingParams

__all__ = ["CompletionChunk", "Upstream"]


class CompletionChunk(Protocol):
    """What a streamed answer has gained."""

    @property
    def ids(self) -> Ids:
        """[t] new tokens."""
        ...

    @property
    def logp(self) -> NDArray[np.float32]:
        """[t]"""
        ...

    @property
    def version(self) -> Ids:
        """[t] of the weights that drew each."""
        ...

    @property
    def completion(self) -> Completion | None:
        """The whole, with what came last."""
        ...


class Upstream(Protocol):
    """Token ids in, token ids out, met by structure: the embedded engine is one. Any number of calls may be under way,
    and each may be cancelled at any await, which ends its sampling."""

    async def generate(self, prompt: Ids, sampling: SamplingParams) -> Completion:
        """Sample one continuation. What cannot be sampled as asked is a `DataError` or a `ConfigError`; that it cannot
        be sampled now, an `EngineError`."""
        ...

    def stream(self, prompt: Ids, sampling: SamplingParams) -> AsyncGenerator[CompletionChunk, None]:
        """The same, as it comes. Closing it ends the sampling."""
        ...
