"""The states of tasks, rollouts, attempts, steps and resources, with their JSON form.

No caller sets a state: each follows from the events, by the rules of `transitions`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import Any, ClassVar, Self, TypeAlias, TypeVar

from etude.records import Task
from etude.store.queue.rollout_limits import RolloutLimits, RolloutPurpose


class Status(StrEnum):
    """The status of a rollout or an attempt. An attempt is never queued. A rollout is running while its attempt is
    being prepared."""

    QUEUED = "queued"
    PREPARING = "preparing"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    UNRESPONSIVE = "unresponsive"
    CANCELLED = "cancelled"
    INFRA_ERROR = "infra_error"


LIVE = frozenset({Status.PREPARING, Status.RUNNING})
"""The statuses of an attempt that is not over."""


class Phase(StrEnum):
    """The work that remains for a rollout or a task; the store indexes states by it."""

    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"
    """It ended and its task is open: a step may still train on it."""
    ADMITTED = "admitted"
    """A step trained on it."""
    DROPPED = "dropped"
    """No step will train on it."""
    OPEN = "open"
    """A task that is neither admitted nor dropped."""


class _Stored:
    """A state with its JSON form."""

    __slots__: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The fields, as they go into JSON."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> Self:
        """Restore the state from its JSON fields."""
        return cls(**document)


@dataclass(frozen=True, slots=True)
class AttemptState(_Stored):
    """The state of one attempt at a rollout."""

    status: Status = Status.RUNNING
    turns: int = 0
    """Number of recorded turns."""
    reward: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    truncated: bool = False
    error: str = ""
    paid: float = 0.0
    """Sum of turn rewards, in addition to `reward`."""
    role: int = 0
    extracted: str | None = None
    """The answer that the reward extracts from the text of an answer that scores the model."""
    oldest: int | None = None
    """The oldest version among the tokens that the policy wrote; None without one."""
    runner: str = ""
    """The runner that claimed it; empty if the run that queued it executes it."""
    ended_by_queue: bool = False
    """True if the rollout queue ended it (a timeout, a silent runner, a cancellation), and not its runner."""
    late: Mapping[str, Any] | None = None
    """The report that came after that: `outcome`, `error`, `reward`, `parts`. No state depends on it."""

    @property
    def total(self) -> float | None:
        """The sum of all rewards, once the final one is recorded."""
        return None if self.reward is None else self.reward + self.paid


@dataclass(frozen=True, slots=True)
class RolloutState(_Stored):
    """The state of one rollout of a task."""

    kind: ClassVar[str] = "rollout"

    id: int
    task: int
    sample: int
    status: Status
    attempts: tuple[AttemptState, ...] = ()
    why: str = ""
    """Reason of its cancellation or expiry."""
    closed: Phase | None = None
    """`ADMITTED` or `DROPPED`, once its task is closed."""
    use: RolloutPurpose = "train"
    limits: RolloutLimits | None = None
    """Limits that the rollout queue enforces."""
    epoch: int = 0
    """Epoch of the owning run that enqueued it last."""
    sealed: bool = False
    """True if its run has read it, so that its agent can record no more rewards."""
    greedy: bool = False
    """True if each token is the most probable one."""
    floor: int = 0
    """No token of it can be of a lower policy version."""
    forgiven: int = 0
    """Number of its first attempts that do not count, because code has changed since."""
    resources: Mapping[str, int] = field(default_factory=dict)
    """The versions of resources that each of its attempts gets, by name."""

    @property
    def phase(self) -> Phase:
        """The work that remains for it."""
        if self.closed is not None:
            return self.closed
        return Phase(self.status) if self.status in (Status.QUEUED, Status.RUNNING) else Phase.FINISHED

    @property
    def last(self) -> AttemptState | None:
        """The attempt that counts: the newest one."""
        return self.attempts[-1] if self.attempts else None

    def to_dict(self) -> dict[str, Any]:
        document = _Stored.to_dict(self)
        attempts = [attempt.to_dict() for attempt in self.attempts]
        return document | {"attempts": attempts, "limits": self.limits and self.limits.to_dict()}

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> Self:
        attempts = (AttemptState(**changed | {"status": Status(changed["status"])}) for changed in document["attempts"])
        closed = document["closed"] and Phase(document["closed"])
        changed = {"status": Status(document["status"]), "attempts": tuple(attempts), "closed": closed}
        limits = document["limits"]
        return cls(**document | changed | {"limits": limits and RolloutLimits.from_dict(limits)})


@dataclass(frozen=True, slots=True)
class TaskState(_Stored):
    """The state of a task, with its rollouts."""

    kind: ClassVar[str] = "task"

    id: int
    """Its ordinal."""
    row: int
    source: str
    fields: Mapping[str, Any]
    phase: Phase = Phase.OPEN
    """`OPEN`, `ADMITTED` or `DROPPED`."""
    rollouts: tuple[int, ...] = ()
    step: int | None = None
    """The step that admitted or dropped it."""
    cause: str = ""
    """Reason for which it was dropped."""
    use: RolloutPurpose = "train"

    @property
    def task(self) -> Task:
        """The task as a record."""
        return Task(self.id, self.fields, self.source)

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> Self:
        return cls(**document | {"phase": Phase(document["phase"]), "rollouts": tuple(document["rollouts"])})


@dataclass(frozen=True, slots=True)
class StepState(_Stored):
    """A step that has admitted its rollouts."""

    kind: ClassVar[str] = "step"
    use: ClassVar[str] = ""
    phase: ClassVar[Phase] = Phase.ADMITTED

    id: int


@dataclass(frozen=True, slots=True)
class ResourceState(_Stored):
    """The newest version of a resource."""

    kind: ClassVar[str] = "resource"
    use: ClassVar[str] = ""
    phase: ClassVar[Phase] = Phase.OPEN

    id: int
    """A number derived from its name, by which it is found."""
    name: str
    version: int
    value: Any

    @staticmethod
    def id_of(name: str) -> int:
        """Return the number of a name."""
        return int.from_bytes(blake2b(name.encode(), digest_size=7).digest(), "big")


State: TypeAlias = TaskState | RolloutState | StepState | ResourceState
S = TypeVar("S", bound=State)

STATES: dict[str, type[State]] = {state.kind: state for state in (TaskState, RolloutState, StepState, ResourceState)}
