# mypy: disable-error-code="empty-body"
# ruff: noqa: B027  # a verb has no body: it sends its arguments, unless a subclass implements it
"""The rollout queue: a trainer enqueues rollouts, runners claim them and report how they ended.

    queue.enqueue ─► queued ─claim─► preparing ─ready─► running ─finish─► succeeded, failed, …  ─► queue.wait
                       ▲                                     │
                       └───────────── a retry ◄──────────────┘

The trainer enqueues rollouts and waits for their ends. Runners claim rollouts, send heartbeats, and report how each
attempt ended. The model endpoint records turns. Everything is written to the journal; everything acknowledged survives
`kill -9`.

`LocalRolloutQueue` (`local_queue`) works on a journal in this process. `RemoteRolloutQueue` calls the server of another
process (`etude.store.http`). Callers need not know which of the two they use. Each operation is a verb, written once:
its signature here is also that of the request and the reply (`verbs`).

The caller bounds every wait. Times are seconds of the running time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from etude.images import ImageRef
from etude.records import Turn
from etude.store.journal.events import Event
from etude.store.journal.states import RolloutState
from etude.store.queue.bounds import (
    MAX_ITEMS,
    Bounds,
    Count,
    Digest,
    Id,
    LeaseSeconds,
    Name,
    PollSeconds,
    SomeText,
    Version,
)
from etude.store.queue.records import (
    AttemptId,
    AttemptReport,
    Claim,
    Ended,
    QueueOwner,
    Resource,
    Reward,
    RolloutPage,
    RolloutQuery,
    RolloutRequest,
    RunnerState,
    StopOrder,
)
from etude.store.queue.rollout_limits import RolloutLimits, RolloutPurpose
from etude.store.queue.verbs import (
    ATTEMPTS,
    RUNNERS,
    SHORT_BYTES,
    SMALL_BYTES,
    Arguments,
    Rules,
    Verb,
    verb,
)

__all__ = [
    "AttemptId",
    "AttemptReport",
    "Claim",
    "Ended",
    "QueueOwner",
    "Resource",
    "Reward",
    "RolloutLimits",
    "RolloutPage",
    "RolloutPurpose",
    "RolloutQuery",
    "RolloutQueue",
    "RolloutRequest",
    "RunnerState",
    "StopOrder",
]


def _lacks_an_id(arguments: Arguments) -> bool:
    return any(request.id is None for request in arguments["wanted"])


def _is_of_a_turn(arguments: Arguments) -> bool:
    return arguments["turn"] is not None


def _always(_: Arguments) -> bool:
    return True


def _no_ends(arguments: Arguments) -> Ended:
    return Ended(arguments["cursor"], [])


class RolloutQueue(ABC):
    """The operations of a rollout queue. Any number may run at once, and each may be cancelled at any await.

    An illegal transition raises `IllegalTransitionError`, which names both states. An unknown id raises
    `NotFoundError`.
    """

    async def send(self, verb: Verb, arguments: Arguments) -> Any:
        """Call a verb at the server of another process, and return its result."""
        raise NotImplementedError(f"{type(self).__name__} sends no requests, so it must implement '{verb.name}'.")

    @abstractmethod
    def with_epoch(self, epoch: int) -> RolloutQueue:
        """Return this queue, bound to an epoch: its calls fail once a newer epoch has started.

        This holds for `enqueue`, `cancel`, `wait`, `seal`, `put_resource`, `acquire_lease`, and all writes of attempts.
        Closing the returned queue does not close this one.
        """

    @abstractmethod
    async def close(self) -> None:
        """Stop the background work, write what is pending, and release the resources."""

    # -- for the trainer ----------------------------------------------------------------------------------------------

    @verb(Rules(once=True))
    async def acquire_lease(
        self, owner: QueueOwner, epoch: Id | None = None, lease_s: LeaseSeconds | None = None
    ) -> int:
        """Acquire or renew the lease of the run that owns this queue; return the epoch.

        Without an `epoch` the run takes the queue over and begins a new epoch. Attempts under way end as infrastructure
        errors that do not count against them. Queued rollouts are suspended until the run enqueues them again. With its
        epoch the run renews its lease.

        The lease lasts `lease_s` seconds. None lasts until the queue is closed; 0 releases the lease. Without a valid
        lease the queue assigns no rollouts, and stops those under way; they are retried without being counted.

        An older epoch raises `IllegalTransitionError`. So does a queue that holds the rollouts of another run, or of
        this run in another directory.
        """

    @verb(Rules(once=True, counts_twice=_lacks_an_id))
    async def enqueue(self, wanted: Sequence[RolloutRequest]) -> list[int]:
        """Queue rollouts, all or none, and return their ids. A new task is issued.

        A rollout that was enqueued before with the same content is not queued again. With other content it is an
        `IllegalTransitionError`.
        """

    @verb(Rules(split="rollouts"))
    async def cancel(self, rollouts: Annotated[Sequence[Id], Bounds(max_length=MAX_ITEMS)], why: SomeText) -> None:
        """Cancel rollouts, queued or running, and record the reason. Their runners learn of it at the next heartbeat.
        Rollouts that ended stay as they are."""

    @verb(Rules(split="rollouts", has_long_reply=True))
    async def seal(self, rollouts: Annotated[Sequence[Id], Bounds(max_length=MAX_ITEMS)]) -> list[RolloutState]:
        """Refuse further rewards for rollouts that ended, and return their states in the order given.

        The trainer seals rollouts before it reads them, so that the rewards it reads are final.
        """

    @verb(Rules(wait="timeout_s", empty=_no_ends, most="limit", max_bytes=SMALL_BYTES, has_long_reply=True))
    async def wait(self, cursor: Id = 0, timeout_s: PollSeconds = 0.0, limit: Count = 256) -> Ended:
        """Return the rollouts that ended after `cursor`, in order of their ends, and the next cursor.

        The list is empty if none ended within `timeout_s`. Cursor 0 is the beginning. A cursor stays valid after a
        restart.
        """

    @verb(Rules(max_bytes=SHORT_BYTES, has_long_reply=True))
    async def find(self, query: RolloutQuery) -> RolloutPage:
        """Return one page of the rollouts that match a query."""

    @verb(Rules(scopes=RUNNERS, has_long_reply=True))
    async def turns(self, rollout: Id, attempt: Id | None = None) -> list[Turn]:
        """Return the turns of an attempt in order, each with its reward; by default of the last attempt."""

    @verb(Rules(has_long_reply=True))
    async def history(self, rollout: Id) -> list[Event]:
        """Return all events of a rollout, in the order of the journal."""

    @verb(Rules(has_long_reply=True))
    async def notes(self, rollout: Id, attempt: Id | None = None) -> list[dict[str, Any]]:
        """Return the notes and spans of an attempt in order, each as `{"name", "data", "attempt"}`; by default of the
        last attempt."""

    # -- for runners --------------------------------------------------------------------------------------------------

    @verb(Rules(scopes=RUNNERS, once=True, wait="wait_s", most="n", max_bytes=SMALL_BYTES))
    async def claim(self, runner: Name, n: Count = 1, wait_s: PollSeconds = 0.0) -> list[Claim]:
        """Claim up to `n` rollouts. Return as soon as there is one, or none after `wait_s`.

        Rollouts of use `val` are assigned before those of use `train`, so no evaluation waits behind queued training.
        Within a use the longest queued is first. A retry is queued behind the others of its use.
        """

    @verb(Rules(scopes=RUNNERS, split="running", max_bytes=SHORT_BYTES))
    async def heartbeat(
        self,
        runner: Name,
        running: Annotated[Sequence[AttemptId], Bounds(max_length=MAX_ITEMS)],
        info: Mapping[str, Any] | None = None,
    ) -> list[StopOrder]:
        """Renew the leases of a runner's attempts; return the attempts that it must stop, with the reasons."""

    @verb(Rules(scopes=RUNNERS, is_batched=True))
    async def ready(self, attempt: AttemptId) -> None:
        """Move an attempt from preparing to running. Its first turn, note or reward does the same."""

    @verb(Rules(scopes=RUNNERS, is_batched=True))
    async def finish(self, attempt: AttemptId, report: AttemptReport) -> bool:
        """Report the end of an attempt, and return once it is written.

        Return False if the attempt was over before, by a timeout or a cancellation: the late report is stored and
        changes nothing. A second report with the same content is accepted. One with other content raises
        `IllegalTransitionError`.
        """

    # -- records of a running attempt ---------------------------------------------------------------------------------

    @verb(Rules(once=True, counts_twice=_always, is_batched=True))
    async def record_turn(self, attempt: AttemptId, turn: Turn, began: Annotated[float, Bounds(ge=0)] = 0.0) -> int:
        """Write one model call and return its index. The queue assigns the index; the one in `turn` is ignored.

        began: time at which the call was handed to the engine, in seconds since 1970; 0 is unknown.
        """

    @verb(Rules(scopes=ATTEMPTS, once=True, counts_twice=_is_of_a_turn, is_batched=True))
    async def record_reward(self, attempt: AttemptId, reward: Reward, turn: Id | None = None) -> None:
        """Record the final reward of an attempt, once; or a reward of one of its turns. Rewards of a turn add up."""

    @verb(Rules(scopes=ATTEMPTS, once=True, is_batched=True))
    async def record_note(self, attempt: AttemptId, name: Name, data: Any = None) -> None:
        """Record an event or a span for people to inspect. Training does not depend on it."""

    # -- images -------------------------------------------------------------------------------------------------------

    @verb(Rules())
    async def put_images(self, contents: Annotated[Sequence[bytes], Bounds(max_length=MAX_ITEMS)]) -> list[ImageRef]:
        """Store images (PNG, JPEG, WebP or GIF), each once, and return them by the hashes of their bytes, in the order
        given.

        One that cannot be read whole, or has too many pixels, raises `ImageError`, and none is stored. An image that
        is stored already is not read again.
        """

    @verb(Rules(scopes=RUNNERS, has_long_reply=True))
    async def get_images(
        self, digests: Annotated[Sequence[Digest], Bounds(max_length=MAX_ITEMS)]
    ) -> Mapping[str, bytes]:
        """Return the bytes of the images with these hashes that are stored, by hash."""

    # -- resources and statistics -------------------------------------------------------------------------------------

    @verb(Rules(once=True))
    async def put_resource(self, name: Name, value: Any) -> int:
        """Write a new version of a resource (any JSON): an endpoint, a prompt template. Return its version number, from
        1."""

    @verb(Rules(scopes=RUNNERS, has_long_reply=True))
    async def get_resource(self, name: Name, version: Version | None = None) -> Resource:
        """Return the version number and the value of a resource, by default the newest."""

    @verb(Rules(has_long_reply=True))
    async def runners(self) -> list[RunnerState]:
        """Return the runners that were active within the last minutes."""

    @verb(Rules())
    async def statistics(self) -> dict[str, float]:
        """Return counts of rollouts (`queued`, `running`, each terminal status), of retries and of late results.
        `oldest_queued_s` is the age of the oldest queued rollout in seconds."""
