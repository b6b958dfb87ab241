"""The ends of rollouts by the journal: one reading for agents and engines, in a run, at its resume and after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

from etude.recipes.collect.failure_messages import describe_failure
from etude.recipes.collect.player import end_reason
from etude.recipes.collect.rollouts import PlayedRollout
from etude.records import Outcome, Turn
from etude.rewards import Verdict
from etude.store import Journal, RolloutState, Status
from etude.store.queue.records import OWN_RUNNER

FailedReward: TypeAlias = float | Literal["drop"]
"""The reward of a rollout whose last attempt failed, as `agent.failed_reward`. An engine's are dropped."""
FAILED_STATUSES = (Status.FAILED, Status.TIMED_OUT, Status.UNRESPONSIVE)
"""Statuses of attempts that failed by their own fault."""


def read_end(store: Journal, state: RolloutState, failed_reward: FailedReward = "drop") -> PlayedRollout | None:
    """Return how a rollout ended, by the journal; None if that is not final.

    It is final if its run has sealed it, so that its agent can give no more rewards, and if it has a reward or failed.
    What the run's own runner has ended is final at once.
    """
    last = state.last
    is_sealed = state.sealed or (last is not None and last.runner == OWN_RUNNER)
    if not is_sealed or state.status in (Status.QUEUED, Status.RUNNING):
        return None
    if state.status is not Status.SUCCEEDED:
        error = describe_failure(store, state) or f"Rollout {state.id} ended {state.status}."
        return rollout_end(state, read_turns(store, state), failure(failed_reward, Outcome(state.status.value), error))
    assert last is not None, "a succeeded rollout has an attempt"
    if last.reward is None:
        return None
    verdict = Verdict(last.reward, last.parts, error=last.error, extracted_answer=last.extracted)
    return rollout_end(state, read_turns(store, state), verdict)


def read_turns(store: Journal, state: RolloutState) -> list[Turn]:
    """Return the turns of a rollout's last attempt, if it has any."""
    return store.turns(state.id) if state.last is not None and state.last.turns else []


def rollout_end(state: RolloutState, turns: Sequence[Turn], verdict: Verdict) -> PlayedRollout:
    """Return how a rollout ended. A failed one keeps the reward of its verdict, and its turns have none."""
    last = state.last
    if state.status is not Status.SUCCEEDED:
        turns = [replace(turn, reward=None) for turn in turns]
    if last is None:
        return PlayedRollout(tuple(turns), verdict)
    has_cut_answer = any(turn.completion.finish_reason == "length" for turn in turns[-1:])
    truncated = last.truncated or (has_cut_answer and last.runner != OWN_RUNNER)  # an agent may not say it
    return PlayedRollout(tuple(turns), verdict, truncated, end_reason(turns, truncated, None), last.role)


def failure(failed_reward: FailedReward, outcome: Outcome, error: str) -> Verdict:
    """Return a failure, or a success with the reward of failures. Infrastructure errors are always failures, and
    nothing is learned from them."""
    if failed_reward == "drop" or outcome in (Outcome.INFRA_ERROR, Outcome.CANCELLED):
        return Verdict.failure(outcome, error)
    return Verdict(float(failed_reward), error=error)


def effective_reward(state: RolloutState, failed_reward: FailedReward = "drop") -> float | None:
    """Return the reward that a rollout counted for, with `failed_reward` for failures; None if it was dropped. Rewards
    of an attempt before it failed do not count."""
    if state.status is Status.SUCCEEDED:
        return None if state.last is None else state.last.total
    return float(failed_reward) if state.status in FAILED_STATUSES and failed_reward != "drop" else None
