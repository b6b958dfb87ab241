"""How answers are drawn: the part of `SamplingParams` that a person sets, and the seeds that nobody has to."""

from __future__ import annotations

import hashlib

from pydantic import Field

from etude.config import Config
from etude.records import SamplingParams

__all__ = ["EvaluationSampling", "SamplingBase", "SamplingConfig", "derived_seed"]


class SamplingBase(Config):
    """From which distribution tokens are drawn, and what ends an answer."""

    temperature: float = Field(1.0, ge=0, description="0 is greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="keep the likeliest tokens that hold this much probability")
    top_k: int = Field(0, ge=0, description="keep this many of the likeliest tokens; 0 keeps all")
    stop: tuple[str, ...] = Field((), description="texts that end an answer, besides the model's own end")


class SamplingConfig(SamplingBase):
    """How answers are drawn. The defaults draw from the model's own distribution, which is what training needs."""

    max_tokens: int = Field(1024, ge=1, description="the longest answer, in tokens")

    def params(self, seed: int) -> SamplingParams:
        """The parameters of one request; the engine adds the model's own end."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=self.stop,
            seed=seed,
        )


class EvaluationSampling(SamplingBase):
    """How answers are drawn for scoring, where training's own length is the usual one."""

    max_tokens: int | None = Field(None, ge=1, description="the longest answer; null is as long as in training")

    def fill_from(self, training: SamplingConfig) -> SamplingConfig:
        """The same, with what follows training's filled in."""
        return SamplingConfig(**{**dict(self), "max_tokens": self.max_tokens or training.max_tokens})


def derived_seed(run: int, purpose: str, *position: int) -> int:
    """The seed of one request: a hash of the run's seed and of what the request is for, and of nothing else.

    So a request draws the same numbers whatever shares its batch, whenever it is made, and however often the run was
    killed before.
    """
    text = ":".join(map(str, (run, purpose, *position)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
