"""The ends of attempts in a rollout queue: by the report of their runner, or by the queue. The rollout then ends too,
or is queued again.

There is one rule for all runners. An attempt that failed by itself is repeated up to the limit of its rollout. One that
an infrastructure error ended is repeated too, and does not count. Nor does one that a stop of the run cut off. An
attempt with tokens of older weights than its rollout may have has met an infrastructure error.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from etude.errors import EtudeError, IllegalTransitionError
from etude.observe import get_logger
from etude.records import Outcome
from etude.running_time import running_time
from etude.store.journal.events import AttemptEnded, AttemptRewarded, Event, LateResultRecorded, TurnRecorded
from etude.store.journal.journal import Transaction
from etude.store.journal.states import LIVE, RolloutState, Status
from etude.store.queue.checks import (
    count_retries,
    get_attempt,
    get_rollout,
    limits_of,
    parse_reward,
    version_error,
)
from etude.store.queue.lease_table import LeaseTable
from etude.store.queue.owner_lease import OwnerLease
from etude.store.queue.records import AttemptEnd, AttemptId, AttemptReport
from etude.store.queue.rollout_limits import RETRIED
from etude.store.queue.waiters import RecentEnds

INTERRUPTED = "The run was stopped while this was under way."
"""The error of an attempt that ended because its run stopped. It never counts against the rollout."""
ENDED = frozenset(Status) - LIVE - {Status.QUEUED}


class AttemptEnds:
    """Ends attempts, and counts how they and their rollouts ended."""

    def __init__(self, work: LeaseTable, owner_lease: OwnerLease, position: int) -> None:
        """position: that of the journal; earlier ends are read there."""
        self._work = work
        self._owner_lease = owner_lease
        self.recent = RecentEnds(position)
        self.counts: Counter[Status] = Counter()
        """Rollouts that ended, by status."""
        self.retries = 0
        self.late = 0
        """Reports that came after the queue had ended the attempt."""
        self.attempts: list[AttemptId] = []
        """Attempts that ended in this round."""
        self._warned = False

    def count(self, state: RolloutState) -> None:
        """Count what the journal has of a rollout."""
        self.late += sum(attempt.late is not None for attempt in state.attempts)
        self.retries += count_retries(state)
        if state.status in ENDED:
            self.counts[state.status] += 1

    def finish(self, txn: Transaction, key: AttemptId, report: AttemptReport) -> bool:
        """Record the report of an attempt's end. Return whether it counts: not if the queue ended the attempt."""
        attempt = get_attempt(txn, key)
        reward, parts = (None, {}) if report.reward is None else parse_reward(report.reward, key)
        rewarded = reward is None or (attempt.reward, attempt.parts) == (reward, parts)
        if attempt.status in LIVE:
            if report.outcome is Outcome.SUCCEEDED and (why := version_error(get_rollout(txn, key.rollout), attempt)):
                self._refuse(txn, key, why)
                return False
            events = [] if rewarded else [AttemptRewarded(*key, reward or 0.0, parts)]
            self.end(
                txn,
                key,
                report.outcome,
                report.error,
                before=events,
                truncated=report.truncated,
                role=report.role,
            )
            return True
        result = {"outcome": report.outcome, "error": report.error, "reward": reward, "parts": parts}
        if attempt.ended_by_queue:
            if attempt.late != result:
                txn.append([LateResultRecorded(*key, report.outcome, report.error, reward, parts)])
                self.late += 1
            return False
        if (attempt.status, attempt.error) != (Status(report.outcome), report.error) or not rewarded:
            raise IllegalTransitionError(
                f"Attempt {key.attempt} of rollout {key.rollout} was reported as {attempt.status} (reward "
                f"{attempt.reward}), and cannot become {report.outcome} (reward {reward})."
            )
        return True

    def finish_own(self, txn: Transaction, ends: Sequence[AttemptEnd]) -> list[RolloutState | EtudeError]:
        """Record the ends of attempts by the run's own runner. Return the state of each rollout then, or the error of
        an end that was refused; it affects no other."""
        return [self._finish_own(txn, end) for end in ends]

    def _finish_own(self, txn: Transaction, end: AttemptEnd) -> RolloutState | EtudeError:
        key = end.attempt_id
        try:
            if get_attempt(txn, key).status in LIVE:
                rewards = [_reward_of(end)] if end.outcome is Outcome.SUCCEEDED else []
                txn.append([TurnRecorded(*key, each.turn, each.at, each.began) for each in end.turns])
                state = get_rollout(txn, key.rollout)
                if rewards and (why := version_error(state, state.attempts[key.attempt])):
                    self._refuse(txn, key, why)
                else:
                    self.end(txn, key, end.outcome, end.error, before=rewards)
            return get_rollout(txn, key.rollout)
        except EtudeError as error:
            return error

    def end(
        self,
        txn: Transaction,
        key: AttemptId,
        outcome: Outcome,
        error: str,
        *,
        before: Sequence[Event] = (),
        ended_by_queue: bool = False,
        truncated: bool = False,
        role: int = 0,
    ) -> None:
        """End an attempt, and end its rollout or queue it again. ended_by_queue: not its runner ends
        it, but the queue."""
        state = get_rollout(txn, key.rollout)
        limits, interrupted = limits_of(state), error == INTERRUPTED
        counted = state.attempts[state.forgiven : -1]
        outcomes = [Outcome(attempt.status) for attempt in counted if attempt.error != INTERRUPTED]
        retry = interrupted or (outcome in RETRIED and limits.allows_retry([*outcomes, outcome]))
        ended = AttemptEnded(*key, outcome, error, retry, ended_by_queue, time.time(), truncated, role)
        position = txn.append([*before, ended])
        self._work.leases.pop(key, None)
        self.attempts.append(key)
        if not retry:
            self.end_rollout(position, key.rollout, Status(outcome))
            return
        self.retries += 1
        if outcome is Outcome.INFRA_ERROR and not interrupted and self._owner_lease.has_timeout:
            self._work.awaiting_owner.append(key.rollout)
        else:
            self._work.enqueue(key.rollout, state.use, limits, running_time())

    def interrupt_all(self, keys: Sequence[AttemptId]) -> list[Event]:
        """Return the events that end these attempts because their run stopped. The caller writes them, and removes the
        leases."""
        at = time.time()
        self.retries += len(keys)
        self.attempts += keys
        return [
            AttemptEnded(*key, Outcome.INFRA_ERROR, INTERRUPTED, retry=True, ended_by_queue=True, at=at) for key in keys
        ]

    def end_rollout(self, position: int, rollout: int, status: Status) -> None:
        """Count a rollout that ended with the event at this position."""
        self.counts[status] += 1
        self.recent.add(position, rollout)

    def _refuse(self, txn: Transaction, key: AttemptId, why: str) -> None:
        """End an attempt with tokens of older weights than its rollout may have."""
        if not self._warned:
            self._warned = True
            get_logger("store").warning(
                "%s Rollout %d, and any other one like it, counts as an infrastructure error, and no step trains on "
                "it. Look at the servers' logs: one of them has older weights than it was sent. This is logged once.",
                why,
                key.rollout,
            )
        self.end(txn, key, Outcome.INFRA_ERROR, why, ended_by_queue=True)


def _reward_of(end: AttemptEnd) -> AttemptRewarded:
    paid = sum((each.turn.reward for each in end.turns if each.turn.reward is not None), 0.0)
    return AttemptRewarded(*end.attempt_id, end.reward, end.parts, end.truncated, paid, end.role, end.extracted)
