"""The desk: where rollouts are wanted, claimed, watched over and handed in, by whoever is at it, near or far.

    desk.enqueue ─► queued ─claim─► preparing ─ready─► running ─finish─► succeeded, failed, …  ─► desk.wait
                       ▲                                     │
                       └───────────── a retry ◄──────────────┘

A trainer queues rollouts and waits for them. Runners claim them, say from time to time that they are alive, and hand
in how each ended. The model endpoint writes turns. All of it goes into the journal, and whatever was acknowledged is
there after a kill. `LocalRolloutQueue` (`local_queue`) keeps a journal in this process; `RemoteRolloutQueue` (`client`)
speaks to the server of another (`server`). Nobody who uses a desk needs to know which it is.

Every wait is bounded by its caller. Times are seconds, measured by a clock that no one sets.
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
"""A number, or named parts that are added up."""


class AttemptId(NamedTuple):
    """Which attempt at which rollout."""

    rollout: int
    attempt: int


class QueueOwner(NamedTuple):
    """A run that has its rollouts kept by a desk."""

    run: str
    """Which one; a copy of it has the same name."""
    where: str
    """Its directory, by which it is told apart from a copy."""


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """A rollout that somebody wants. Asked for twice with the same id, it is queued once."""

    task: Task
    sample: int = 0
    """Which try at the task it is."""
    id: int | None = None
    """Its name; None has the desk give one."""
    use: RolloutPurpose = "train"
    limits: RolloutLimits = field(default_factory=RolloutLimits)


@dataclass(frozen=True, slots=True)
class Claim:
    """A rollout that a runner is to play."""

    attempt_id: AttemptId
    task: Task
    use: RolloutPurpose
    limits: RolloutLimits
    resources: Mapping[str, Any]
    """The newest of each, by name: `endpoint` says where the model is (`base_url`, `model`)."""
    model_key: str
    """Lets an agent call the model, as this attempt and no other."""
    reward_key: str
    """Lets it write rewards and events of this attempt."""


@dataclass(frozen=True, slots=True)
class AttemptReport:
    """How an attempt ended, as its runner hands it in."""

    outcome: Outcome
    error: str = ""
    reward: Reward | None = None
    """The final one, where it was not given before."""


@dataclass(frozen=True, slots=True)
class RolloutQuery:
    """Which rollouts are looked for; what is not said does not matter."""

    statuses: tuple[Status, ...] = ()
    tasks: tuple[int, ...] = ()
    ids: tuple[int, ...] = ()
    use: RolloutPurpose | None = None
    sort: Literal["id", "-id"] = "id"
    after: int | None = None
    """Go on behind this id, in the order asked for."""
    limit: int = 100


@dataclass(frozen=True, slots=True)
class RolloutPage:
    """What was found of it, at most `limit`; `more` says whether to ask on with `after` the last id."""

    rollouts: tuple[RolloutState, ...]
    more: bool


@dataclass(frozen=True, slots=True)
class RunnerState:
    """A runner, as it last spoke."""

    name: str
    running: tuple[AttemptId, ...]
    silent_s: float
    info: Mapping[str, Any] = field(default_factory=dict)
    """What it says of itself."""


class RolloutQueue(ABC):
    """What can be done at a desk. Every coroutine may be cancelled at any await, and any number may be under way.

    An illegal move is an `IllegalTransitionError` that names both states; something unknown is an `NotFoundError`.
    """

    # -- who wants rollouts -------------------------------------------------------------------------------------------

    @abstractmethod
    async def acquire_lease(self, owner: QueueOwner, epoch: int | None = None, lease_s: float | None = None) -> int:
        """A run has its rollouts kept here. Without a `life` it takes the desk up and begins one, whose number is
        returned: what was under way is over as an infrastructure error that nobody is charged with, and what was
        queued waits until it is asked for again. With its life it says that it is still there.

        What it says holds for `lease_s`; None is until the desk is closed, and 0 is a farewell. While it does not hold,
        nothing is lent, and what is under way is stopped, to be made again without being counted. The word of an
        earlier life is an `IllegalTransitionError`; so is a run that finds another's rollouts, or that another place
        keeps.
        """

    @abstractmethod
    def with_epoch(self, epoch: int) -> RolloutQueue:
        """This desk, at which each word counts only while this is the life of its keeper: `enqueue`, `cancel`, `wait`,
        `seal`, `put_resource`, `acquire_lease`, and all that is written of attempts. To close it closes this desk for
        nobody else."""

    @abstractmethod
    async def enqueue(self, wanted: Sequence[RolloutRequest]) -> list[int]:
        """Queue rollouts, all or none; their ids. A task that is new is issued. One asked for before, in the same
        words, is as if it had not been asked again; in other words it is an `IllegalTransitionError`."""

    @abstractmethod
    async def cancel(self, rollouts: Sequence[int], why: str) -> None:
        """Nobody wants these any more, for a reason that is given; what runs is told to stop at its next heartbeat.
        Those that ended stay so."""

    @abstractmethod
    async def seal(self, rollouts: Sequence[int]) -> list[RolloutState]:
        """These have ended and are about to be read: their agents earn nothing more, so that what is read is all there
        will be. How they stand."""

    @abstractmethod
    async def wait(self, cursor: int, timeout_s: float, limit: int = 256) -> tuple[int, list[RolloutState]]:
        """Rollouts that came to their end after `cursor`, in the order they did, and the next cursor; an empty list
        after `timeout_s`. Cursor 0 is the beginning. A cursor from before a restart stays good."""

    @abstractmethod
    async def find(self, query: RolloutQuery) -> RolloutPage:
        """The rollouts that were asked for."""

    @abstractmethod
    async def turns(self, rollout: int, attempt: int | None = None) -> list[Turn]:
        """The turns of an attempt in order, each with what it was paid; by default of the last one."""

    @abstractmethod
    async def history(self, rollout: int) -> list[Event]:
        """All that happened to a rollout, in order, as it is written."""

    @abstractmethod
    async def notes(self, rollout: int, attempt: int | None = None) -> list[dict[str, Any]]:
        """What was noted during an attempt: `{"name", "data", "attempt"}` each, in order."""

    # -- who plays them -----------------------------------------------------------------------------------------------

    @abstractmethod
    async def claim(self, runner: str, n: int, wait_s: float) -> list[Claim]:
        """Up to `n` rollouts that waited longest, as soon as there is one; none after `wait_s`."""

    @abstractmethod
    async def mark_ready(self, key: AttemptId) -> None:
        """An attempt that was prepared runs now. A first turn, note or reward says so as well."""

    @abstractmethod
    async def heartbeat(
        self, runner: str, running: Sequence[AttemptId], info: Mapping[str, Any] | None = None
    ) -> dict[AttemptId, str]:
        """A runner is alive and has these under way; returns those it is to stop, and why."""

    @abstractmethod
    async def finish(self, key: AttemptId, report: AttemptReport) -> bool:
        """An attempt is over. False if it was over before by somebody else's word (a timeout, a cancellation): what is
        handed in late is kept and changes nothing. Handed in twice in the same words, it was handed in once; in other
        words it is an `IllegalTransitionError`. Acknowledged once it is written."""

    # -- what is written of an attempt that runs ----------------------------------------------------------------------

    @abstractmethod
    async def record_turn(self, key: AttemptId, turn: Turn) -> int:
        """Write down one call to the model; its index, which the desk gives (that of `turn` is not looked at)."""

    @abstractmethod
    async def record_reward(self, key: AttemptId, reward: Reward, turn: int | None = None) -> None:
        """What an attempt earned in all, said once; or one of its turns, any number of times, which adds up."""

    @abstractmethod
    async def record_note(self, key: AttemptId, name: str, data: Any) -> None:
        """An event, or a span, that somebody will want to look at; training does not depend on it."""

    # -- what is shared -----------------------------------------------------------------------------------------------

    @abstractmethod
    async def put_resource(self, name: str, value: Any) -> int:
        """A new version of a resource (any JSON): an endpoint, a prompt template. Returns its number, from 1."""

    @abstractmethod
    async def get_resource(self, name: str, version: int | None = None) -> tuple[int, Any]:
        """A resource and its version, by default the newest."""

    @abstractmethod
    async def runners(self) -> list[RunnerState]:
        """The runners that spoke within the last minutes."""

    @abstractmethod
    async def statistics(self) -> dict[str, float]:
        """How many rollouts stand where (`queued`, `running`, each terminal status), retries, late results, and the
        age of the oldest one queued."""

    @abstractmethod
    async def close(self) -> None:
        """Stop watching, write what is left, let go."""
