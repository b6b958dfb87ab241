"""The state of a rollout queue: each operation writes its events and updates the open work held in memory.

One thread (`writer_thread`) calls all of it, inside a transaction. An operation first appends its events, which refuses
an illegal one; then it updates the memory. If the transaction fails, the memory is rebuilt from the journal. It is only
a part of it: queued rollouts, leases and the last ends.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from etude.errors import DataError, NotFoundError
from etude.observe import get_logger
from etude.records import Outcome, Task
from etude.running_time import running_time
from etude.store.journal.events import (
    AttemptReady,
    AttemptStarted,
    Event,
    ResourcePut,
    RolloutCancelled,
    RolloutExpired,
    RolloutResumed,
    RolloutSealed,
)
from etude.store.journal.journal import Journal, Transaction
from etude.store.journal.json_values import to_json_value
from etude.store.journal.states import Phase, ResourceState, RolloutState, Status, TaskState
from etude.store.queue.attempt_ends import ENDED, INTERRUPTED, AttemptEnds
from etude.store.queue.checks import (
    check_versions,
    conflict_error,
    count_drawn,
    get_attempt,
    get_rollout,
    is_already_queued,
    is_same_task,
    issue_task,
    limits_of,
    queue_rollout,
    stop_reason,
)
from etude.store.queue.lease_table import Deadline, LeaseTable
from etude.store.queue.owner_lease import OWNER_RESOURCE, OwnerLease
from etude.store.queue.records import (
    OWN_RUNNER,
    AttemptId,
    LeasedAttempt,
    QueueOwner,
    RolloutRequest,
    RunnerState,
    StopOrder,
)
from etude.store.queue.waiters import PendingClaim, PendingWait, RunnerRegistry
from etude.store.queue.writer_thread import DEFERRED, PendingResult, Reply

FARTHEST = 2**62
"""The largest id that a caller may give; it leaves room for more."""


class QueueState:
    """The operations of the queue, and the open work in memory."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.owner_lease = OwnerLease()
        self.resources: dict[str, tuple[int, Any]] = {}
        """The newest version number and value of each resource. Other threads read it, so nothing may change a value in
        place."""
        self._claims: deque[PendingClaim] = deque()
        self._waits: list[PendingWait] = []
        self._runners = RunnerRegistry(self._log)
        self.on_attempts_ended: Callable[[Sequence[AttemptId]], None] | None = None
        """Called with attempts that ended, after their commit, on the writer thread. It must not block."""
        self.reload()

    def reload(self) -> None:
        """Rebuild the memory from the journal. Runners keep their attempts, and get time to send a heartbeat."""
        now = running_time()
        for claim in self._claims:
            claim.leased.clear()  # the assignment was not written, so no runner has it
        self.resources = {
            state.name: (state.version, state.value) for state in self._journal.iter_states(ResourceState)
        }
        self.owner_lease.restore(self._journal.resource(OWNER_RESOURCE), now)
        self._work = LeaseTable()
        self.ends = AttemptEnds(self._work, self.owner_lease, self._journal.position)
        self._next_id = 0
        for state in self._journal.iter_states(RolloutState):
            self._next_id = state.id + 1
            self.ends.count(state)
            if state.status is Status.QUEUED and self.owner_lease.epoch not in (0, state.epoch):
                self._work.suspended.add(state.id)
            elif state.status is Status.QUEUED:
                self._work.enqueue(state.id, state.use, limits_of(state), now)
            elif state.status is Status.RUNNING:
                key = AttemptId(state.id, len(state.attempts) - 1)
                self._work.start_lease(key, state.attempts[-1].runner, limits_of(state), now)

    # -- for the trainer ----------------------------------------------------------------------------------------------

    def acquire_lease(self, txn: Transaction, owner: QueueOwner, epoch: int | None, lease_s: float | None) -> int:
        """Acquire or renew the lease of the run that owns the queue; return the epoch."""
        now = running_time()
        if epoch is None:
            value = self.owner_lease.begin_epoch(owner, lease_s, now, empty=self._next_id == 0)
            self._begin_epoch(txn, value)
            self._log("The run in %s owns the queue now; this is epoch %d.", owner.where, self.owner_lease.epoch)
        else:
            self.owner_lease.check(epoch)
            if lease_s == 0:
                self._log("The run in %s released its lease; no rollouts are assigned until it is back.", owner.where)
            self.owner_lease.renew(lease_s, now)
            postponed = self._work.awaiting_owner
            self._work.awaiting_owner = []
            for state in (get_rollout(txn, id) for id in postponed):
                self._work.enqueue(state.id, state.use, limits_of(state), now)
        return self.owner_lease.epoch

    def _log(self, message: str, *args: object) -> None:
        """Log runs and runners that come and go. For a run's private queue this is debug output only."""
        is_private = self.owner_lease.epoch > 0 and not self.owner_lease.has_timeout
        get_logger("store").log(logging.DEBUG if is_private else logging.INFO, message, *args)

    def release_owner(self, txn: Transaction) -> None:
        """Let the run that owns the queue take it over from another directory."""
        if (value := self.owner_lease.release()) is not None:
            self._begin_epoch(txn, value)

    def _begin_epoch(self, txn: Transaction, value: dict[str, Any]) -> None:
        """End the attempts of the epoch before, and suspend the queued rollouts until they are enqueued again."""
        txn.append(self.ends.interrupt_all(list(self._work.leases)))
        self._put(txn, OWNER_RESOURCE, value)
        self._work.suspend_all()

    def enqueue(self, txn: Transaction, wanted: Sequence[RolloutRequest]) -> list[int]:
        """Queue rollouts, all or none, and return their ids."""
        events: list[Event] = []
        tasks: dict[int, Task] = {}
        new: dict[int, RolloutRequest] = {}
        resumed: set[int] = set()
        ids, next_id = [], self._next_id
        for request in wanted:
            ordinal = request.task.ordinal
            if ordinal not in tasks:
                events += issue_task(txn, request.task, request.use)
            elif not is_same_task(tasks[ordinal], request.task):
                raise conflict_error(f"Task {ordinal}", "issued")
            tasks[ordinal] = request.task
            id = next_id if request.id is None else request.id
            if not 0 <= id <= FARTHEST:
                raise DataError(f"The id of a rollout is {id}; it must be a number from 0 to {FARTHEST}.")
            next_id = max(next_id, id + 1)
            ids.append(id)
            if is_already_queued(txn, new, id, request):
                if id in self._work.suspended and id not in resumed:
                    resumed.add(id)
                    state = get_rollout(txn, id)
                    forgiven = len(state.attempts) if request.forgive else state.forgiven
                    events.append(RolloutResumed(id, self.owner_lease.epoch, request.floor, forgiven))
                continue
            check_versions(request.resources, self.resources)
            new[id] = request
            events.append(queue_rollout(id, request, self.owner_lease.epoch))
        txn.append(events)
        self._next_id = next_id
        now = running_time()
        for id, request in zip(ids, wanted, strict=True):
            if id in new or id in resumed:
                self._work.enqueue(id, request.use, request.limits, now)
        return ids

    def cancel(self, txn: Transaction, rollouts: Sequence[int], why: str) -> None:
        """Cancel rollouts that have not ended."""
        if not why.strip():
            raise DataError(
                "The reason of the cancellation is empty. Give one: the runners receive it, and the journal records it."
            )
        states = [get_rollout(txn, id) for id in dict.fromkeys(rollouts)]
        events = [RolloutCancelled(state.id, why) for state in states if state.phase in (Phase.QUEUED, Phase.RUNNING)]
        last = txn.append(events)
        for index, event in enumerate(events):
            id = event.rollout
            self._work.remove(id)
            key = AttemptId(id, len(get_rollout(txn, id).attempts) - 1)
            self._work.leases.pop(key, None)
            self.ends.attempts.append(key)
            self.ends.end_rollout(last - len(events) + 1 + index, id, Status.CANCELLED)

    def seal(self, txn: Transaction, rollouts: Sequence[int]) -> list[RolloutState]:
        """Refuse further rewards for rollouts, and return their states."""
        states = [get_rollout(txn, id) for id in dict.fromkeys(rollouts)]
        txn.append([RolloutSealed(state.id) for state in states if not state.sealed and state.closed is None])
        return [get_rollout(txn, id) for id in rollouts]

    def add_wait(self, wait: PendingWait, txn: Transaction, promise: PendingResult) -> Any:
        """Return the ends after a cursor as pairs of position and rollout, now or as soon as there is one. Return None
        if they are no longer in memory: the caller then reads the journal."""
        if wait.cursor > (newest := txn.start + len(txn.records)):
            raise NotFoundError(f"The journal ends at {newest}, so it has no cursor {wait.cursor}: begin with 0.")
        if wait.cursor < self.ends.recent.floor:
            return None
        if ends := self.ends.recent.after(wait):
            return ends
        wait.promise = promise
        self._waits.append(wait)
        return DEFERRED

    # -- for runners --------------------------------------------------------------------------------------------------

    def add_claim(self, claim: PendingClaim, _: Transaction, promise: PendingResult) -> Any:
        """Add a runner's claim. It is answered when there is work, or at its deadline."""
        if claim.runner != OWN_RUNNER:
            self._runners.record_heartbeat(claim.runner)
        claim.promise = promise
        self._claims.append(claim)
        return DEFERRED

    def cancel_claim(self, txn: Transaction, claim: PendingClaim) -> None:
        """Cancel the claim of a disconnected runner. Attempts already assigned to it are queued again."""
        claim.is_cancelled = True
        for attempt in claim.leased:
            if attempt.attempt_id in self._work.leases:
                why = f"The runner '{claim.runner}' disconnected while it was claiming this."
                self.ends.end(txn, attempt.attempt_id, Outcome.INFRA_ERROR, why, ended_by_queue=True)

    def ready(self, txn: Transaction, key: AttemptId) -> None:
        """Move an attempt to running. A second call changes nothing."""
        if get_attempt(txn, key).status is not Status.RUNNING:
            txn.append([AttemptReady(*key)])
        self._work.record_heartbeat(key, running_time())

    def heartbeat(
        self, txn: Transaction, runner: str, running: Sequence[AttemptId], info: Mapping[str, Any] | None
    ) -> list[StopOrder]:
        """Renew the leases of a runner's attempts; return the attempts that it must stop, with the reasons."""
        self._runners.record_heartbeat(runner, info)
        now, stop = running_time(), list[StopOrder]()
        for key in running:
            lease = self._work.leases.get(key)
            if lease is not None and lease.runner == runner:
                lease.last_heartbeat = now
            elif lease is not None:
                stop.append(StopOrder(key, f"The runner '{lease.runner}' has the lease of this attempt."))
            else:
                stop.append(StopOrder(key, stop_reason(txn, key)))
        return stop

    # -- resources and statistics -------------------------------------------------------------------------------------

    def put_resource(self, txn: Transaction, name: str, value: Any) -> int:
        """Write a new version of a resource and return its version number."""
        if name == OWNER_RESOURCE:
            raise DataError(f"The resource '{OWNER_RESOURCE}' records the queue's owner, and only the queue writes it.")
        return self._put(txn, name, value)

    def _put(self, txn: Transaction, name: str, value: Any) -> int:
        newest = txn.state(ResourceState, ResourceState.id_of(name))
        version = 1 if newest is None else newest.version + 1
        put = ResourcePut(name, version, value)
        txn.append([put])
        self.resources[name] = version, put.value
        return version

    def runners(self) -> list[RunnerState]:
        """Return the runners that were active lately, with their leased attempts."""
        leases = ((lease.runner, key) for key, lease in self._work.leases.items())
        return self._runners.states(leases, running_time())

    def statistics(self) -> dict[str, float]:
        """Return counts of rollouts, retries and late results, and the age of the oldest queued rollout."""
        now = running_time()
        ended = {str(status): float(self.ends.counts[status]) for status in Status if status in ENDED}
        return {
            "queued": float(self._work.num_queued + len(self._work.suspended) + len(self._work.awaiting_owner)),
            "running": float(len(self._work.leases)),
            **ended,
            "retries": float(self.ends.retries),
            "late": float(self.ends.late),
            "oldest_queued_s": now - (self._work.queued_since() or now),
        }

    # -- called once in each round of the writer thread ---------------------------------------------------------------

    def before_commit(self, txn: Transaction, now: float, replies: list[Reply]) -> None:
        """End attempts beyond their limits, assign queued rollouts to claims, and answer waits that are over."""
        if self._work.leases and not self.owner_lease.is_valid(now):
            get_logger("store").warning("The run's lease expired: %d attempts are stopped.", len(self._work.leases))
            for key in list(self._work.leases):
                self.ends.end(txn, key, Outcome.INFRA_ERROR, INTERRUPTED, ended_by_queue=True)
        for deadline in list(self._work.pop_due(now)):
            self._expire(txn, deadline)
        self._assign(txn, now, replies)
        self._answer_waits(now, replies)
        self._runners.forget(now)

    def after_commit(self) -> None:
        """Report the attempts that ended to the callback."""
        if self.ends.attempts:
            ended = self.ends.attempts
            self.ends.attempts = []
            try:
                if self.on_attempts_ended is not None:
                    self.on_attempts_ended(ended)
            except Exception:  # an error of the callback must not stop the queue
                get_logger("store").exception("The callback for ended attempts failed.")

    def next_deadline(self) -> float | None:
        """Return the time of the next round, if no call comes before."""
        times = [claim.until for claim in self._claims]
        times += [wait.until for wait in self._waits]
        if (deadline := self._work.next_deadline()) is not None:
            times.append(deadline)
        return min(times, default=None)

    def pending_promises(self) -> list[PendingResult]:
        """Return the promises of all pending claims and waits."""
        promises = [*(claim.promise for claim in self._claims), *(wait.promise for wait in self._waits)]
        return [promise for promise in promises if promise is not None]

    def _expire(self, txn: Transaction, deadline: Deadline) -> None:
        """End a rollout or an attempt that passed its limit."""
        if deadline.cause == "queue":
            state, now = get_rollout(txn, deadline.attempt_id.rollout), running_time()
            limits = limits_of(state)
            if not self.owner_lease.allows_claims(now):  # while nothing is assigned, no rollout expires
                self._work.enqueue(state.id, state.use, limits, now)
                return
            why = f"It waited in the queue for {limits.queue_timeout_s:g} s."
            position = txn.append([RolloutExpired(state.id, why)])
            self._work.remove(state.id)
            self.ends.end_rollout(position, state.id, Status.FAILED)
            return
        lease = self._work.leases.get(deadline.attempt_id)
        if lease is None:  # the attempt passed both its limits at once
            return
        if deadline.cause == "time":
            why = f"It was not finished {lease.limits.timeout_s:g} s after it was claimed."
            self.ends.end(txn, deadline.attempt_id, Outcome.TIMED_OUT, why, ended_by_queue=True)
        else:
            why = f"Its runner '{lease.runner}' sent nothing for {lease.limits.unresponsive_s:g} s."
            self.ends.end(txn, deadline.attempt_id, Outcome.UNRESPONSIVE, why, ended_by_queue=True)

    def _assign(self, txn: Transaction, now: float, replies: list[Reply]) -> None:
        """Assign queued rollouts, those of use `val` first, to the oldest claims."""
        waiting: deque[PendingClaim] = deque()
        allowed = self.owner_lease.allows_claims(now)
        for claim in self._claims:
            assert claim.promise is not None
            if claim.is_cancelled or claim.promise.answered or claim.promise.future.done():
                continue
            while allowed and len(claim.leased) < claim.n and (id := self._work.next_queued()) is not None:
                claim.leased.append(self._assign_rollout(txn, id, claim.runner, now))
            if claim.leased or claim.until <= now:
                if claim.runner != OWN_RUNNER:
                    self._runners.record_heartbeat(claim.runner)
                replies.append((claim.promise, claim.leased, None))
            else:
                waiting.append(claim)
        self._claims = waiting

    def _assign_rollout(self, txn: Transaction, id: int, runner: str, now: float) -> LeasedAttempt:
        state = get_rollout(txn, id)
        key = AttemptId(id, len(state.attempts))
        txn.append([AttemptStarted(*key, runner, time.time())])
        self._work.start_lease(key, runner, limits_of(state), now)
        task = txn.state(TaskState, state.task)
        assert task is not None, f"rollout {id} belongs to task {state.task}, which has no state"
        fields = to_json_value(task.fields, "fields")  # a copy, since the runner may change it
        return LeasedAttempt(
            key,
            Task(task.id, fields, task.source),
            state.use,
            limits_of(state),
            state.sample,
            state.greedy,
            count_drawn(state),
            state.resources,
        )

    def _answer_waits(self, now: float, replies: list[Reply]) -> None:
        waiting: list[PendingWait] = []
        for wait in self._waits:
            assert wait.promise is not None
            ends = self.ends.recent.after(wait)
            if ends or wait.until <= now:
                replies.append((wait.promise, ends, None))
            elif not (wait.promise.answered or wait.promise.future.done()):
                waiting.append(wait)
        self._waits = waiting
