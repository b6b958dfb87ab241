"""Refuses rollouts with tokens of older weights than every engine had when the rollout was requested."""

from __future__ import annotations

from dataclasses import replace

from etude.observe import get_logger
from etude.recipes.collect.rollouts import PlayedRollout, WantedRollout
from etude.records import Outcome
from etude.rewards import Verdict

OUTDATED = "An engine drew with version"
"""The beginning of the error of such a rollout."""


class VersionCheck:
    """Checks the policy versions of tokens. Only an engine that computes with other weights than it was sent fails."""

    def __init__(self) -> None:
        self._warned = False

    def check(self, wanted: WantedRollout, played: PlayedRollout) -> PlayedRollout:
        """Return a rollout as it is, or as an infrastructure error if its oldest token is older than its floor."""
        oldest = played.oldest
        if not played.succeeded or oldest is None or oldest >= wanted.floor:
            return played
        error = f"{OUTDATED} {oldest} after version {wanted.floor} was published."
        if not self._warned:
            self._warned = True
            get_logger("recipes").warning(
                "%s Rollout %d, and any other one like it, counts as an infrastructure error, and no step trains on "
                "it. Look at the servers' logs: one of them has older weights than it was sent. This is logged once.",
                *(error, wanted.id),
            )
        return replace(played, verdict=Verdict.failure(Outcome.INFRA_ERROR, error))


def is_outdated(error: str) -> bool:
    """Return whether an attempt failed by this check."""
    return error.startswith(OUTDATED)
