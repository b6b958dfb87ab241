"""Sampling options: the part of `SamplingParams` that users set, and the seeds that are derived."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

from pydantic import Field, model_validator

from etude.config import Config
from etude.errors import ConfigError
from etude.records import SamplingParams


class SamplingBase(Config):
    """The distribution that tokens are sampled from, and the texts that end an answer."""

    temperature: float = Field(1.0, ge=0, description="larger samples more random tokens; 0 is greedy")
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="sample among the most likely tokens with this total probability; smaller samples fewer rare "
        "tokens",
    )
    top_k: int = Field(0, ge=0, description="sample among this many of the most likely tokens; 0 is all")
    min_p: float = Field(
        0.0,
        ge=0,
        le=1,
        description="sample among the tokens with at least this share of the likeliest one's probability; 0 is all",
    )
    stop: tuple[str, ...] = Field((), description="texts that end an answer, besides the model's own end token")


class SamplingConfig(SamplingBase):
    """Sampling options for training. The defaults sample from the model's own distribution.

    Filters are followed: each token's set of possible tokens is recorded, and its log-prob is over that set.
    """

    max_tokens: int = Field(1024, ge=1, description="most tokens of an answer; longer ones are cut off")
    max_tokens_of: Mapping[str, int] = Field(
        {},
        description="most tokens of an answer in one data source, by its name, up to `max_tokens`; smaller is faster",
    )

    @model_validator(mode="after")
    def _lengths_fit(self) -> SamplingConfig:
        for source, limit in self.max_tokens_of.items():
            if not 1 <= limit <= self.max_tokens:
                raise ConfigError(
                    f"`max_tokens_of` gives answers of the data source `{source}` {limit} tokens, and those are 1 to "
                    f"`max_tokens` = {self.max_tokens}. Lower it, or raise `max_tokens`."
                )
        return self

    def params(self, seed: int | None = None) -> SamplingParams:
        """Return the parameters of requests; the engine adds the model's own end tokens."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            stop=self.stop,
            seed=seed,
        )

    def training_params(
        self, seed: int | None = None, *, alternatives: int = 0, routes: bool = False
    ) -> SamplingParams:
        """Return the parameters of requests whose answers are trained on: they report what could be drawn.

        alternatives: the number of likeliest tokens to record at each place. routes: record the experts of each token.
        """
        params = self.params(seed)
        start = 0 if routes else None
        return replace(params, support=params.excludes_tokens, alternatives=alternatives, routes_start=start)


class EvaluationSampling(SamplingBase):
    """Sampling options for scoring. The length of answers is that of training, unless it is set."""

    max_tokens: int | None = Field(None, ge=1, description="most tokens of an answer; null is as in training")

    def fill_from(self, training: SamplingConfig) -> SamplingConfig:
        """Return complete parameters, with missing values taken from those of training."""
        lengths = {"max_tokens": training.max_tokens, "max_tokens_of": training.max_tokens_of}
        return SamplingConfig(**dict(self) | (lengths if self.max_tokens is None else {}))


def derived_seed(run: int, purpose: str, *position: int) -> int:
    """Return the seed of one request: a hash of the run's seed and of the purpose of the request, and of nothing else.

    So a request samples with the same random numbers in any batch, at any time, and after any number of kills and
    resumes.
    """
    text = ":".join(map(str, (run, purpose, *position)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
