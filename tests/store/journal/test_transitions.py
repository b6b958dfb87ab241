"""The table of legal moves: its required and its forbidden entries, and the laws of every history."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from etude.errors import IllegalTransitionError
from etude.records import Outcome
from etude.store.journal.events import (
    EVENTS,
    AttemptEnded,
    AttemptReady,
    AttemptRewarded,
    AttemptStarted,
    Event,
    LateResultRecorded,
    NoteRecorded,
    RolloutCancelled,
    RolloutEvent,
    RolloutExpired,
    RolloutQueued,
    RolloutResumed,
    RolloutSealed,
    TaskIssued,
    TurnRecorded,
    TurnRewarded,
)
from etude.store.journal.states import LIVE, RolloutState, S, Status
from etude.store.journal.transitions import (
    NEVER_CLOSED,
    TERMINAL_TRANSITIONS,
    TRANSITIONS,
    EventFold,
    Transition,
    transition_of,
)
from tests.store.made import turn

TERMINAL = set(Status) - {Status.QUEUED} - LIVE


def nothing(kind: type[S], ids: Iterable[int]) -> Mapping[int, S]:
    return {}


def test_a_terminal_status_is_final() -> None:
    assert all(after is status for (status, _), after in TRANSITIONS.items() if status in TERMINAL)


def test_every_status_is_reached_and_every_move_made() -> None:
    assert {after for (status, _), after in TRANSITIONS.items() if after is not status} == set(Status) - {
        Status.PREPARING  # of attempts alone
    }
    assert {move for _, move in TRANSITIONS} == set(Transition)


def test_only_running_work_records_and_only_finished_work_is_settled() -> None:
    assert {status for status, move in TRANSITIONS if move is Transition.TURN} == {Status.RUNNING}
    assert {status for status, move in TRANSITIONS if move is Transition.DROP} == TERMINAL
    assert {status for status, move in TRANSITIONS if move is Transition.SEAL} == TERMINAL
    trained_on = {status for status, move in TRANSITIONS if move is Transition.ADMIT}
    assert trained_on == TERMINAL - {Status.CANCELLED, Status.INFRA_ERROR}
    for earned in (Transition.REWARD, Transition.REWARD_TURN):
        assert {status for status, move in TRANSITIONS if move is earned} == trained_on | {Status.RUNNING}


def test_events_without_consequences_are_always_accepted() -> None:
    for move in NEVER_CLOSED:
        assert {status: after for (status, other), after in TRANSITIONS.items() if other is move} == {
            status: status for status in set(Status) - {Status.PREPARING}
        }


def test_every_outcome_is_a_status_with_its_own_move() -> None:
    assert {Status(outcome) for outcome in Outcome} == TERMINAL == set(TERMINAL_TRANSITIONS)
    for status, move in TERMINAL_TRANSITIONS.items():
        assert TRANSITIONS[Status.RUNNING, move] is status


def test_every_event_of_a_rollout_is_a_move() -> None:
    examples: list[RolloutEvent] = [
        RolloutQueued(0, 0, 0),
        RolloutResumed(0, 1),
        RolloutCancelled(0, ""),
        RolloutSealed(0),
        RolloutExpired(0, ""),
        AttemptStarted(0, 0),
        AttemptReady(0, 0),
        TurnRecorded(0, 0, turn()),
        TurnRewarded(0, 0, 0, 1.0),
        AttemptRewarded(0, 0, 1.0),
        NoteRecorded(0, 0, "seen"),
        AttemptEnded(0, 0, Outcome.FAILED),
        LateResultRecorded(0, 0, Outcome.FAILED),
    ]
    assert {type(event) for event in examples} == {kind for kind in EVENTS.values() if issubclass(kind, RolloutEvent)}
    assert {transition_of(event) for event in examples} <= set(Transition)
    assert transition_of(AttemptEnded(0, 0, Outcome.FAILED, retry=True)) is Transition.RETRY


events = st.one_of(
    st.just(RolloutCancelled(0, "enough")),
    st.just(RolloutExpired(0, "late")),
    st.just(RolloutResumed(0, 2)),
    st.just(RolloutSealed(0)),
    st.builds(AttemptStarted, st.just(0), st.integers(0, 2), st.sampled_from(["", "runner"])),
    st.builds(AttemptReady, st.just(0), st.integers(0, 2)),
    st.builds(TurnRewarded, st.just(0), st.integers(0, 2), st.integers(0, 2), st.just(0.5)),
    st.builds(NoteRecorded, st.just(0), st.integers(0, 2), st.just("seen")),
    st.builds(LateResultRecorded, st.just(0), st.integers(0, 2), st.sampled_from(sorted(Outcome))),
    st.builds(lambda attempt, index: TurnRecorded(0, attempt, turn(index)), st.integers(0, 2), st.integers(0, 2)),
    st.builds(AttemptRewarded, st.just(0), st.integers(0, 2), st.just(1.0)),
    st.builds(AttemptEnded, st.just(0), st.integers(0, 2), st.sampled_from(sorted(Outcome))),
    st.builds(
        lambda attempt, ended_by_queue: AttemptEnded(
            0, attempt, Outcome.INFRA_ERROR, "lost", retry=True, ended_by_queue=ended_by_queue
        ),
        st.integers(0, 2),
        st.booleans(),
    ),
)


@given(st.lists(events, max_size=40))
def test_any_history_keeps_the_laws(history: list[Event]) -> None:
    """For any events in any order, a final status stays, attempts end once, turns and rewards are single."""
    fold = EventFold(nothing)
    fold.extend([TaskIssued(0, 0, "s", {}), RolloutQueued(0, 0, 0)])
    accepted: list[Event] = []
    for event in history:
        before = fold.changed["rollout", 0]
        try:
            fold.extend([event])
        except IllegalTransitionError:
            assert fold.changed["rollout", 0] is before
            continue
        accepted.append(event)
        after = fold.changed["rollout", 0]
        assert isinstance(before, RolloutState) and isinstance(after, RolloutState)
        assert before.status not in TERMINAL or after.status is before.status
        if not isinstance(event, LateResultRecorded):
            assert after.attempts[: len(before.attempts) - 1] == before.attempts[:-1], "only the newest attempt changes"
        else:
            assert [replace(attempt, late=None) for attempt in after.attempts] == [
                replace(attempt, late=None) for attempt in before.attempts
            ], "a late end changes nothing else"
            assert after.attempts[event.attempt].ended_by_queue and before.attempts[event.attempt].late is None
        running = [attempt for attempt in after.attempts if attempt.status in LIVE]
        assert len(running) == (after.status is Status.RUNNING)
    end = fold.changed["rollout", 0]
    assert isinstance(end, RolloutState)
    started = [event.attempt for event in accepted if isinstance(event, AttemptStarted)]
    assert started == list(range(len(end.attempts)))
    ended = [event.attempt for event in accepted if isinstance(event, AttemptEnded)]
    assert len(set(ended)) == len(ended)
    for number, attempt in enumerate(end.attempts):
        own = [event for event in accepted if getattr(event, "attempt", None) == number]
        assert [event.turn.index for event in own if isinstance(event, TurnRecorded)] == list(range(attempt.turns))
        assert len([event for event in own if isinstance(event, AttemptRewarded)]) == (attempt.reward is not None)
        assert attempt.paid == sum(event.reward for event in own if isinstance(event, TurnRewarded))
        prepared = [event for event in own if isinstance(event, AttemptReady)]
        assert len(prepared) <= (attempt.runner == "runner")
        if attempt.status is Status.PREPARING:
            assert [type(event) for event in own] == [AttemptStarted]
