"""Memory, SQLite and an SQLite that is reopened all the time are one store: each accepts and refuses the same
events."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from etude.errors import IllegalTransitionError
from etude.records import Outcome
from etude.store import (
    AttemptEnded,
    AttemptReady,
    AttemptRewarded,
    AttemptStarted,
    Event,
    Journal,
    LateResultRecorded,
    NoteRecorded,
    ResourcePut,
    RolloutCancelled,
    RolloutExpired,
    RolloutQueued,
    RolloutsAdmitted,
    TaskDropped,
    TaskIssued,
    TurnRecorded,
    TurnRewarded,
    open_store,
)
from etude.store.journal.event_records import encode
from tests.store.made import turn

GROUP, TASKS = 2, 3
tasks, rollouts = st.integers(0, TASKS - 1), st.integers(0, TASKS * GROUP - 1)
attempts, steps = st.integers(0, 1), st.integers(1, 3)
anything: st.SearchStrategy[Event] = st.one_of(
    st.builds(TaskIssued, tasks, st.integers(0, 9), st.just("s"), st.just({"prompt": "?"})),
    st.builds(RolloutQueued, rollouts, tasks, st.integers(0, GROUP - 1)),
    st.builds(AttemptStarted, rollouts, attempts, st.sampled_from(["", "runner"])),
    st.builds(AttemptReady, rollouts, attempts),
    st.builds(TurnRewarded, rollouts, attempts, attempts, st.floats(-1, 1)),
    st.builds(NoteRecorded, rollouts, attempts, st.just("seen")),
    st.builds(LateResultRecorded, rollouts, attempts, st.just(Outcome.SUCCEEDED)),
    st.builds(ResourcePut, st.sampled_from(["endpoint", "prompt"]), st.integers(1, 3), st.none()),
    st.builds(lambda id, attempt, index: TurnRecorded(id, attempt, turn(index, seed=id)), rollouts, attempts, attempts),
    st.builds(AttemptRewarded, rollouts, attempts, st.floats(-1, 1)),
    st.builds(AttemptEnded, rollouts, attempts, st.sampled_from(sorted(Outcome))),
    st.builds(lambda id, attempt: AttemptEnded(id, attempt, Outcome.FAILED, "!", retry=True), rollouts, attempts),
    st.builds(RolloutCancelled, rollouts, st.just("enough")),
    st.builds(RolloutExpired, rollouts, st.just("late")),
    st.builds(RolloutsAdmitted, steps, st.lists(rollouts, max_size=3).map(tuple), steps, steps),
    st.builds(TaskDropped, tasks, steps, st.just("flat")),
)


def likely(task: int, spared: int) -> list[Event]:
    """Return the usual events of a task, without the last `spared` ones."""
    ids = range(task * GROUP, (task + 1) * GROUP)
    story: list[Event] = [TaskIssued(task, task, "s", {}), *(RolloutQueued(id, task, id % GROUP) for id in ids)]
    for id in ids:
        tried = [AttemptStarted(id, 0), TurnRecorded(id, 0, turn(seed=id)), AttemptRewarded(id, 0, 0.5)]
        story += [*tried, AttemptEnded(id, 0, Outcome.SUCCEEDED)]
    return story[: len(story) - spared]


class OneStore(RuleBasedStateMachine):
    """All journals get the same batches; between two batches, one of them may be closed and opened again."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.path = Path(self.folder.name)
        self.memory = open_store()
        self.on_file = open_store(self.path / "kept.db")
        self.reopened = open_store(self.path / "reopened.db")

    def all(self) -> list[Journal]:
        return [self.memory, self.on_file, self.reopened]

    def append(self, events: list[Event]) -> None:
        answers = set()
        for store in self.all():
            try:
                answers.add(str(store.append(events)))
            except IllegalTransitionError as error:
                answers.add(str(error))
        assert len(answers) == 1, answers

    @rule(events=st.lists(anything, max_size=4))
    def any_events(self, events: list[Event]) -> None:
        self.append(events)

    @rule(task=tasks, spared=st.integers(0, 8))
    def a_task(self, task: int, spared: int) -> None:
        self.append(likely(task, spared))

    @rule(step=steps, task=tasks)
    def a_step(self, step: int, task: int) -> None:
        self.append([RolloutsAdmitted(step, tuple(range(task * GROUP, (task + 1) * GROUP)), end=0, version=0)])

    @rule()
    def open_again(self) -> None:
        self.reopened.close()
        self.reopened = open_store(self.path / "reopened.db")

    @invariant()
    def all_are_the_same(self) -> None:
        first = self.memory
        log = [(at, encode(event)) for at, event in first.read()]
        assert [at for at, _ in log] == list(range(1, first.position + 1))
        for store in self.all()[1:]:
            assert [(at, encode(event)) for at, event in store.read()] == log
            assert store.rollouts() == first.rollouts() and store.tasks() == first.tasks()
            assert store.admitted() == first.admitted()
            for state in first.rollouts():
                turns = [encode(TurnRecorded(0, 0, recorded)) for recorded in store.turns(state.id)]
                assert turns == [encode(TurnRecorded(0, 0, recorded)) for recorded in first.turns(state.id)]

    @invariant()
    def states_are_what_the_events_say(self) -> None:
        for store in self.all():
            replayed = sorted(store.replay().items())
            assert [state for (kind, _), state in replayed if kind == "rollout"] == store.rollouts()
            assert [state for (kind, _), state in replayed if kind == "task"] == store.tasks()

    def teardown(self) -> None:
        for store in self.all():
            store.close()
        self.folder.cleanup()


TestOneStore = OneStore.TestCase
TestOneStore.settings = settings(max_examples=10, stateful_step_count=12)
