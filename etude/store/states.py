"""Where everything stands: the states of tasks, rollouts, attempts and steps, and the form they are written in.

None of these is ever set by anyone: each follows from the events, as `transitions` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import Any, ClassVar, TypeAlias, TypeVar

from etude.records import Task
from etude.store.rollout_limits import RolloutLimits, RolloutPurpose

__all__ = [
    "LIVE",
    "STATES",
    "AttemptState",
    "Phase",
    "ResourceState",
    "RolloutState",
    "S",
    "State",
    "Status",
    "StepState",
    "TaskState",
]


class Status(StrEnum):
    """Where a rollout or an attempt stands. An attempt is never queued, and a rollout is running while its attempt is
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
"""An attempt that is not over."""


class Phase(StrEnum):
    """What is still to be done with a rollout, or a task; the store finds them by it."""

    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"
    """It ended, and its task is open: it may still be trained on."""
    ADMITTED = "admitted"
    """A step trained on it."""
    DROPPED = "dropped"
    """No step will."""
    OPEN = "open"
    """Of a task: neither admitted nor dropped."""


@dataclass(frozen=True, slots=True)
class AttemptState:
    """One execution of a rollout, as far as it has come."""

    status: Status = Status.RUNNING
    turns: int = 0
    """How many are recorded."""
    reward: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    truncated: bool = False
    error: str = ""
    paid: float = 0.0
    """What its turns were paid beside the reward."""
    role: int = 0
    runner: str = ""
    """Who claimed it; empty where whoever queued it plays it."""
    watched: bool = False
    """Whether it was ended by who watches over it (a timeout, silence, a cancellation), not by who played it."""
    late: Mapping[str, Any] | None = None
    """How it was handed in after that: `outcome`, `error`, `reward`, `parts`. Nothing follows from it."""

    @property
    def total(self) -> float | None:
        """All that it earned, once it is judged."""
        return None if self.reward is None else self.reward + self.paid

    def to_dict(self) -> dict[str, Any]:
        """The fields, as they go into JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class RolloutState:
    """One wanted try at a task, as far as it has come."""

    kind: ClassVar[str] = "rollout"

    id: int
    task: int
    sample: int
    status: Status
    attempts: tuple[AttemptState, ...] = ()
    why: str = ""
    """Why it was cancelled, or expired."""
    settled: Phase | None = None
    """`ADMITTED` or `DROPPED`, once its task is settled."""
    use: RolloutPurpose = "train"
    limits: RolloutLimits | None = None
    """What a desk holds it to."""
    life: int = 0
    """In which life of the desk's keeper it was asked for last."""
    sealed: bool = False
    """Whether who wanted it has read it, so that its agent earns nothing more."""

    @property
    def phase(self) -> Phase:
        """What is still to be done with it."""
        if self.settled is not None:
            return self.settled
        return Phase(self.status) if self.status in (Status.QUEUED, Status.RUNNING) else Phase.FINISHED

    @property
    def last(self) -> AttemptState | None:
        """The attempt that counts: the newest one."""
        return self.attempts[-1] if self.attempts else None

    def to_dict(self) -> dict[str, Any]:
        """The fields, as they go into JSON."""
        document = {name: getattr(self, name) for name in self.__slots__}
        attempts = [attempt.to_dict() for attempt in self.attempts]
        return document | {"attempts": attempts, "limits": self.limits and self.limits.to_dict()}

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> RolloutState:
        """The state that was written so."""
        attempts = (AttemptState(**changed | {"status": Status(changed["status"])}) for changed in document["attempts"])
        settled = document["settled"] and Phase(document["settled"])
        changed = {"status": Status(document["status"]), "attempts": tuple(attempts), "settled": settled}
        limits = document.get("limits")
        return cls(**document | changed | {"limits": limits and RolloutLimits.from_dict(limits)})


@dataclass(frozen=True, slots=True)
class TaskState:
    """A task of the run and the tries at it."""

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
    """Why it was dropped."""

    @property
    def task(self) -> Task:
        """What is asked, as the rest of the system has it."""
        return Task(self.id, self.fields, self.source)

    def to_dict(self) -> dict[str, Any]:
        """The fields, as they go into JSON."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> TaskState:
        """The state that was written so."""
        return cls(**document | {"phase": Phase(document["phase"]), "rollouts": tuple(document["rollouts"])})


@dataclass(frozen=True, slots=True)
class StepState:
    """A step that has its rollouts."""

    kind: ClassVar[str] = "step"
    phase: ClassVar[Phase] = Phase.ADMITTED

    id: int

    def to_dict(self) -> dict[str, Any]:
        """The fields, as they go into JSON."""
        return {"id": self.id}

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> StepState:
        """The state that was written so."""
        return cls(**document)


@dataclass(frozen=True, slots=True)
class ResourceState:
    """The newest version of what rollouts share."""

    kind: ClassVar[str] = "resource"
    phase: ClassVar[Phase] = Phase.OPEN

    id: int
    """A number made of its name, by which it is found."""
    name: str
    version: int
    value: Any

    @staticmethod
    def id_of(name: str) -> int:
        """The number of a name."""
        return int.from_bytes(blake2b(name.encode(), digest_size=7).digest(), "big")

    def to_dict(self) -> dict[str, Any]:
        """The fields, as they go into JSON."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> ResourceState:
        """The state that was written so."""
        return cls(**document)


State: TypeAlias = TaskState | RolloutState | StepState | ResourceState
S = TypeVar("S", bound=State)

STATES: dict[str, type[State]] = {
    "task": TaskState,
    "rollout": RolloutState,
    "step": StepState,
    "resource": ResourceState,
}
