"""The rollout queue: a trainer enqueues rollouts, runners claim them and report how they ended.

    queue.enqueue ─► queued ─claim─► preparing ─ready─► running ─finish─► succeeded, failed, …  ─► queue.wait
                       ▲                                     │
                       └───────────── a retry ◄──────────────┘

The trainer enqueues rollouts and waits for their ends. Runners claim rollouts, send heartbeats, and report how each
attempt ended. The model endpoint records turns. Everything is written to the journal; everything acknowledged survives
`kill -9`.

`LocalRolloutQueue` (`local_queue`) works on a journal in this process. `RemoteRolloutQueue` calls the server of another
process (`etude.store.http`). Callers need not know which of the two they use. A new operation is a method here that
sends its request, the request in `etude.store.http.requests`, and a method of `LocalRolloutQueue`.

The caller bounds every wait. Times are seconds of the running time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from etude.records import Turn
from etude.running_time import running_time
from etude.store.http.json_records import (
    decode_attempt_id,
    decode_claim,
    decode_event,
    decode_runner,
    decode_state,
    decode_turn,
    encode_reward,
    encode_rollout_request,
    encode_turn,
)
from etude.store.http.request_limits import check_count, check_seconds
from etude.store.journal.events import Event
from etude.store.journal.json_values import to_json_value
from etude.store.journal.states import RolloutState
from etude.store.queue.records import (
    AttemptId,
    AttemptReport,
    Claim,
    QueueOwner,
    Reward,
    RolloutPage,
    RolloutQuery,
    RolloutRequest,
    RunnerState,
)
from etude.store.queue.rollout_limits import RolloutLimits, RolloutPurpose

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

T = TypeVar("T")
R = TypeVar("R")
POLL_S = 20.0
"""Longest wait of one request, in seconds. A longer wait takes several requests."""
MAX_ITEMS = 1000
"""Items in one request. A longer list is split."""


class RolloutQueue(ABC):
    """The operations of a rollout queue. Any number may run at once, and each may be cancelled at any await.

    An illegal transition raises `IllegalTransitionError`, which names both states. An unknown id raises
    `NotFoundError`.

    Each operation is implemented here by its request, which a queue of another process sends to its server.
    """

    async def send(self, verb: str, read: Callable[[Any], R], poll_s: float = 0.0, **fields: Any) -> R:
        """Send a request with these fields, and return what `read` makes of the reply's fields.

        poll_s: the seconds that the server may wait for a result.
        """
        raise NotImplementedError(f"{type(self).__name__} sends no requests, so it must implement each operation.")

    async def write(self, verb: str, read: Callable[[Any], R], key: AttemptId, **fields: Any) -> R:
        """Send a write of an attempt, perhaps together with others, and return what `read` makes of the reply."""
        raise NotImplementedError(f"{type(self).__name__} sends no requests, so it must implement each operation.")

    # -- for the trainer ----------------------------------------------------------------------------------------------

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
        lease_s = None if lease_s is None else check_seconds(lease_s, "lease_s")
        fields: dict[str, Any] = {"run": owner.run, "where": owner.where, "epoch": epoch, "lease_s": lease_s}
        return await self.send("acquire_lease", lambda reply: int(reply["epoch"]), **fields)

    @abstractmethod
    def with_epoch(self, epoch: int) -> RolloutQueue:
        """Return this queue, bound to an epoch: its calls fail once a newer epoch has started.

        This holds for `enqueue`, `cancel`, `wait`, `seal`, `put_resource`, `acquire_lease`, and all writes of attempts.
        Closing the returned queue does not close this one.
        """

    async def enqueue(self, wanted: Sequence[RolloutRequest]) -> list[int]:
        """Queue rollouts, all or none, and return their ids. A new task is issued.

        A rollout that was enqueued before with the same content is not queued again. With other content it is an
        `IllegalTransitionError`.
        """
        requests = [*map(encode_rollout_request, wanted)]
        return await self.send("enqueue", lambda reply: list(reply["ids"]), wanted=requests)

    async def cancel(self, rollouts: Sequence[int], why: str) -> None:
        """Cancel rollouts and record the reason. Their runners learn of it at the next heartbeat. Rollouts that ended
        stay as they are."""
        for portion in _portions(rollouts) or [[]]:
            await self.send("cancel", dict, rollouts=[*map(int, portion)], why=why)

    async def seal(self, rollouts: Sequence[int]) -> list[RolloutState]:
        """Refuse further rewards for rollouts that ended, and return their states in the order given.

        The trainer seals rollouts before it reads them, so that the rewards it reads are final.
        """
        states: list[RolloutState] = []
        for portion in _portions(rollouts):
            states += await self.send("seal", _states_of, rollouts=[*map(int, portion)])
        return states

    async def wait(self, cursor: int, timeout_s: float, limit: int = 256) -> tuple[int, list[RolloutState]]:
        """Return the rollouts that ended after `cursor`, in order of their ends, and the next cursor.

        The list is empty if none ended within `timeout_s`. Cursor 0 is the beginning. A cursor stays valid after a
        restart.
        """
        until = running_time() + check_seconds(timeout_s, "timeout_s")
        limit = min(check_count(limit, "limit"), MAX_ITEMS)
        while True:
            seconds = _poll_s(until)
            fields = {"cursor": cursor, "timeout_s": seconds, "limit": limit}
            cursor, states = await self.send("wait", _ended_of, seconds, **fields)
            if states or running_time() >= until:
                return cursor, states

    async def find(self, query: RolloutQuery) -> RolloutPage:
        """Return one page of the rollouts that match a query."""
        fields = {name: getattr(query, name) for name in query.__slots__}
        fields["limit"] = limit = min(check_count(query.limit, "limit"), MAX_ITEMS)
        states: list[RolloutState] = []
        more = False
        for ids in _portions(query.ids) or [()]:
            for tasks in _portions(query.tasks) or [()]:
                found = await self.send("find", _page_of, **fields | {"ids": ids, "tasks": tasks})
                states += found.rollouts
                more = more or found.more
        states.sort(key=lambda state: state.id, reverse=query.sort == "-id")
        return RolloutPage(tuple(states[:limit]), more or len(states) > limit)

    async def turns(self, rollout: int, attempt: int | None = None) -> list[Turn]:
        """Return the turns of an attempt in order, each with its reward; by default of the last attempt."""
        fields: dict[str, Any] = {"rollout": rollout, "attempt": attempt}
        return await self.send("turns", lambda reply: [*map(decode_turn, reply["turns"])], **fields)

    async def history(self, rollout: int) -> list[Event]:
        """Return all events of a rollout, in the order of the journal."""
        return await self.send("history", lambda reply: [*map(decode_event, reply["events"])], rollout=rollout)

    async def notes(self, rollout: int, attempt: int | None = None) -> list[dict[str, Any]]:
        """Return the notes of an attempt in order, each as `{"name", "data", "attempt"}`."""
        return await self.send("notes", lambda reply: list(reply["notes"]), rollout=rollout, attempt=attempt)

    # -- for runners --------------------------------------------------------------------------------------------------

    async def claim(self, runner: str, n: int, wait_s: float) -> list[Claim]:
        """Claim up to `n` rollouts. Return as soon as there is one, or none after `wait_s`.

        Rollouts of use `val` are assigned before those of use `train`, so no evaluation waits behind queued training.
        Within a use the longest queued is first. A retry is queued behind the others of its use.
        """
        until = running_time() + check_seconds(wait_s, "wait_s")
        n = min(check_count(n, "n"), MAX_ITEMS)
        while True:
            seconds = _poll_s(until)
            claims = await self.send("claim", _claims_of, seconds, runner=runner, n=n, wait_s=seconds)
            if claims or running_time() >= until:
                return claims

    async def ready(self, key: AttemptId) -> None:
        """Move an attempt from preparing to running. Its first turn, note or reward does the same."""
        await self.write("ready", dict, key)

    async def heartbeat(
        self, runner: str, running: Sequence[AttemptId], info: Mapping[str, Any] | None = None
    ) -> dict[AttemptId, str]:
        """Renew the leases of a runner's attempts; return the attempts that it must stop, with the reasons."""
        sent = None if info is None else to_json_value(info, "info")
        stop: dict[AttemptId, str] = {}
        for portion in _portions(running) or [()]:
            keys = [key._asdict() for key in portion]
            stop |= await self.send("heartbeat", _stopped_of, runner=runner, running=keys, info=sent)
        return stop

    async def finish(self, key: AttemptId, report: AttemptReport) -> bool:
        """Report the end of an attempt, and return once it is written.

        Return False if the attempt was over before, by a timeout or a cancellation: the late report is stored and
        changes nothing. A second report with the same content is accepted. One with other content raises
        `IllegalTransitionError`.
        """
        reward = None if report.reward is None else encode_reward(report.reward)
        error = report.error.encode(errors="backslashreplace").decode()  # JSON has no unpaired surrogates
        fields = {"outcome": report.outcome, "error": error, "reward": reward}
        return await self.write("finish", lambda reply: bool(reply["counted"]), key, **fields)

    # -- records of a running attempt ---------------------------------------------------------------------------------

    async def record_turn(self, key: AttemptId, turn: Turn, began: float = 0.0) -> int:
        """Write one model call and return its index. The queue assigns the index; the one in `turn` is ignored.

        began: time at which the call was handed to the engine, in seconds since 1970; 0 is unknown.
        """
        fields = {"turn": encode_turn(turn), "began": began}
        return await self.write("record_turn", lambda reply: int(reply["index"]), key, **fields)

    async def record_reward(self, key: AttemptId, reward: Reward, turn: int | None = None) -> None:
        """Record the final reward of an attempt, once; or a reward of one of its turns. Rewards of a turn add up."""
        await self.write("record_reward", dict, key, reward=encode_reward(reward), turn=turn)

    async def record_note(self, key: AttemptId, name: str, data: Any) -> None:
        """Record an event or a span for people to inspect. Training does not depend on it."""
        await self.write("record_note", dict, key, event=name, data=to_json_value(data, "data"))

    # -- resources and statistics -------------------------------------------------------------------------------------

    async def put_resource(self, name: str, value: Any) -> int:
        """Write a new version of a resource (any JSON): an endpoint, a prompt template. Return its version number, from
        1."""
        fields = {"resource": name, "value": to_json_value(value, "value")}
        return await self.send("put_resource", lambda reply: int(reply["version"]), **fields)

    async def get_resource(self, name: str, version: int | None = None) -> tuple[int, Any]:
        """Return the version number and the value of a resource, by default the newest."""
        fields: dict[str, Any] = {"resource": name, "version": version}
        return await self.send("get_resource", lambda reply: (int(reply["version"]), reply["value"]), **fields)

    async def runners(self) -> list[RunnerState]:
        """Return the runners that were active within the last minutes."""
        return await self.send("runners", lambda reply: [*map(decode_runner, reply["runners"])])

    async def statistics(self) -> dict[str, float]:
        """Return counts of rollouts (`queued`, `running`, each terminal status), of retries and of late results.
        `oldest_queued_s` is the age of the oldest queued rollout in seconds."""
        return await self.send("statistics", lambda reply: dict(reply["statistics"]))

    @abstractmethod
    async def close(self) -> None:
        """Stop the background work, write what is pending, and release the resources."""


def _portions(items: Sequence[T]) -> list[Sequence[T]]:
    """Split a sequence into parts that fit into one request each."""
    return [items[start : start + MAX_ITEMS] for start in range(0, len(items), MAX_ITEMS)]


def _poll_s(until: float) -> float:
    """Return the seconds that the next request may wait."""
    return min(max(until - running_time(), 0.0), POLL_S)


# -- what is read of a reply ------------------------------------------------------------------------------------------


def _states_of(reply: Any) -> list[RolloutState]:
    return [*map(decode_state, reply["rollouts"])]


def _ended_of(reply: Any) -> tuple[int, list[RolloutState]]:
    return int(reply["cursor"]), _states_of(reply)


def _page_of(reply: Any) -> RolloutPage:
    return RolloutPage(tuple(_states_of(reply)), bool(reply["more"]))


def _claims_of(reply: Any) -> list[Claim]:
    return [*map(decode_claim, reply["claims"])]


def _stopped_of(reply: Any) -> dict[AttemptId, str]:
    return {decode_attempt_id(one): str(one["why"]) for one in reply["stop"]}
