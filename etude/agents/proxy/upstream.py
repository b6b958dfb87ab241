"""The interface of the sampler behind the endpoint: token ids in; token ids out, with log-probs and weight versions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from etude.chat.tokenizer import Ids
from etude.records import Completion, SamplingParams


class CompletionChunk(Protocol):
    """The tokens that a streamed answer has gained."""

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
        """[t] the version of the weights that sampled each token."""
        ...

    @property
    def completion(self) -> Completion | None:
        """The whole completion; only in the last chunk."""
        ...


class Upstream(Protocol):
    """Any sampler with these methods; the embedded engine is one. Any number of calls may be active. Cancelling a call
    at any await ends its sampling."""

    async def generate(self, prompt: Ids, sampling: SamplingParams) -> Completion:
        """Sample one continuation. Raise `DataError` or `ConfigError` if the request cannot be sampled, and
        `EngineError` if it cannot be sampled now."""
        ...

    def stream(self, prompt: Ids, sampling: SamplingParams) -> AsyncGenerator[CompletionChunk, None]:
        """Stream one continuation. Closing the stream ends the sampling."""
        ...
