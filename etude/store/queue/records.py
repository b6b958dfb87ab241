"""The records that a rollout queue takes and returns.

They have types and bounds for each field: by these they are sent to another process, and checked there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

from etude.records import Outcome, Task, Turn
from etude.store.journal.states import RolloutState, Status
from etude.store.queue.bounds import MAX_ITEMS, Bounds, Count, Id, Name, Number, SomeText, Text, Version
from etude.store.queue.rollout_limits import RolloutLimits, RolloutPurpose

Reward: TypeAlias = float | Mapping[str, float]
"""A number, or named parts whose sum is the reward."""


OWN_RUNNER = ""
"""The name of the run's own runner: its engine, in the process of the queue."""


class AttemptId(NamedTuple):
    """A rollout and the index of one attempt at it."""

    rollout: Id
    attempt: Id


class QueueOwner(NamedTuple):
    """A run whose rollouts are in the queue."""

    run: Name
    """Name of the run. A copy of the run has the same name."""
    where: SomeText
    """Directory of the run. It distinguishes the run from a copy."""


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """A rollout to enqueue. A second request with the same id does not queue it again."""

    task: Task
    sample: Number = 0
    """Index of this sample within its task's group."""
    id: Number | None = None
    """Id of the rollout. With None the queue assigns one."""
    use: RolloutPurpose = "train"
    limits: RolloutLimits = field(default_factory=RolloutLimits)
    greedy: bool = False
    """True if each token is the most probable one: a baseline for the group."""
    floor: Number = 0
    """No token of it can be of a lower policy version."""
    forgive: bool = False
    """True if the attempts so far do not count, because the code of the agent, the environment or the reward has
    changed."""
    resources: Mapping[Name, Version] = field(default_factory=dict)
    """The versions of resources that each of its attempts gets, by name. Of others it gets the newest."""


class LeasedAttempt(NamedTuple):
    """An attempt that a runner has from its claim to its end."""

    attempt_id: AttemptId
    task: Task
    use: RolloutPurpose
    limits: RolloutLimits
    sample: int
    greedy: bool
    drawn: int
    """Number of earlier attempts with their own random numbers. An attempt that an infrastructure error ended does not
    count: the next one draws the same again."""
    resources: Mapping[str, int]
    """The versions of resources that it gets, by name. Of others it gets the newest."""


class RecordedTurn(NamedTuple):
    """A turn, and the times at which the engine began and ended it, in seconds since 1970; 0 is unknown."""

    turn: Turn
    began: float = 0.0
    at: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class AttemptEnd:
    """The end of an attempt by the run's own runner, with all that the journal has of it."""

    attempt_id: AttemptId
    outcome: Outcome
    error: str = ""
    turns: Sequence[RecordedTurn] = ()
    """Its turns, each with its reward."""
    reward: float = 0.0
    """The final reward of an attempt that succeeded, without those of its turns."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """The named parts of all rewards."""
    extracted: str | None = None
    """The answer that the reward extracts from the text, for the vote over the answers to a task."""
    truncated: bool = False
    """True if a length limit cut it off."""
    role: int = 0
    """Index of the player in a game."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A rollout that a runner has claimed and must execute."""

    attempt_id: AttemptId
    task: Task
    use: RolloutPurpose
    limits: RolloutLimits
    resources: Mapping[str, Any]
    """The value of each resource, by name: in the version that its request names, or the newest. `endpoint` holds the
    model's address (`base_url`, `model`)."""
    model_key: str
    """Key with which an agent calls the model as this attempt, and as no other."""
    reward_key: str
    """Key with which an agent writes rewards and events of this attempt."""


@dataclass(frozen=True, slots=True)
class AttemptReport:
    """The end of an attempt, as its runner reports it."""

    outcome: Outcome
    error: Text = ""
    reward: Reward | None = None
    """The final reward, unless it was recorded before."""
    truncated: bool = False
    """True if a limit cut the attempt off."""
    role: int = 0
    """Index of the player in a game."""

    def __post_init__(self) -> None:
        # JSON has no unpaired surrogates
        object.__setattr__(self, "error", self.error.encode(errors="backslashreplace").decode())


@dataclass(frozen=True, slots=True)
class RolloutQuery:
    """A filter over rollouts. A field left at its default filters nothing."""

    statuses: Annotated[tuple[Status, ...], Bounds(max_length=len(Status))] = ()
    tasks: Annotated[tuple[Number, ...], Bounds(max_length=MAX_ITEMS)] = ()
    ids: Annotated[tuple[Id, ...], Bounds(max_length=MAX_ITEMS)] = ()
    use: RolloutPurpose | None = None
    sort: Literal["id", "-id"] = "id"
    after: Id | None = None
    """Return only rollouts that follow this id, in the order of `sort`."""
    limit: Count = 100


@dataclass(frozen=True, slots=True)
class RolloutPage:
    """One page of a query's result, at most `limit` rollouts. If `more` is true, query again with `after` set to the
    last id."""

    rollouts: tuple[RolloutState, ...]
    more: bool


class Ended(NamedTuple):
    """The rollouts that ended after a cursor, and the next cursor. It is false if there is none."""

    cursor: int
    rollouts: list[RolloutState]

    def __bool__(self) -> bool:
        return bool(self.rollouts)


class StopOrder(NamedTuple):
    """An attempt that its runner must stop, and the reason."""

    attempt: AttemptId
    why: str


class Resource(NamedTuple):
    """A version of a resource: its number, from 1, and its value."""

    version: int
    value: Any


@dataclass(frozen=True, slots=True)
class RunnerState:
    """A runner, as of its last heartbeat or claim."""

    name: str
    running: tuple[AttemptId, ...]
    silent_s: float
    info: Mapping[str, Any] = field(default_factory=dict)
    """Data that the runner reports about itself."""
