"""The owner of a rollout queue: the run whose rollouts it holds, the run's epoch, and its lease.

A run that takes the queue over begins a new epoch. Attempts that ended in an earlier epoch count; calls from that epoch
are refused. The run keeps its lease by renewing it. Without a valid lease the queue assigns no rollouts, since runners
need the model that the run serves.

A queue that is opened again assigns rollouts only after its owner renewed the lease. Attempts under way may continue
until the lease expires.
"""

from __future__ import annotations

import math
from typing import Any

from etude.errors import IllegalTransitionError
from etude.store.journal.states import ResourceState
from etude.store.queue.records import QueueOwner

OWNER_RESOURCE = "owner"
"""The resource that records the owner. Its version is the number of the epoch. Agents do not receive it."""


class OwnerLease:
    """The owner, its epoch and its lease. The caller passes the time."""

    def __init__(self) -> None:
        self.epoch = 0
        """Number of the epoch, from 1; 0 if the queue never had an owner. Such a queue assigns rollouts without a
        lease."""
        self._owner: QueueOwner | None = None
        self._lease_s: float | None = None
        self._until = -math.inf
        self._renewed_at = -math.inf
        """Time of the last renewal since this queue was opened."""

    def restore(self, resource: ResourceState | None, now: float) -> None:
        """Restore the owner from its resource."""
        if resource is None:
            self.epoch = 0
            self._owner = None
        elif resource.version != self.epoch:
            value = resource.value
            self.epoch = resource.version
            self._renewed_at = -math.inf
            self._owner = QueueOwner(value["run"], value["where"])
            self._lease_s = value["lease_s"]
            self._until = -math.inf if self._lease_s is None else now + self._lease_s

    def begin_epoch(self, owner: QueueOwner, lease_s: float | None, now: float, *, empty: bool) -> dict[str, Any]:
        """Begin a new epoch, unless that is refused; return the value of the owner's resource. empty: whether the queue
        has no rollouts."""
        self._refuse(owner, now, empty)
        self.epoch = self.epoch + 1
        self._owner = owner
        self.renew(lease_s, now)
        return {"run": owner.run, "where": owner.where, "lease_s": lease_s}

    def release(self) -> dict[str, Any] | None:
        """End the epoch, so that the same run may begin another in another directory; return the value of the owner's
        resource."""
        if self._owner is None:
            return None
        self.epoch += 1
        self._owner = QueueOwner(self._owner.run, "")
        self._lease_s = None
        self._until = -math.inf
        return {"run": self._owner.run, "where": "", "lease_s": None}

    def check(self, epoch: int) -> None:
        """Refuse a call of another epoch than the present one."""
        if epoch != self.epoch:
            where = self._owner.where if self._owner is not None and self._owner.where else "another place"
            raise IllegalTransitionError(
                f"This call is from epoch {epoch} of the run, and the run was resumed in {where} since, which began "
                f"epoch {self.epoch}. Let that one continue, and end this one."
            )

    def renew(self, lease_s: float | None, now: float) -> None:
        """Renew the lease for so many seconds; None lasts until the queue is closed."""
        self._lease_s = lease_s
        self._renewed_at = now
        self._until = math.inf if lease_s is None else now + lease_s

    def is_valid(self, now: float) -> bool:
        """Return whether attempts under way may continue."""
        return self.epoch == 0 or now < self._until

    def allows_claims(self, now: float) -> bool:
        """Return whether rollouts may be assigned now."""
        return self.epoch == 0 or (self._renewed_at > -math.inf and now < self._until)

    @property
    def has_timeout(self) -> bool:
        """True if the lease expires unless it is renewed."""
        return self.epoch > 0 and self._lease_s is not None

    def _refuse(self, owner: QueueOwner, now: float, empty: bool) -> None:
        known = self._owner
        if known is None or known == owner or (known.run == owner.run and not known.where):
            return
        if known.run == owner.run:
            raise IllegalTransitionError(
                f"This run is already active in {known.where}, and was started in {owner.where} too. Each of the two "
                "would train on half of the rollouts. Continue the other one; or, if the run has moved here, start the "
                "store once with `etude store … --give-over`."
            )
        if not empty or now < self._until:
            raise IllegalTransitionError(
                f"The store holds the rollouts of another run, {known.where or known.run}. Start a separate store for "
                "this run: `etude store DIRECTORY`."
            )
