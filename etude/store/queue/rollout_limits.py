"""The use of a rollout, its time limits, and its retries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite
from typing import Annotated, Any, Literal, TypeAlias

from etude.errors import DataError
from etude.records import Outcome
from etude.store.queue.bounds import Bounds, Seconds

RolloutPurpose: TypeAlias = Literal["train", "val"]
"""The use of a rollout: for training, or to evaluate the model."""

RETRIED = frozenset({Outcome.FAILED, Outcome.TIMED_OUT, Outcome.UNRESPONSIVE, Outcome.INFRA_ERROR})
"""Outcomes after which a rollout may be retried."""
MAX_INFRA_RETRIES = 10
"""Infrastructure errors of a rollout that are retried without being counted as attempts."""


@dataclass(frozen=True, slots=True)
class RolloutLimits:
    """Time limits and retries of a rollout. None is no limit."""

    timeout_s: Seconds | None = 1800.0
    """Seconds of an attempt, from the claim on."""
    unresponsive_s: Seconds = 60.0
    """Seconds without a heartbeat of its runner."""
    queue_timeout_s: Seconds | None = None
    """Seconds in the queue, each time the rollout waits there."""
    max_attempts: Annotated[int, Bounds(ge=1, le=1_000_000)] = 2
    retry_on: Annotated[tuple[Outcome, ...], Bounds(max_length=len(Outcome))] = (
        Outcome.FAILED,
        Outcome.TIMED_OUT,
        Outcome.UNRESPONSIVE,
    )
    """Outcomes after which the rollout is queued again. An infrastructure error is always retried, up to ten times, and
    does not count as an attempt."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "retry_on", tuple(Outcome(outcome) for outcome in self.retry_on))
        for name in ("timeout_s", "unresponsive_s", "queue_timeout_s"):
            seconds = getattr(self, name)
            if seconds is None and name != "unresponsive_s":
                continue
            if seconds is None or not (isfinite(seconds) and seconds > 0):
                raise DataError(f"RolloutLimits.{name} is {seconds}; it must be a number of seconds above 0.")
        if self.max_attempts < 1:
            raise DataError(f"RolloutLimits.max_attempts is {self.max_attempts}; a rollout is tried at least once.")
        if final := set(self.retry_on) - RETRIED:
            raise DataError(
                f"RolloutLimits.retry_on names {', '.join(sorted(final))}, which cannot be retried. It may name: "
                f"{', '.join(sorted(RETRIED))}."
            )

    def allows_retry(self, ended: list[Outcome]) -> bool:
        """Return whether a rollout may be retried after attempts with these outcomes, the newest last."""
        counted = [outcome for outcome in ended if outcome is not Outcome.INFRA_ERROR]
        if ended[-1] is Outcome.INFRA_ERROR:
            return len(ended) - len(counted) <= MAX_INFRA_RETRIES
        return ended[-1] in self.retry_on and len(counted) < self.max_attempts

    def to_dict(self) -> Mapping[str, Any]:
        """The fields, as they go into JSON."""
        return _document(self)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> RolloutLimits:
        """Restore the limits from their JSON fields."""
        return _restored(**{**document, "retry_on": tuple(document["retry_on"])})


# Almost all rollouts of a run have the same limits, so these are created and encoded once.


@lru_cache(64)
def _document(limits: RolloutLimits) -> Mapping[str, Any]:
    return {name: getattr(limits, name) for name in limits.__slots__}


@lru_cache(64)
def _restored(**fields: Any) -> RolloutLimits:
    return RolloutLimits(**fields)
