"""What the events mean: the one table of legal moves, and the states that follow from it. Pure: no clock, no I/O.

A rollout is queued, runs, and ends as its last attempt ended; where an attempt may be retried the rollout is queued
again. A terminal status is final. What became of the work is kept apart from how it ended: a rollout is open until its
task is *settled*, by a step that admits the group or by being dropped, and from then on nothing may be added to it.

`Fold` takes a batch of events in, one after the other, and holds the states that they change. It refuses an event that
may not follow, in which case nothing of the batch is kept by whoever asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from enum import StrEnum
from typing import Protocol

from etude.errors import IllegalMoveError
from etude.store.events import (
    Admitted,
    AttemptEnded,
    AttemptStarted,
    Event,
    Rewarded,
    RolloutCancelled,
    RolloutEvent,
    RolloutExpired,
    RolloutQueued,
    TaskDropped,
    TaskIssued,
    TurnRecorded,
)
from etude.store.states import AttemptState, Phase, RolloutState, S, State, Status, StepState, TaskState

__all__ = ["ENDS", "MOVES", "Fold", "Load", "Move", "move_of"]


class Move(StrEnum):
    """What an event does to a rollout."""

    QUEUE = "be queued"
    START = "be started"
    TURN = "record a turn"
    REWARD = "be rewarded"
    RETRY = "be retried"
    SUCCEED = "succeed"
    FAIL = "fail"
    TIME_OUT = "time out"
    FALL_SILENT = "become unresponsive"
    BREAK = "meet an infrastructure error"
    CANCEL = "be cancelled"
    EXPIRE = "expire in the queue"
    ADMIT = "be admitted"
    DROP = "be dropped"


ENDS: dict[Status, Move] = {
    Status.SUCCEEDED: Move.SUCCEED,
    Status.FAILED: Move.FAIL,
    Status.TIMED_OUT: Move.TIME_OUT,
    Status.UNRESPONSIVE: Move.FALL_SILENT,
    Status.CANCELLED: Move.CANCEL,
    Status.INFRA_ERROR: Move.BREAK,
}
"""What each terminal status is reached by."""

MOVES: dict[tuple[Status | None, Move], Status] = {
    (None, Move.QUEUE): Status.QUEUED,
    (Status.QUEUED, Move.START): Status.RUNNING,
    (Status.QUEUED, Move.CANCEL): Status.CANCELLED,
    (Status.QUEUED, Move.EXPIRE): Status.FAILED,
    (Status.RUNNING, Move.TURN): Status.RUNNING,
    (Status.RUNNING, Move.REWARD): Status.RUNNING,
    (Status.RUNNING, Move.RETRY): Status.QUEUED,
    (Status.RUNNING, Move.SUCCEED): Status.SUCCEEDED,
    (Status.RUNNING, Move.FAIL): Status.FAILED,
    (Status.RUNNING, Move.TIME_OUT): Status.TIMED_OUT,
    (Status.RUNNING, Move.FALL_SILENT): Status.UNRESPONSIVE,
    (Status.RUNNING, Move.BREAK): Status.INFRA_ERROR,
    (Status.RUNNING, Move.CANCEL): Status.CANCELLED,
    (Status.SUCCEEDED, Move.REWARD): Status.SUCCEEDED,
    (Status.SUCCEEDED, Move.ADMIT): Status.SUCCEEDED,
    (Status.SUCCEEDED, Move.DROP): Status.SUCCEEDED,
    (Status.FAILED, Move.REWARD): Status.FAILED,
    (Status.FAILED, Move.ADMIT): Status.FAILED,
    (Status.FAILED, Move.DROP): Status.FAILED,
    (Status.TIMED_OUT, Move.REWARD): Status.TIMED_OUT,
    (Status.TIMED_OUT, Move.ADMIT): Status.TIMED_OUT,
    (Status.TIMED_OUT, Move.DROP): Status.TIMED_OUT,
    (Status.UNRESPONSIVE, Move.REWARD): Status.UNRESPONSIVE,
    (Status.UNRESPONSIVE, Move.ADMIT): Status.UNRESPONSIVE,
    (Status.UNRESPONSIVE, Move.DROP): Status.UNRESPONSIVE,
    (Status.CANCELLED, Move.DROP): Status.CANCELLED,
    (Status.INFRA_ERROR, Move.DROP): Status.INFRA_ERROR,
}
"""Every legal move and where it leads. What is not here is refused."""


class Load(Protocol):
    """Where a fold finds what is known already."""

    def __call__(self, kind: type[S], ids: Iterable[int]) -> Mapping[int, S]:
        """The states of a kind with these ids, those that are there."""
        ...


# -- taking events in -------------------------------------------------------------------------------------------------


def move_of(event: RolloutEvent) -> Move:
    """What an event does to its rollout."""
    if isinstance(event, AttemptEnded):
        return Move.RETRY if event.retry else ENDS[Status(event.outcome)]
    return _MOVE_OF[type(event)]


_MOVE_OF: dict[type[RolloutEvent], Move] = {
    RolloutQueued: Move.QUEUE,
    RolloutCancelled: Move.CANCEL,
    RolloutExpired: Move.EXPIRE,
    AttemptStarted: Move.START,
    TurnRecorded: Move.TURN,
    Rewarded: Move.REWARD,
}


class Fold:
    """The states that a batch of events leads to, from those that `load` knows."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._known: dict[tuple[str, int], State | None] = {}
        self.changed: dict[tuple[str, int], State] = {}
        """By kind and id, what is no longer as it was loaded."""

    def extend(self, events: Iterable[Event]) -> None:
        """Take these in, in order."""
        events = list(events)
        self._fetch(TaskState, {event.task for event in events if isinstance(event, TaskIssued | RolloutQueued)})
        self._fetch(RolloutState, {event.rollout for event in events if isinstance(event, RolloutEvent)})
        for event in events:
            if isinstance(event, RolloutEvent):
                self._rollout(event)
            elif isinstance(event, TaskIssued):
                self._issue(event)
            elif isinstance(event, TaskDropped):
                self._settle({event.task}, frozenset(), event.step, event.cause)
            elif isinstance(event, Admitted):
                self._admit(event)

    def _rollout(self, event: RolloutEvent) -> None:
        state = self._get(RolloutState, event.rollout)
        status = _legal(event.rollout, state, move_of(event))
        if isinstance(event, RolloutQueued):
            task = self._task(event.task, f"rollout {event.rollout} cannot be queued for it")
            self._set(replace(task, rollouts=(*task.rollouts, event.rollout)))
            self._set(RolloutState(event.rollout, event.task, event.sample, status))
        else:
            assert state is not None, "a rollout is only ever queued before it has a state"
            self._set(_moved(state, status, event))

    def _issue(self, event: TaskIssued) -> None:
        if self._get(TaskState, event.task) is not None:
            raise IllegalMoveError(
                f"Task {event.task} cannot be issued: it was issued before, and an ordinal is used once."
            )
        self._set(TaskState(event.task, event.row, event.source, event.fields))

    def _admit(self, event: Admitted) -> None:
        if self._get(StepState, event.step) is not None:
            raise IllegalMoveError(f"Step {event.step} cannot admit rollouts: it has admitted its own before.")
        if len(set(event.rollouts)) < len(event.rollouts):
            raise IllegalMoveError(f"Step {event.step} cannot admit a rollout twice, and its list names one twice.")
        self._fetch(RolloutState, event.rollouts)
        states = {rollout: self._get(RolloutState, rollout) for rollout in event.rollouts}
        if missing := [rollout for rollout, state in states.items() if state is None]:
            raise IllegalMoveError(f"Step {event.step} cannot admit rollout {missing[0]}, which was never queued.")
        tasks = {state.task for state in states.values() if state is not None}
        self._settle(tasks, frozenset(event.rollouts), event.step, "")
        self._set(StepState(event.step))

    def _settle(self, tasks: set[int], admitted: frozenset[int], step: int, cause: str) -> None:
        """Close these tasks: of their rollouts, those admitted are trained on and the others are set aside."""
        self._fetch(TaskState, tasks)
        what = f"step {step} cannot {'admit its rollouts' if admitted else 'drop it'}"
        states = [self._task(task, what) for task in sorted(tasks)]
        self._fetch(RolloutState, [rollout for state in states for rollout in state.rollouts])
        phase = Phase.ADMITTED if admitted else Phase.DROPPED
        for state in states:
            self._set(replace(state, phase=phase, step=step, cause=cause))
            for id in state.rollouts:
                rollout = self._get(RolloutState, id)
                assert rollout is not None, f"task {state.id} names rollout {id}, which has no state"
                move = Move.ADMIT if id in admitted else Move.DROP
                _legal(id, rollout, move)
                self._set(replace(rollout, settled=Phase.ADMITTED if id in admitted else Phase.DROPPED))

    def _task(self, ordinal: int, what: str) -> TaskState:
        """An open task."""
        state = self._get(TaskState, ordinal)
        if state is None:
            raise IllegalMoveError(f"Task {ordinal} was never issued, so {what}.")
        if state.phase is not Phase.OPEN:
            raise IllegalMoveError(f"Task {ordinal} is settled ({state.phase} at step {state.step}), so {what}.")
        return state

    def _fetch(self, kind: type[S], ids: Iterable[int]) -> None:
        """Know the states of these ids, or that there are none."""
        unknown = [id for id in ids if (kind.kind, id) not in self._known]
        if unknown:
            found = self._load(kind, unknown)
            self._known.update({(kind.kind, id): found.get(id) for id in unknown})

    def _get(self, kind: type[S], id: int) -> S | None:
        self._fetch(kind, (id,))
        state = self._known[kind.kind, id]
        assert state is None or isinstance(state, kind)
        return state

    def _set(self, state: State) -> None:
        self._known[state.kind, state.id] = state
        self.changed[state.kind, state.id] = state


def _legal(id: int, state: RolloutState | None, move: Move) -> Status:
    """Where a move leads, if the rollout may make it."""
    if state is not None and state.settled is not None:
        raise IllegalMoveError(f"Rollout {id} cannot {move}: its task {state.task} is settled; it was {state.settled}.")
    status = None if state is None else state.status
    if (status, move) not in MOVES:
        may = ", ".join(other for known, other in MOVES if known is status)
        raise IllegalMoveError(f"Rollout {id} is {status or 'not known'} and cannot {move}; it may only {may}.")
    return MOVES[status, move]


def _moved(state: RolloutState, status: Status, event: RolloutEvent) -> RolloutState:
    """A rollout after something happened to it that leads to this status."""
    if isinstance(event, AttemptStarted):
        if event.attempt != len(state.attempts):
            raise _misnumbered(state, event.attempt, len(state.attempts))
        return replace(state, status=status, attempts=(*state.attempts, AttemptState()))
    if isinstance(event, RolloutCancelled | RolloutExpired):
        attempts = state.attempts
        if attempts and attempts[-1].status is Status.RUNNING:
            attempts = (*attempts[:-1], replace(attempts[-1], status=Status.CANCELLED, error=event.why))
        return replace(state, status=status, attempts=attempts, why=event.why)
    assert isinstance(event, TurnRecorded | Rewarded | AttemptEnded), f"nothing says what {event.kind} changes"
    if event.attempt != len(state.attempts) - 1:
        raise _misnumbered(state, event.attempt, len(state.attempts) - 1)
    return replace(state, status=status, attempts=(*state.attempts[:-1], _after(state, event)))


def _after(state: RolloutState, event: TurnRecorded | Rewarded | AttemptEnded) -> AttemptState:
    """The newest attempt of a rollout after something happened to it."""
    attempt = state.attempts[-1]
    where = f"Attempt {event.attempt} of rollout {state.id}"
    if isinstance(event, TurnRecorded):
        if event.turn.index != attempt.turns:
            raise IllegalMoveError(
                f"{where} cannot record turn {event.turn.index}: the next one is turn {attempt.turns}, and each is "
                "written once, in order."
            )
        return replace(attempt, turns=attempt.turns + 1)
    if isinstance(event, Rewarded):
        if attempt.reward is not None:
            raise IllegalMoveError(
                f"{where} cannot be rewarded {event.reward}: it has {attempt.reward}, which is final."
            )
        told = {name: getattr(event, name) for name in ("reward", "parts", "truncated", "paid", "role")}
        return replace(attempt, **told)
    return replace(attempt, status=Status(event.outcome), error=event.error)


def _misnumbered(state: RolloutState, given: int, wanted: int) -> IllegalMoveError:
    return IllegalMoveError(
        f"Rollout {state.id} is {state.status} and has {len(state.attempts)} attempts; an event of attempt {given} "
        f"cannot follow, only one of attempt {wanted}."
    )
