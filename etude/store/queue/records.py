"""The records that a rollout queue takes and returns.

`etude.store.http.json_records` has their form in a request or a reply.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from etude.records import Outcome, Task
from etude.store.journal.states import RolloutState, Status
from etude.store.queue.rollout_limits import RolloutLimits, RolloutPurpose

Reward: TypeAlias = "float | Mapping[str, float]"
"""A number, or named parts whose sum is the reward."""


class AttemptId(NamedTuple):
    """A rollout and the index of one attempt at it."""

    rollout: int
    attempt: int


class QueueOwner(NamedTuple):
    """A run whose rollouts are in the queue."""

    run: str
    """Name of the run. A copy of the run has the same name."""
    where: str
    """Directory of the run. It distinguishes the run from a copy."""


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """A rollout to enqueue. A second request with the same id does not queue it again."""

    task: Task
    sample: int = 0
    """Index of this sample within its task's group."""
    id: int | None = None
    """Id of the rollout. With None the queue assigns one."""
    use: RolloutPurpose = "train"
    limits: RolloutLimits = field(default_factory=RolloutLimits)


@dataclass(frozen=True, slots=True)
class Claim:
    """A rollout that a runner has claimed and must execute."""

    attempt_id: AttemptId
    task: Task
    use: RolloutPurpose
    limits: RolloutLimits
    resources: Mapping[str, Any]
    """The newest version of each resource, by name. `endpoint` holds the model's address (`base_url`, `model`)."""
    model_key: str
    """Key with which an agent calls the model as this attempt, and as no other."""
    reward_key: str
    """Key with which an agent writes rewards and events of this attempt."""


@dataclass(frozen=True, slots=True)
class AttemptReport:
    """The end of an attempt, as its runner reports it."""

    outcome: Outcome
    error: str = ""
    reward: Reward | None = None
    """The final reward, unless it was recorded before."""


@dataclass(frozen=True, slots=True)
class RolloutQuery:
    """A filter over rollouts. A field left at its default filters nothing."""

    statuses: tuple[Status, ...] = ()
    tasks: tuple[int, ...] = ()
    ids: tuple[int, ...] = ()
    use: RolloutPurpose | None = None
    sort: Literal["id", "-id"] = "id"
    after: int | None = None
    """Return only rollouts that follow this id, in the order of `sort`."""
    limit: int = 100


@dataclass(frozen=True, slots=True)
class RolloutPage:
    """One page of a query's result, at most `limit` rollouts. If `more` is true, query again with `after` set to the
    last id."""

    rollouts: tuple[RolloutState, ...]
    more: bool


@dataclass(frozen=True, slots=True)
class RunnerState:
    """A runner, as of its last heartbeat or claim."""

    name: str
    running: tuple[AttemptId, ...]
    silent_s: float
    info: Mapping[str, Any] = field(default_factory=dict)
    """Data that the runner reports about itself."""
