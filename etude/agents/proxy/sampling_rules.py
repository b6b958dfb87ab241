"""The choice between the run's sampling parameters and the agent's.

Training needs answers that are sampled as the run says, even if an agent sets another temperature. So the run's
parameters hold by default, and a response header names those of the agent that were not followed. If the agent's
parameters may hold, training follows those that exclude tokens, and each answer records which tokens were left. It
refuses those that change the distribution in another way, since it could not compute it again. Parameters that are part
of an agent's program always hold: its stop strings, its number of answers, and a limit on length below the run's.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from etude.agents.proxy.request import APIError, JSONObject, ModelRequest
from etude.errors import ConfigError
from etude.records import SamplingParams
from etude.store.queue.rollout_queue import RolloutPurpose

ParameterMode: TypeAlias = Literal["force", "default"]
SeedFunction: TypeAlias = Callable[[RolloutPurpose, int, int, int, int], int]
"""Returns the seed of an answer, from the use, the rollout, the draw, a hash of the prompt's ids, and the occurrence.
The draw is the attempt's index without attempts that infrastructure broke. The occurrence counts earlier answers to
this prompt in the attempt."""
FORCED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logit_bias", "min_tokens", "seed")
"""The agent's parameters that are not followed if the run's are forced."""
DISTRIBUTION = ("temperature", "repetition_penalty", "logit_bias")
"""The parameters that change the distribution of tokens in a way that a set of tokens does not say."""
BAN = -100.0
"""A bias from here on keeps a token from being drawn."""


def make_seed_function(
    run: int, number_of: Callable[[int, RolloutPurpose], int] = lambda rollout, _: rollout
) -> SeedFunction:
    """Return a function whose seeds depend only on the run's seed and on the call that they answer. number_of: returns
    the number that the seeds of a rollout derive from."""

    def seed(use: RolloutPurpose, rollout: int, draw: int, prompt: int, occurrence: int) -> int:
        text = f"{run}:call:{number_of(rollout, use)}:{draw}:{prompt}:{occurrence}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1

    return seed


@dataclass(frozen=True, slots=True)
class SamplingRules:
    """The run's parameters for training and for validation, and their precedence."""

    train: SamplingParams
    val: SamplingParams
    parameters: ParameterMode = "force"

    def __post_init__(self) -> None:
        if self.train.seed is not None or self.val.seed is not None:
            raise ConfigError(
                "The endpoint's sampling parameters set a seed, so all answers to a prompt would be the same. Leave it "
                "out: `seeds` derives a seed for each answer."
            )

    def resolve(
        self, request: ModelRequest, use: RolloutPurpose, max_tokens: int | None = None
    ) -> tuple[SamplingParams, tuple[str, ...]]:
        """Return the sampling parameters of an answer, and the names of the agent's parameters that were not followed.
        max_tokens: the run's limit for this answer, if it is lower than that of others."""
        run, requested = self.val if use == "val" else self.train, request.sampling
        if max_tokens is not None:
            run = replace(run, max_tokens=max_tokens)
        if not requested and not request.penalties:
            return run, request.ignored
        stop = dict.fromkeys((*run.stop, *requested.get("stop", ())))
        stop_ids = dict.fromkeys((*run.stop_ids, *requested.get("stop_ids", ())))
        overrides = {**requested, "stop": tuple(stop), "stop_ids": tuple(stop_ids)}
        if self.parameters == "default":
            if request.penalties:
                raise APIError(
                    f"'{request.penalties[0]}' is not supported by this endpoint; leave it out.",
                    param=request.penalties[0],
                )
            if use == "val":
                return _override(run, overrides), request.ignored
            if "logit_bias" in overrides:
                overrides["logit_bias"] = _ban(overrides["logit_bias"])
            _refuse_other_distribution(run, overrides)
            params = _override(run, overrides)
            return replace(params, support=params.excludes_tokens), request.ignored
        ignored = [name for name in FORCED if name in overrides and overrides.pop(name) != getattr(run, name)]
        if overrides.get("max_tokens", 0) > run.max_tokens:
            ignored.append("max_tokens")
            del overrides["max_tokens"]
        return _override(run, overrides), (*ignored, *request.penalties, *request.ignored)


def _refuse_other_distribution(run: SamplingParams, requested: JSONObject) -> None:
    """Refuse the agent's parameters if training would not know the distribution that tokens were sampled from."""
    for name in DISTRIBUTION:
        own = getattr(run, name)
        if requested.get(name, own) == own:
            continue
        if name == "logit_bias" and all(bias == -math.inf for bias in requested[name].values()):
            continue
        needed = f"left out, or {BAN:g} or less" if name == "logit_bias" else f"left out, or {own:g}"
        raise APIError(
            f"'{name}' has to be {needed}: this call is trained on, and another value changes the distribution of "
            f"tokens in a way that training does not know. An evaluation may have it; `agent.parameters=force` ignores "
            "it in training.",
            param=name,
        )


def _ban(biases: Mapping[int, float]) -> dict[int, float]:
    """Return the biases with minus infinity for the tokens that have no chance, so that they are known to have none."""
    return {id: -math.inf if bias <= BAN else bias for id, bias in biases.items()}


def _override(run: SamplingParams, values: dict[str, object]) -> SamplingParams:
    if "max_tokens" in values and "min_tokens" not in values:
        values["min_tokens"] = min(run.min_tokens, int(str(values["max_tokens"])))
    try:
        return replace(run, **values)  # type: ignore[arg-type]
    except ValueError as error:
        raise APIError(str(error)) from error
