"""Whose sampling parameters hold: the run's, or the agent's.

Training needs answers that are drawn as the run says, whatever temperature an agent was written with: so the run's
parameters are forced unless it says otherwise, and the agent is told, in a header, which of its own were not followed.
What is part of an agent's program holds always: its stop strings, how many answers it wants, and that an answer is to
be shorter than the run allows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from etude.agents.proxy.request import APIError, ModelRequest
from etude.errors import ConfigError
from etude.records import SamplingParams
from etude.store.rollout_queue import RolloutPurpose

__all__ = ["ParameterMode", "SamplingRules", "SeedFunction", "make_seed_function"]

ParameterMode: TypeAlias = Literal["force", "default"]
SeedFunction: TypeAlias = Callable[[int, int, int, int], int]
"""The seed of an answer, from its rollout, which draw of it the attempt is (those that infrastructure broke do not
count), a hash of its prompt's ids, and how often the attempt has asked for an answer to these before."""
FORCED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logit_bias", "min_tokens", "seed")
"""What an agent's own values of are not followed where the run's are forced."""


def make_seed_function(run: int) -> SeedFunction:
    """Seeds that follow from a run's, and from nothing else but what each answer is an answer to."""

    def seed(rollout: int, draw: int, prompt: int, occurrence: int) -> int:
        text = f"{run}:call:{rollout}:{draw}:{prompt}:{occurrence}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1

    return seed


@dataclass(frozen=True, slots=True)
class SamplingRules:
    """The run's parameters for learning and for validation, and how much they weigh."""

    train: SamplingParams
    val: SamplingParams
    parameters: ParameterMode = "force"

    def __post_init__(self) -> None:
        if self.train.seed is not None or self.val.seed is not None:
            raise ConfigError(
                "The endpoint's sampling parameters have a seed, and all answers to a prompt would be the same. Leave "
                "it out: each answer's is derived, by `seeds`."
            )

    def resolve(self, request: ModelRequest, use: RolloutPurpose) -> tuple[SamplingParams, tuple[str, ...]]:
        """With what an answer is sampled, and which of the agent's own parameters were not followed."""
        run, requested = self.val if use == "val" else self.train, request.sampling
        if not requested and not request.penalties:
            return run, request.ignored
        stop = dict.fromkeys((*run.stop, *requested.get("stop", ())))
        stop_ids = dict.fromkeys((*run.stop_ids, *requested.get("stop_ids", ())))
        overrides = {**requested, "stop": tuple(stop), "stop_ids": tuple(stop_ids)}
        if self.parameters == "default":
            if request.penalties:
                raise APIError(
                    f"'{request.penalties[0]}' is not supported by this endpoint.", param=request.penalties[0]
                )
            if use == "train" and requested.get("temperature", run.temperature) != run.temperature:
                raise APIError(
                    f"'temperature' cannot be {requested['temperature']:g}: this run learns from what is drawn at "
                    f"{run.temperature:g}, and would take it for that. Leave it out, or set `agent.parameters=force`.",
                    param="temperature",
                )
            return _override(run, overrides), request.ignored
        ignored = [name for name in FORCED if name in overrides and overrides.pop(name) != getattr(run, name)]
        if overrides.get("max_tokens", 0) > run.max_tokens:
            ignored.append("max_tokens")
            del overrides["max_tokens"]
        return _override(run, overrides), (*ignored, *request.penalties, *request.ignored)


def _override(run: SamplingParams, values: dict[str, object]) -> SamplingParams:
    if "max_tokens" in values and "min_tokens" not in values:
        values["min_tokens"] = min(run.min_tokens, int(str(values["max_tokens"])))
    try:
        return replace(run, **values)  # type: ignore[arg-type]
    except ValueError as error:
        raise APIError(str(error)) from error
