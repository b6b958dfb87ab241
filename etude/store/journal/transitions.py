"""The legal transitions of rollouts, and the states that events lead to. Pure functions: no clock, no I/O.

A rollout is queued, runs, and ends as its last attempt ended. If the attempt may be retried, the rollout is queued
again. A terminal status is final.

The use of a finished rollout is a separate state. A rollout is open until its task is *closed*: a step admits the
group, or the task is dropped. From then on only events without an effect may follow: notes, and late reports of
attempts that were over.

`EventFold` applies a batch of events one by one, and holds the states that they change. It refuses an illegal event,
and is then as before the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Protocol

from etude.errors import IllegalTransitionError
from etude.store.journal.events import (
    AttemptEnded,
    AttemptReady,
    AttemptRewarded,
    AttemptStarted,
    Event,
    LateResultRecorded,
    NoteRecorded,
    ResourcePut,
    RolloutCancelled,
    RolloutEvent,
    RolloutExpired,
    RolloutQueued,
    RolloutResumed,
    RolloutsAdmitted,
    RolloutSealed,
    TaskDropped,
    TaskIssued,
    TurnRecorded,
    TurnRewarded,
)
from etude.store.journal.states import (
    LIVE,
    AttemptState,
    Phase,
    ResourceState,
    RolloutState,
    S,
    State,
    Status,
    StepState,
    TaskState,
)


class Transition(StrEnum):
    """The effect of an event on a rollout. Its value completes a sentence: "Rollout 3 cannot …"."""

    QUEUE = "be queued"
    RESUME = "be queued again by its run"
    START = "be started"
    READY = "be ready"
    TURN = "record a turn"
    REWARD_TURN = "be rewarded for a turn"
    REWARD = "be rewarded"
    NOTE = "record a note"
    LATE = "be reported late"
    RETRY = "be retried"
    SUCCEED = "succeed"
    FAIL = "fail"
    TIME_OUT = "time out"
    FALL_SILENT = "become unresponsive"
    BREAK = "meet an infrastructure error"
    CANCEL = "be cancelled"
    EXPIRE = "expire in the queue"
    SEAL = "be sealed"
    ADMIT = "be admitted"
    DROP = "be dropped"


TERMINAL_TRANSITIONS: dict[Status, Transition] = {
    Status.SUCCEEDED: Transition.SUCCEED,
    Status.FAILED: Transition.FAIL,
    Status.TIMED_OUT: Transition.TIME_OUT,
    Status.UNRESPONSIVE: Transition.FALL_SILENT,
    Status.CANCELLED: Transition.CANCEL,
    Status.INFRA_ERROR: Transition.BREAK,
}
"""The transition that leads to each terminal status."""

_AFTER_FAILURE = (Transition.NOTE, Transition.SEAL, Transition.LATE, Transition.DROP)
_AFTER_RESULT = (*_AFTER_FAILURE, Transition.REWARD_TURN, Transition.REWARD, Transition.ADMIT)
_UNCHANGED: dict[Status, tuple[Transition, ...]] = {
    Status.QUEUED: (Transition.RESUME, Transition.NOTE, Transition.LATE),
    Status.RUNNING: (
        Transition.READY,
        Transition.TURN,
        Transition.REWARD_TURN,
        Transition.REWARD,
        Transition.NOTE,
        Transition.LATE,
    ),
    **dict.fromkeys((Status.SUCCEEDED, Status.FAILED, Status.TIMED_OUT, Status.UNRESPONSIVE), _AFTER_RESULT),
    **dict.fromkeys((Status.CANCELLED, Status.INFRA_ERROR), _AFTER_FAILURE),
}
"""The transitions of each status that leave it as it is."""

TRANSITIONS: dict[tuple[Status | None, Transition], Status] = {
    (None, Transition.QUEUE): Status.QUEUED,
    (Status.QUEUED, Transition.START): Status.RUNNING,
    (Status.QUEUED, Transition.CANCEL): Status.CANCELLED,
    (Status.QUEUED, Transition.EXPIRE): Status.FAILED,
    (Status.RUNNING, Transition.RETRY): Status.QUEUED,
    **{(Status.RUNNING, move): status for status, move in TERMINAL_TRANSITIONS.items()},
    **{(status, move): status for status, moves in _UNCHANGED.items() for move in moves},
}
"""Every legal transition and the status that it leads to. All others are refused."""
NEVER_CLOSED = frozenset({Transition.NOTE, Transition.LATE})
"""Transitions that stay legal after the task is closed, since they have no effect."""


class LoadStates(Protocol):
    """Loads the stored states that a fold needs."""

    def __call__(self, kind: type[S], ids: Iterable[int]) -> Mapping[int, S]:
        """Return the existing states of a kind with these ids."""
        ...


# -- taking events in -------------------------------------------------------------------------------------------------


def transition_of(event: RolloutEvent) -> Transition:
    """Return the transition of an event."""
    if isinstance(event, AttemptEnded):
        return Transition.RETRY if event.retry else TERMINAL_TRANSITIONS[Status(event.outcome)]
    return _TRANSITION_OF[type(event)]


_TRANSITION_OF: dict[type[RolloutEvent], Transition] = {
    RolloutQueued: Transition.QUEUE,
    RolloutResumed: Transition.RESUME,
    RolloutSealed: Transition.SEAL,
    RolloutCancelled: Transition.CANCEL,
    RolloutExpired: Transition.EXPIRE,
    AttemptStarted: Transition.START,
    AttemptReady: Transition.READY,
    TurnRecorded: Transition.TURN,
    TurnRewarded: Transition.REWARD_TURN,
    AttemptRewarded: Transition.REWARD,
    NoteRecorded: Transition.NOTE,
    LateResultRecorded: Transition.LATE,
}


class EventFold:
    """The states that a batch of events leads to, from the stored states that `load` returns."""

    def __init__(self, load: LoadStates) -> None:
        self._load = load
        self._loaded: dict[tuple[str, int], State | None] = {}
        self.changed: dict[tuple[str, int], State] = {}
        """The states that changed since they were loaded, by kind and id."""
        self._batch: dict[tuple[str, int], State] = {}
        """The states that the present batch has changed so far."""

    def extend(self, events: Iterable[Event]) -> None:
        """Apply these events in order: all, or none if one is illegal."""
        try:
            self._extend(list(events))
            self.changed |= self._batch
        finally:
            self._batch = {}

    def get(self, kind: type[S], id: int) -> S | None:
        """Return a state after the applied events, if there is one."""
        key = kind.kind, id
        state = self._batch.get(key) or self.changed.get(key)
        if state is None:
            self._fetch(kind, (id,))
            state = self._loaded[key]
        assert state is None or isinstance(state, kind)
        return state

    def _extend(self, events: Sequence[Event]) -> None:
        self._fetch(TaskState, {event.task for event in events if isinstance(event, TaskIssued | RolloutQueued)})
        self._fetch(RolloutState, {event.rollout for event in events if isinstance(event, RolloutEvent)})
        for event in events:
            if isinstance(event, RolloutEvent):
                self._rollout(event)
            elif isinstance(event, TaskIssued):
                self._issue(event)
            elif isinstance(event, TaskDropped):
                self._close({event.task}, frozenset(), event.step, event.cause)
            elif isinstance(event, RolloutsAdmitted):
                self._admit(event)
            elif isinstance(event, ResourcePut):
                self._put(event)

    def _rollout(self, event: RolloutEvent) -> None:
        state = self.get(RolloutState, event.rollout)
        status = _legal(event.rollout, state, transition_of(event))
        if isinstance(event, RolloutQueued):
            task = self._task(event.task, f"rollout {event.rollout} cannot be queued for it")
            self._set(replace(task, rollouts=(*task.rollouts, event.rollout)))
            queued = RolloutState(
                event.rollout,
                event.task,
                event.sample,
                status,
                use=event.use,
                limits=event.limits,
                epoch=event.epoch,
                greedy=event.greedy,
                floor=event.floor,
                resources=event.resources,
            )
            self._set(queued)
        else:
            assert state is not None, "a rollout is only ever queued before it has a state"
            changed = _apply_event(state, status, event)
            if changed is not state:
                self._set(changed)

    def _issue(self, event: TaskIssued) -> None:
        if self.get(TaskState, event.task) is not None:
            raise IllegalTransitionError(
                f"Task {event.task} cannot be issued: it was issued before, and an ordinal is used once."
            )
        self._set(TaskState(event.task, event.row, event.source, event.fields, use=event.use))

    def _admit(self, event: RolloutsAdmitted) -> None:
        if self.get(StepState, event.step) is not None:
            raise IllegalTransitionError(f"Step {event.step} cannot admit rollouts: it has admitted rollouts before.")
        if len(set(event.rollouts)) < len(event.rollouts):
            raise IllegalTransitionError(
                f"Step {event.step} cannot admit a rollout twice, and its list names one twice."
            )
        self._fetch(RolloutState, event.rollouts)
        states = {rollout: self.get(RolloutState, rollout) for rollout in event.rollouts}
        if missing := [rollout for rollout, state in states.items() if state is None]:
            raise IllegalTransitionError(
                f"Step {event.step} cannot admit rollout {missing[0]}, which was never queued."
            )
        tasks = {state.task for state in states.values() if state is not None}
        self._close(tasks, frozenset(event.rollouts), event.step, "")
        self._set(StepState(event.step))

    def _close(self, tasks: set[int], admitted: frozenset[int], step: int, cause: str) -> None:
        """Close these tasks: their admitted rollouts are trained on, the others are set aside."""
        self._fetch(TaskState, tasks)
        what = f"step {step} cannot {'admit its rollouts' if admitted else 'drop it'}"
        states = [self._task(task, what) for task in sorted(tasks)]
        self._fetch(RolloutState, [rollout for state in states for rollout in state.rollouts])
        phase = Phase.ADMITTED if admitted else Phase.DROPPED
        for state in states:
            self._set(replace(state, phase=phase, step=step, cause=cause))
            for id in state.rollouts:
                rollout = self.get(RolloutState, id)
                assert rollout is not None, f"task {state.id} names rollout {id}, which has no state"
                move = Transition.ADMIT if id in admitted else Transition.DROP
                _legal(id, rollout, move)
                self._set(replace(rollout, closed=Phase.ADMITTED if id in admitted else Phase.DROPPED))

    def _put(self, event: ResourcePut) -> None:
        id = ResourceState.id_of(event.name)
        state = self.get(ResourceState, id)
        newest = 0 if state is None else state.version
        if event.version != newest + 1:
            raise IllegalTransitionError(
                f"The resource '{event.name}' is at version {newest}, so version {event.version} cannot follow, only "
                f"{newest + 1}."
            )
        self._set(ResourceState(id, event.name, event.version, event.value))

    def _task(self, ordinal: int, what: str) -> TaskState:
        state = self.get(TaskState, ordinal)
        if state is None:
            raise IllegalTransitionError(f"Task {ordinal} was never issued, so {what}.")
        if state.phase is not Phase.OPEN:
            raise IllegalTransitionError(f"Task {ordinal} is closed ({state.phase} at step {state.step}), so {what}.")
        return state

    def _fetch(self, kind: type[S], ids: Iterable[int]) -> None:
        """Load the states of these ids that are not loaded yet."""
        missing = [id for id in ids if (kind.kind, id) not in self._loaded]
        if missing:
            states = self._load(kind, missing)
            self._loaded.update({(kind.kind, id): states.get(id) for id in missing})

    def _set(self, state: State) -> None:
        self._batch[state.kind, state.id] = state


def _legal(id: int, state: RolloutState | None, move: Transition) -> Status:
    """Return the status that a transition leads to, if it is legal."""
    if state is not None and state.closed is not None and move not in NEVER_CLOSED:
        raise IllegalTransitionError(
            f"Rollout {id} cannot {move}: its task {state.task} is closed; it was {state.closed}."
        )
    status = None if state is None else state.status
    if (status, move) not in TRANSITIONS:
        may = ", ".join(other for other in Transition if (status, other) in TRANSITIONS)
        raise IllegalTransitionError(f"Rollout {id} is {status or 'not known'} and cannot {move}; it may only {may}.")
    return TRANSITIONS[status, move]


def _apply_event(state: RolloutState, status: Status, event: RolloutEvent) -> RolloutState:
    if isinstance(event, AttemptStarted):
        if event.attempt != len(state.attempts):
            raise _misnumbered(state, event.attempt, len(state.attempts))
        attempt = AttemptState(Status.PREPARING if event.runner else Status.RUNNING, runner=event.runner)
        return replace(state, status=status, attempts=(*state.attempts, attempt))
    if isinstance(event, RolloutResumed):
        return replace(state, epoch=event.epoch, floor=event.floor, forgiven=event.forgiven)
    if isinstance(event, RolloutSealed):
        return replace(state, sealed=True)
    if isinstance(event, RolloutCancelled | RolloutExpired):
        attempts = state.attempts
        if attempts and attempts[-1].status in LIVE:
            over = replace(attempts[-1], status=Status.CANCELLED, error=event.why, ended_by_queue=True)
            attempts = (*attempts[:-1], over)
        return replace(state, status=status, attempts=attempts, why=event.why)
    assert isinstance(event, AttemptEvent), f"no rule covers the event {event.kind}"
    newest = len(state.attempts) - 1
    if event.attempt != newest and not (
        isinstance(event, NoteRecorded | LateResultRecorded) and 0 <= event.attempt < newest
    ):
        raise _misnumbered(state, event.attempt, newest)
    before = state.attempts[event.attempt]
    after = _apply_to_attempt(f"Attempt {event.attempt} of rollout {state.id}", before, event)
    if after is before and status is state.status:
        return state
    attempts = (*state.attempts[: event.attempt], after, *state.attempts[event.attempt + 1 :])
    return replace(state, status=status, attempts=attempts)


AttemptEvent = (
    AttemptReady | TurnRecorded | TurnRewarded | AttemptRewarded | NoteRecorded | AttemptEnded | LateResultRecorded
)


def _apply_to_attempt(where: str, attempt: AttemptState, event: AttemptEvent) -> AttemptState:
    if isinstance(event, LateResultRecorded):
        return _apply_late_result(where, attempt, event)
    if isinstance(event, AttemptEnded):
        return replace(
            attempt,
            status=Status(event.outcome),
            error=event.error,
            ended_by_queue=event.ended_by_queue,
            truncated=attempt.truncated or event.truncated,
            role=attempt.role or event.role,
        )
    if isinstance(event, AttemptReady) and attempt.status is not Status.PREPARING:
        raise IllegalTransitionError(
            f"{where} is {attempt.status} and cannot be ready; only one that is preparing may be."
        )
    if attempt.status is Status.PREPARING:
        attempt = replace(attempt, status=Status.RUNNING)
    if isinstance(event, TurnRecorded):
        if event.turn.index != attempt.turns:
            raise IllegalTransitionError(
                f"{where} cannot record turn {event.turn.index}: the next one is turn {attempt.turns}, and each is "
                "written once, in order."
            )
        versions = [version for version in (attempt.oldest, event.turn.oldest) if version is not None]
        return replace(attempt, turns=attempt.turns + 1, oldest=min(versions, default=None))
    if isinstance(event, TurnRewarded):
        if not 0 <= event.turn < attempt.turns:
            raise IllegalTransitionError(
                f"{where} cannot be rewarded for turn {event.turn}: it has {attempt.turns} turns."
            )
        return replace(attempt, paid=attempt.paid + event.reward)
    if isinstance(event, AttemptRewarded):
        if attempt.reward is not None:
            raise IllegalTransitionError(
                f"{where} cannot be rewarded {event.reward}: it has {attempt.reward}, which is final."
            )
        changed = {name: getattr(event, name) for name in ("reward", "parts", "truncated", "role", "extracted")}
        return replace(attempt, **changed, paid=attempt.paid + event.paid)
    return attempt


def _apply_late_result(where: str, attempt: AttemptState, event: LateResultRecorded) -> AttemptState:
    if not attempt.ended_by_queue:
        may = "be reported in time" if attempt.status in LIVE else "stay as it was reported"
        raise IllegalTransitionError(f"{where} is {attempt.status} and cannot be reported late; it may only {may}.")
    if attempt.late is not None:
        raise IllegalTransitionError(
            f"{where} is {attempt.status} and was reported late before, as {attempt.late['outcome']}; it cannot be "
            f"reported again, as {event.outcome}."
        )
    return replace(attempt, late={name: getattr(event, name) for name in ("outcome", "error", "reward", "parts")})


def _misnumbered(state: RolloutState, actual: int, expected: int) -> IllegalTransitionError:
    return IllegalTransitionError(
        f"Rollout {state.id} is {state.status} and has {len(state.attempts)} attempts; an event of attempt {actual} "
        f"cannot follow, only one of attempt {expected}."
    )
