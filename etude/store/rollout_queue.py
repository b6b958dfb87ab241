"""The rollout queue: a trainer enqueues rollouts, runners claim them and report how they ended.

    queue.enqueue ─► queued ─claim─► preparing ─ready─► running ─finish─► succeeded, failed, …  ─► queue.wait
                       ▲                                     │
                       └───────────── a retry ◄──────────────┘

The trainer enqueues rollouts and waits for their ends. Runners claim rollouts, send heartbeats, and report how each
attempt ended. The model endpoint records turns. Everything is written to the journal; everything acknowledged survives
`kill -9`.

`LocalRolloutQueue` (`local_queue`) works on a journal in this process. `RemoteRolloutQueue` (`remote_queue`) calls the
server of another process (`server`). Callers need not know which of the two they use. A new operation is a method of
these three classes, and a request in `requests` or `admin_requests`.

The caller bounds every wait. Times are seconds of a monotonic clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from etude.records import Outcome, Task, Turn
from etude.store.events import Event
from etude.store.rollout_limits import RolloutLimits, RolloutPurpose
from etude.store.states import RolloutState, Status

__all__ = [
    "AttemptId",
    "AttemptReport",
    "Claim",
    "QueueOwner",
    "Reward",
    "RolloutLimits",
    "RolloutPage",
    "RolloutPurpose",
    "RolloutQuery",
    "RolloutQueue",
    "RolloutRequest",
    "RunnerState",
]

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


class RolloutQueue(ABC):
    """The operations of a rollout queue. Any number may run at once, and each may be cancelled at any await.

    An illegal transition raises `IllegalTransitionError`, which names both states. An unknown id raises
    `NotFoundError`.
    """

    # -- for the trainer ----------------------------------------------------------------------------------------------

    @abstractmethod
    async def acquire_lease(self, owner: QueueOwner, epoch: int | None = None, lease_s: float | None = None) -> int:
        """Acquire or renew the lease of the run that owns this queue; return the epoch.

        Without an `epoch` the run takes the queue over and begins a new epoch. Attempts under way end as infrastructure
        errors that do not count against them. Queued rollouts are suspended until the run enqueues them again. With its
        epoch the run renews its lease.

        The lease lasts `lease_s` seconds. None lasts until the queue is closed; 0 releases the lease. Without a valid
        lease the queue assigns no rollouts, and stops those under way; they are retried without being counted.

        An older epoch raises `IllegalTransitionError`. So does a queue that holds the rollouts of another run, or of
        this run in another directory.
        """

    @abstractmethod
    def with_epoch(self, epoch: int) -> RolloutQueue:
        """Return this queue, bound to an epoch: its calls fail once a newer epoch has started.

        This holds for `enqueue`, `cancel`, `wait`, `seal`, `put_resource`, `acquire_lease`, and all writes of attempts.
        Closing the returned queue does not close this one.
        """

    @abstractmethod
    async def enqueue(self, wanted: Sequence[RolloutRequest]) -> list[int]:
        """Queue rollouts, all or none, and return their ids. A new task is issued.

        A rollout that was enqueued before with the same content is not queued again. With other content it is an
        `IllegalTransitionError`.
        """

    @abstractmethod
    async def cancel(self, rollouts: Sequence[int], why: str) -> None:
        """Cancel rollouts and record the reason. Their runners learn of it at the next heartbeat. Rollouts that ended
        stay as they are."""

    @abstractmethod
    async def seal(self, rollouts: Sequence[int]) -> list[RolloutState]:
        """Refuse further rewards for rollouts that ended, and return their states in the order given.

        The trainer seals rollouts before it reads them, so that the rewards it reads are final.
        """

    @abstractmethod
    async def wait(self, cursor: int, timeout_s: float, limit: int = 256) -> tuple[int, list[RolloutState]]:
        """Return the rollouts that ended after `cursor`, in order of their ends, and the next cursor.

        The list is empty if none ended within `timeout_s`. Cursor 0 is the beginning. A cursor stays valid after a
        restart.
        """

    @abstractmethod
    async def find(self, query: RolloutQuery) -> RolloutPage:
        """Return one page of the rollouts that match a query."""

    @abstractmethod
    async def turns(self, rollout: int, attempt: int | None = None) -> list[Turn]:
        """Return the turns of an attempt in order, each with its reward; by default of the last attempt."""

    @abstractmethod
    async def history(self, rollout: int) -> list[Event]:
        """Return all events of a rollout, in the order of the journal."""

    @abstractmethod
    async def notes(self, rollout: int, attempt: int | None = None) -> list[dict[str, Any]]:
        """Return the notes of an attempt in order, each as `{"name", "data", "attempt"}`."""

    # -- for runners --------------------------------------------------------------------------------------------------

    @abstractmethod
    async def claim(self, runner: str, n: int, wait_s: float) -> list[Claim]:
        """Claim up to `n` rollouts. Return as soon as there is one, or none after `wait_s`.

        Rollouts of use `val` are assigned before those of use `train`, so no evaluation waits behind queued training.
        Within a use the longest queued is first. A retry is queued behind the others of its use.
        """

    @abstractmethod
    async def mark_ready(self, key: AttemptId) -> None:
        """Move an attempt from preparing to running. Its first turn, note or reward does the same."""

    @abstractmethod
    async def heartbeat(
        self, runner: str, running: Sequence[AttemptId], info: Mapping[str, Any] | None = None
    ) -> dict[AttemptId, str]:
        """Renew the leases of a runner's attempts; return the attempts that it must stop, with the reasons."""

    @abstractmethod
    async def finish(self, key: AttemptId, report: AttemptReport) -> bool:
        """Report the end of an attempt, and return once it is written.

        Return False if the attempt was over before, by a timeout or a cancellation: the late report is stored and
        changes nothing. A second report with the same content is accepted. One with other content raises
        `IllegalTransitionError`.
        """

    # -- records of a running attempt ---------------------------------------------------------------------------------

    @abstractmethod
    async def record_turn(self, key: AttemptId, turn: Turn, began: float = 0.0) -> int:
        """Write one model call and return its index. The queue assigns the index; the one in `turn` is ignored.

        began: time at which the call was handed to the engine, in seconds since 1970; 0 is unknown.
        """

    @abstractmethod
    async def record_reward(self, key: AttemptId, reward: Reward, turn: int | None = None) -> None:
        """Record the final reward of an attempt, once; or a reward of one of its turns. Rewards of a turn add up."""

    @abstractmethod
    async def record_note(self, key: AttemptId, name: str, data: Any) -> None:
        """Record an event or a span for people to inspect. Training does not depend on it."""

    # -- resources and statistics -------------------------------------------------------------------------------------

    @abstractmethod
    async def put_resource(self, name: str, value: Any) -> int:
        """Write a new version of a resource (any JSON): an endpoint, a prompt template. Return its version number, from
        1."""

    @abstractmethod
    async def get_resource(self, name: str, version: int | None = None) -> tuple[int, Any]:
        """Return the version number and the value of a resource, by default the newest."""

    @abstractmethod
    async def runners(self) -> list[RunnerState]:
        """Return the runners that were active within the last minutes."""

    @abstractmethod
    async def statistics(self) -> dict[str, float]:
        """Return counts of rollouts (`queued`, `running`, each terminal status), of retries and of late results.
        `oldest_queued_s` is the age of the oldest queued rollout in seconds."""

    @abstractmethod
    async def close(self) -> None:
        """Stop the background work, write what is pending, and release the resources."""
