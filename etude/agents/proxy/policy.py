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

from etude.agents.proxy.asked import Asked, Refusal
from etude.errors import ConfigError
from etude.records import SamplingParams
from etude.store.desk import Use

__all__ = ["Parameters", "Policy", "Seeds", "seeds_of"]

Parameters: TypeAlias = Literal["force", "default"]
Seeds: TypeAlias = Callable[[int, int, int, int], int]
"""The seed of an answer, from its rollout, which draw of it the attempt is (those that infrastructure broke do not
count), a hash of its prompt's ids, and how often the attempt has asked for an answer to these before."""
FORCED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logit_bias", "min_tokens", "seed")
"""What an agent's own values of are not followed where the run's are forced."""


def seeds_of(run: int) -> Seeds:
    """Seeds that follow from a run's, and from nothing else but what each answer is an answer to."""

    def seed(rollout: int, draw: int, prompt: int, occurrence: int) -> int:
        text = f"{run}:call:{rollout}:{draw}:{prompt}:{occurrence}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1

    return seed


@dataclass(frozen=True, slots=True)
class Policy:
    """The run's parameters for learning and for validation, and how much they weigh."""

    train: SamplingParams
    val: SamplingParams
    parameters: Parameters = "force"

    def __post_init__(self) -> None:
        if self.train.seed is not None or self.val.seed is not None:
            raise ConfigError(
                "The endpoint's sampling parameters have a seed, and all answers to a prompt would be the same. Leave "
                "it out: each answer's is derived, by `seeds`."
            )

    def params(self, asked: Asked, use: Use) -> tuple[SamplingParams, tuple[str, ...]]:
        """With what an answer is sampled, and which of the agent's own parameters were not followed."""
        run, own = self.val if use == "val" else self.train, asked.sampling
        if not own and not asked.penalties:
            return run, asked.ignored
        stops = dict.fromkeys((*run.stop, *own.get("stop", ())))
        ends = dict.fromkeys((*run.stop_ids, *own.get("stop_ids", ())))
        told = {**own, "stop": tuple(stops), "stop_ids": tuple(ends)}
        if self.parameters == "default":
            if asked.penalties:
                raise Refusal(f"'{asked.penalties[0]}' is not supported by this endpoint.", param=asked.penalties[0])
            if use == "train" and own.get("temperature", run.temperature) != run.temperature:
                raise Refusal(
                    f"'temperature' cannot be {own['temperature']:g}: this run learns from what is drawn at "
                    f"{run.temperature:g}, and would take it for that. Leave it out, or set `agent.parameters=force`.",
                    param="temperature",
                )
            return _replaced(run, told), asked.ignored
        ignored = [name for name in FORCED if name in told and told.pop(name) != getattr(run, name)]
        if told.get("max_tokens", 0) > run.max_tokens:
            ignored.append("max_tokens")
            del told["max_tokens"]
        return _replaced(run, told), (*ignored, *asked.penalties, *asked.ignored)


def _replaced(run: SamplingParams, told: dict[str, object]) -> SamplingParams:
    if "max_tokens" in told and "min_tokens" not in told:
        told["min_tokens"] = min(run.min_tokens, int(str(told["max_tokens"])))
    try:
        return replace(run, **told)  # type: ignore[arg-type]
    except ValueError as error:
        raise Refusal(str(error)) from error
