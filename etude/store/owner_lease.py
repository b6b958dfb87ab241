"""Who keeps a desk: the run whose rollouts are played there, in which of its lives, and for how long it is known to be
there.

A run that takes a desk up begins a life of its keeping. What counts of an earlier life is what ended in it; its words
are refused from then on. A life lasts for as long as it is renewed: while it does not, nothing is lent, since whoever
plays needs the model that the run serves. A desk that is opened again lends only once its keeper was heard there; what
is under way may go on for as long as the keeper has to say so.
"""

from __future__ import annotations

import math
from typing import Any

from etude.errors import IllegalTransitionError
from etude.store.rollout_queue import QueueOwner
from etude.store.states import ResourceState

__all__ = ["OWNER_RESOURCE", "OwnerLease"]

OWNER_RESOURCE = "owner"
"""The resource that says so. Its version is the number of the life; it is none that agents are given."""


class OwnerLease:
    """Of the present life, or of none. It is told the time."""

    def __init__(self) -> None:
        self.epoch = 0
        """Its number, from 1; 0 where nobody has ever kept the desk, which then lends to everybody."""
        self._owner: QueueOwner | None = None
        self._lease_s: float | None = None
        self._until = -math.inf
        self._renewed_at = -math.inf
        """When it was last heard at this desk, since that was opened."""

    def restore(self, resource: ResourceState | None, now: float) -> None:
        """Stand as it is written."""
        if resource is None:
            self.epoch, self._owner = 0, None
        elif resource.version != self.epoch:
            value = resource.value
            self.epoch, self._renewed_at = resource.version, -math.inf
            self._owner = QueueOwner(value["run"], value["where"])
            self._lease_s = value["lease_s"]
            self._until = -math.inf if self._lease_s is None else now + self._lease_s

    def begin_epoch(self, owner: QueueOwner, lease_s: float | None, now: float, *, empty: bool) -> dict[str, Any]:
        """Begin another life, unless that is refused; what is to be written of it. empty: whether the desk has no
        rollouts."""
        self._refuse(owner, now, empty)
        self.epoch, self._owner = self.epoch + 1, owner
        self.renew(lease_s, now)
        return {"run": owner.run, "where": owner.where, "lease_s": lease_s}

    def release(self) -> dict[str, Any] | None:
        """End the life, so that the same run may begin another in another place; what is to be written of it."""
        if self._owner is None:
            return None
        self.epoch, self._owner, self._lease_s, self._until = (
            self.epoch + 1,
            QueueOwner(self._owner.run, ""),
            None,
            -math.inf,
        )
        return {"run": self._owner.run, "where": "", "lease_s": None}

    def check(self, epoch: int) -> None:
        """Refuse the word of another life than the present one."""
        if epoch != self.epoch:
            where = self._owner.where if self._owner is not None and self._owner.where else "another place"
            raise IllegalTransitionError(
                f"This is said in life {epoch} of a run whose rollouts are kept here, and it was taken up in {where} "
                f"since: that is life {self.epoch}. Let that one go on, and end this one."
            )

    def renew(self, lease_s: float | None, now: float) -> None:
        """The keeper is there, for so long from now on; None is until the desk is closed."""
        self._lease_s, self._renewed_at = lease_s, now
        self._until = math.inf if lease_s is None else now + lease_s

    def extend(self, seconds: float, since: float) -> None:
        """Nobody could be heard for so long since then; whoever was heard afterwards is not given more."""
        if self._renewed_at <= since:
            self._until += seconds

    def is_valid(self, now: float) -> bool:
        """Whether what is under way may go on."""
        return self.epoch == 0 or now < self._until

    def allows_claims(self, now: float) -> bool:
        """Whether anything may be lent now."""
        return self.epoch == 0 or (self._renewed_at > -math.inf and now < self._until)

    @property
    def has_timeout(self) -> bool:
        """Whether it lasts only as long as it is renewed."""
        return self.epoch > 0 and self._lease_s is not None

    def _refuse(self, owner: QueueOwner, now: float, empty: bool) -> None:
        known = self._owner
        if known is None or known == owner or (known.run == owner.run and not known.where):
            return
        if known.run == owner.run:
            raise IllegalTransitionError(
                f"This run was taken up in {known.where}, and now in {owner.where}. Two that train the same run would "
                "each train on half of its rollouts: go on with the other; or, if the run has moved here, begin the "
                "store once with `etude store … --give-over`."
            )
        if not empty or now < self._until:
            raise IllegalTransitionError(
                f"The store keeps the rollouts of another run, {known.where or known.run}. Give this one a store of "
                "its own: `etude store DIRECTORY`."
            )
