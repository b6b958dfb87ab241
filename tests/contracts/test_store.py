"""The contract of every journal, in memory, SQLite or PostgreSQL."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from etude.errors import IllegalTransitionError, StoreError
from etude.records import Outcome, Task
from etude.store import (
    AttemptEnded,
    AttemptReady,
    AttemptRewarded,
    AttemptStarted,
    Event,
    Journal,
    LateResultRecorded,
    NoteRecorded,
    Phase,
    PolicyEvaluated,
    PolicyPublished,
    ResourcePut,
    RolloutCancelled,
    RolloutExpired,
    RolloutQueued,
    RolloutsAdmitted,
    RolloutState,
    Status,
    TaskDropped,
    TaskIssued,
    TaskState,
    TurnRecorded,
    TurnRewarded,
    open_store,
)
from etude.store.queue.rollout_limits import RolloutPurpose
from tests.store.made import group, same, tried, turn
from tests.store.servers import new_database

WHERE: dict[str, Callable[[Path], Path | str | None]] = {
    "memory": lambda _: None,
    "sqlite": lambda folder: folder / "journal.db",
    "postgres": lambda _: new_database(),
}


@pytest.fixture(params=list(WHERE))
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Journal]:
    with closing(open_store(WHERE[request.param](tmp_path))) as made:
        yield made


STORY: list[Event] = [
    *group(0),
    *group(1),
    *tried(0, 1.0),
    *tried(1, 0.0, turns=3),
    AttemptStarted(2, 0, "runner"),
    AttemptReady(2, 0),
    TurnRecorded(2, 0, turn()),
    TurnRewarded(2, 0, 0, 0.25),
    NoteRecorded(2, 0, "seen", {"tool": "search"}),
    AttemptEnded(2, 0, Outcome.UNRESPONSIVE, "silent for 60 s", retry=True, ended_by_queue=True),
    LateResultRecorded(2, 0, Outcome.SUCCEEDED, reward=1.0),
    RolloutExpired(3, "queued for 600 s"),
    *tried(2, 0.5, attempt=1),
    RolloutsAdmitted(1, (1, 0), end=1, version=0),
    TaskDropped(1, 1, "infrastructure"),
    PolicyPublished(1, 1),
    ResourcePut("prompt", 1, "Think."),
    PolicyEvaluated(1, "val", {"mean@4": 0.25, "pass@4": 0.5}, [{"prompt": "1+1?", "answer": "2", "reward": 1.0}]),
]


LATE = {"outcome": "succeeded", "error": "", "reward": 1.0, "parts": {}}


# -- the log ----------------------------------------------------------------------------------------------------------


def test_an_empty_journal_has_no_events_and_no_states(store: Journal) -> None:
    assert store.position == 0 and list(store.read()) == [] and store.rollouts() == [] and store.admitted() == {}


def test_appended_events_are_read_in_order_from_position_one(store: Journal) -> None:
    assert store.append(STORY[:4]) == 4
    assert store.append([]) == 4
    assert store.append(STORY[4:]) == len(STORY) == store.position
    positions, events = zip(*store.read(), strict=True)
    assert positions == tuple(range(1, len(STORY) + 1)) and same(events, STORY)


def test_a_reader_that_remembers_its_position_misses_nothing_and_sees_nothing_twice(store: Journal) -> None:
    seen: list[Event] = []
    position = 0
    for event in STORY:
        store.append([event])
        for at, read in store.read(position):
            position = at
            seen.append(read)
    assert same(seen, STORY) and position == len(STORY)


def test_reading_shows_the_state_at_the_call(store: Journal) -> None:
    store.append(group(0))
    under_way = store.read()
    next(under_way)
    store.append(group(1))
    assert [at for at, _ in under_way] == [2, 3]


def test_many_events_are_read_in_pages_without_gaps(store: Journal) -> None:
    store.append([event for task in range(300) for event in group(task)])
    assert [at for at, _ in store.read(17)] == list(range(18, 901))
    issued = [event.task for _, event in store.read(kinds=(TaskIssued,)) if isinstance(event, TaskIssued)]
    assert issued == list(range(300))
    both = [at for at, _ in store.read(30, kinds=(RolloutQueued, TaskIssued))]
    assert both == list(range(31, 901))


def test_events_are_selected_by_kind_and_rollout(store: Journal) -> None:
    store.append(STORY)
    for kinds in [(TurnRecorded,), (RolloutsAdmitted, TaskDropped), (AttemptRewarded, RolloutQueued, PolicyPublished)]:
        wanted = [(at, type(event)) for at, event in enumerate(STORY, 1) if isinstance(event, kinds)]
        assert [(at, type(event)) for at, event in store.read(kinds=kinds)] == wanted
    of_two = [event for event in STORY if getattr(event, "rollout", None) == 2]
    assert same([event for _, event in store.read(rollout=2)], of_two)
    assert [type(event) for _, event in store.read(rollout=2, kinds=(AttemptEnded,))] == [AttemptEnded, AttemptEnded]


def test_the_events_of_several_rollouts_are_read_at_once(store: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    store.append(STORY)
    ids = [3, 0, 99, 2]
    wanted = [[event for event in STORY if getattr(event, "rollout", None) == id] for id in ids]
    assert len(wanted[0]) > 1 and not wanted[2]
    for most in (2**20, 1000, 1):
        monkeypatch.setattr("etude.store.journal.journal.PAGE_BYTES", most)
        read = list(store.read_rollouts(ids))
        assert len(read) == 4 and all(same(*pair) for pair in zip(read, wanted, strict=True))
    assert list(store.read_rollouts([])) == []


def test_a_batch_is_written_whole_or_not_at_all(store: Journal) -> None:
    store.append(STORY[:6])
    before = [(at, type(event)) for at, event in store.read()], store.rollouts(), store.tasks()
    wrong = [*group(7), *tried(14), RolloutQueued(14, 7, 0)]
    with pytest.raises(IllegalTransitionError, match="Rollout 14 is succeeded and cannot be queued"):
        store.append(wrong)
    assert ([(at, type(event)) for at, event in store.read()], store.rollouts(), store.tasks()) == before
    assert store.append([*group(7), *tried(14)]) == 6 + 7
    assert same([event for _, event in store.read(6)], wrong[:-1]), "the refused batch left nothing behind"


def test_nothing_is_shared_with_the_caller(store: Journal) -> None:
    fields = {"prompt": ["a"]}
    store.append([TaskIssued(0, 0, "s", fields)])
    fields["prompt"].append("b")
    store.task(0).fields["prompt"].append("c")
    assert store.task(0).fields == {"prompt": ["a"]}


# -- the states -------------------------------------------------------------------------------------------------------


def test_a_sequence_of_events_gives_the_expected_states(store: Journal) -> None:
    store.append(STORY)
    first, second, third, fourth = (store.rollout(id) for id in range(4))
    assert (first.status, first.phase, second.phase) == (Status.SUCCEEDED, Phase.ADMITTED, Phase.ADMITTED)
    assert first.last is not None and (first.last.reward, first.last.parts) == (1.0, {"right": 1.0})
    assert second.last is not None and second.last.turns == 3
    assert [attempt.status for attempt in third.attempts] == [Status.UNRESPONSIVE, Status.SUCCEEDED]
    assert third.attempts[0].error == "silent for 60 s" and third.phase is Phase.DROPPED
    assert (third.attempts[0].paid, third.attempts[0].late) == (0.25, LATE)
    assert [recorded.reward for recorded in store.turns(2, 0)] == [0.25]
    resource = store.resource("prompt")
    assert resource is not None and (resource.version, resource.value) == (1, "Think.")
    assert store.resource("endpoint") is None
    assert (fourth.status, fourth.why, fourth.last) == (Status.FAILED, "queued for 600 s", None)
    assert (store.task(0).phase, store.task(0).step, store.task(0).rollouts) == (Phase.ADMITTED, 1, (0, 1))
    assert (store.task(1).phase, store.task(1).cause) == (Phase.DROPPED, "infrastructure")
    assert store.task(1).task == Task(1, {"prompt": [{"role": "user", "content": "1+1?"}], "answer": "?"}, "sums")
    assert store.admitted() == {1: (1, 0)}


def test_stored_states_equal_a_replay_of_the_events(store: Journal) -> None:
    for event in STORY:
        store.append([event])
        replayed = store.replay()
        assert [state for (kind, _), state in sorted(replayed.items()) if kind == "rollout"] == store.rollouts()
        assert [state for (kind, _), state in sorted(replayed.items()) if kind == "task"] == store.tasks()


def test_states_are_found_by_phase(store: Journal) -> None:
    def ids(*phases: Phase) -> list[int]:
        return [state.id for state in store.rollouts(*phases)]

    store.append([*group(0, 3), *group(1, 3)])
    assert ids(Phase.QUEUED) == [0, 1, 2, 3, 4, 5]
    store.append([AttemptStarted(4, 0), *tried(1), *tried(0)])
    assert (ids(Phase.QUEUED), ids(Phase.RUNNING), ids(Phase.FINISHED)) == ([2, 3, 5], [4], [0, 1])
    assert ids(Phase.QUEUED, Phase.RUNNING) == [2, 3, 4, 5] and ids() == [0, 1, 2, 3, 4, 5]
    store.append([RolloutCancelled(2, "enough"), RolloutsAdmitted(1, (0, 1), end=0, version=0)])
    assert (ids(Phase.FINISHED), ids(Phase.ADMITTED), ids(Phase.DROPPED)) == ([], [0, 1], [2])
    assert [task.id for task in store.tasks(Phase.OPEN)] == [1]


def test_turns_come_back_to_the_last_bit(store: Journal) -> None:
    store.append(STORY)
    (read,), wrote = store.turns(0), turn(0, seed=0)
    assert same([TurnRecorded(0, 0, read)], [TurnRecorded(0, 0, wrote)])
    for name in ("ids", "logp", "version", "raw_logp", "top_ids", "top_logp"):
        np.testing.assert_array_equal(getattr(read.completion, name), getattr(wrote.completion, name))
    assert read.prompt.dtype == np.int32 and read.completion.top_logp is not None
    assert read.completion.top_logp.dtype == np.float32 and not read.prompt.flags.writeable


def test_turns_are_those_of_the_attempt_that_counts(store: Journal) -> None:
    store.append(STORY)
    assert [recorded.index for recorded in store.turns(1)] == [0, 1, 2]
    assert [recorded.completion.text for recorded in store.turns(2)] == ["answer 2.0 ✓"]
    assert [recorded.completion.text for recorded in store.turns(2, attempt=0)] == ["answer 0.0 ✓"]
    assert store.turns(3) == []


def test_admissions_are_read_from_a_position(store: Journal) -> None:
    store.append([*group(0), *tried(0), *tried(1), *group(1), *tried(2), *tried(3)])
    between = store.append([RolloutsAdmitted(1, (0, 1), end=0, version=0)])
    store.append([RolloutsAdmitted(2, (3,), end=0, version=0)])
    assert store.admitted() == {1: (0, 1), 2: (3,)} and store.admitted(between) == {2: (3,)}
    assert store.rollout(2).phase is Phase.DROPPED, "its task is closed without it"


def test_an_unknown_id_is_reported(store: Journal) -> None:
    for query in (store.rollout, store.turns):
        with pytest.raises(StoreError, match=r"The journal has no rollout 5\."):
            query(5)
    with pytest.raises(StoreError, match=r"The journal has no task 5\."):
        store.task(5)


def test_states_are_listed_in_both_orders(store: Journal) -> None:
    store.append([event for task in range(100) for event in group(task)])
    assert [state.id for state in store.iter_states(RolloutState)] == list(range(200))
    assert [state.id for state in store.iter_states(RolloutState, 130)] == list(range(131, 200))
    assert [state.id for state in store.iter_states(RolloutState, 130, backwards=True)] == list(range(129, -1, -1))
    assert [state.id for state in store.iter_states(TaskState, backwards=True)] == list(range(99, -1, -1))
    assert {id: state.task for id, state in store.load_states(RolloutState, [7, 199, 200]).items()} == {7: 3, 199: 99}


def test_states_are_listed_by_use(store: Journal) -> None:
    for id in range(12):
        use: RolloutPurpose = "val" if id % 3 == 2 else "train"
        store.append([TaskIssued(id, id, "s", {}, use), RolloutQueued(id, id, 0, use)])
    store.append([RolloutCancelled(5, "enough")])
    kinds: list[type[TaskState | RolloutState]] = [TaskState, RolloutState]
    for kind in kinds:
        assert [state.id for state in store.iter_states(kind, use="val")] == [2, 5, 8, 11]
        assert [state.id for state in store.iter_states(kind, 8, backwards=True, use="val")] == [5, 2]
        assert [state.id for state in store.iter_states(kind, 6, use="train")] == [7, 9, 10]
    assert store.replay()["task", 5] == store.task(5) and store.task(5).use == "val"


def test_a_refused_batch_does_not_affect_others_written_with_it(store: Journal) -> None:
    with store.transaction() as writing:
        assert writing.append(group(0)) == 3
        for wrong in (tried(9), [*tried(0), RolloutQueued(0, 0, 0)], [TaskIssued(3, 0, "s", {}), AttemptStarted(1, 1)]):
            with pytest.raises(IllegalTransitionError):
                writing.append(wrong)
        assert writing.state(TaskState, 3) is None and writing.state(RolloutState, 9) is None
        assert writing.append([AttemptStarted(0, 0)]) == 4
        state = writing.state(RolloutState, 0)
        assert state is not None and state.status is Status.RUNNING
        assert store.position == 0, "nothing is written before the end"
    assert same([event for _, event in store.read()], [*group(0), AttemptStarted(0, 0)])
    assert [state.status for state in store.rollouts()] == [Status.RUNNING, Status.QUEUED]
    with pytest.raises(KeyError), store.transaction() as writing:
        writing.append(group(1))
        raise KeyError
    assert store.position == 4 and len(store.tasks()) == 1
    store.append(group(1))


# -- illegal events ---------------------------------------------------------------------------------------------------

REFUSED: list[tuple[str, list[Event], str]] = [
    ("task twice", [TaskIssued(0, 5, "s", {})], "Task 0 cannot be issued: it was issued before"),
    ("unknown task", [RolloutQueued(9, 9, 0)], "Task 9 was never issued, so rollout 9 cannot be queued for it"),
    (
        "queued twice",
        [RolloutQueued(0, 0, 0)],
        "Rollout 0 is queued and cannot be queued; it may only be queued again by its run",
    ),
    ("never queued", [AttemptStarted(9, 0)], "Rollout 9 is not known and cannot be started; it may only be queued"),
    ("not started", [TurnRecorded(0, 0, turn())], "Rollout 0 is queued and cannot record a turn"),
    ("reward early", [AttemptRewarded(0, 0, 1.0)], "Rollout 0 is queued and cannot be rewarded"),
    ("started twice", [AttemptStarted(0, 0), AttemptStarted(0, 1)], "Rollout 0 is running and cannot be started"),
    ("attempt from one", [AttemptStarted(0, 1)], "only one of attempt 0"),
    ("other attempt", [AttemptStarted(0, 0), AttemptRewarded(0, 1, 1.0)], "only one of attempt 0"),
    ("turn left out", [AttemptStarted(0, 0), TurnRecorded(0, 0, turn(1))], "cannot record turn 1: the next one is"),
    ("turn twice", [*tried(0)[:2], TurnRecorded(0, 0, turn(0))], "cannot record turn 0: the next one is turn 1"),
    ("reward twice", [*tried(0), AttemptRewarded(0, 0, 0.0)], "cannot be rewarded 0.0: it has 1.0, which is final"),
    ("end twice", [*tried(0), AttemptEnded(0, 0, Outcome.FAILED)], "Rollout 0 is succeeded and cannot fail"),
    ("turn after the end", [*tried(0), TurnRecorded(0, 0, turn(1))], "is succeeded and cannot record a turn"),
    ("retry of the ended", [*tried(0), AttemptStarted(0, 1)], "Rollout 0 is succeeded and cannot be started"),
    ("cancel of the ended", [*tried(0), RolloutCancelled(0, "no")], "is succeeded and cannot be cancelled"),
    ("expired while running", [AttemptStarted(0, 0), RolloutExpired(0, "late")], "cannot expire in the queue"),
    (
        "result of the cancelled",
        [RolloutCancelled(0, "no"), AttemptRewarded(0, 0, 1.0)],
        "Rollout 0 is cancelled and cannot",
    ),
    (
        "admit the queued",
        [*tried(0), RolloutsAdmitted(1, (0,), end=0, version=0)],
        "Rollout 1 is queued and cannot be dropped",
    ),
    (
        "admit the running",
        [AttemptStarted(0, 0), RolloutsAdmitted(1, (0,), end=0, version=0)],
        "Rollout 0 is running and cannot be admitted",
    ),
    (
        "admit the unknown",
        [RolloutsAdmitted(1, (9,), end=0, version=0)],
        "Step 1 cannot admit rollout 9, which was never queued",
    ),
    (
        "admit one twice",
        [*tried(0), *tried(1), RolloutsAdmitted(1, (0, 0, 1), end=0, version=0)],
        "cannot admit a rollout twice",
    ),
    (
        "admit the broken",
        [
            *tried(0, outcome=Outcome.INFRA_ERROR)[:2],
            AttemptEnded(0, 0, Outcome.INFRA_ERROR),
            RolloutsAdmitted(1, (0,), end=0, version=0),
        ],
        "Rollout 0 is infra_error and cannot be admitted",
    ),
    (
        "admit again",
        [
            *tried(0),
            *tried(1),
            RolloutsAdmitted(1, (0, 1), end=0, version=0),
            RolloutsAdmitted(2, (0,), end=0, version=0),
        ],
        r"closed \(admitted at step 1\)",
    ),
    (
        "step twice",
        [
            *tried(0),
            *tried(1),
            RolloutsAdmitted(1, (0, 1), end=0, version=0),
            RolloutsAdmitted(1, (), end=0, version=0),
        ],
        "Step 1 cannot admit rollouts",
    ),
    ("drop the unfinished", [TaskDropped(0, 1, "flat")], "Rollout 0 is queued and cannot be dropped"),
    ("drop the unknown", [TaskDropped(5, 1, "flat")], "Task 5 was never issued, so step 1 cannot drop it"),
    (
        "queue for the closed",
        [*tried(0), *tried(1), TaskDropped(0, 1, "flat"), RolloutQueued(2, 0, 2)],
        r"Task 0 is closed \(dropped at step 1\), so rollout 2 cannot be queued for it",
    ),
    ("ready at once", [AttemptStarted(0, 0), AttemptReady(0, 0)], "is running and cannot be ready; only one that is"),
    ("ready twice", [AttemptStarted(0, 0, "r"), AttemptReady(0, 0), AttemptReady(0, 0)], "is running and cannot be r"),
    (
        "pay for no turn",
        [AttemptStarted(0, 0), TurnRewarded(0, 0, 0, 1.0)],
        "cannot be rewarded for turn 0: it has 0 turns",
    ),
    ("note of no attempt", [NoteRecorded(0, 0, "seen")], "an event of attempt 0 cannot follow, only one of attempt -1"),
    (
        "late while it runs",
        [AttemptStarted(0, 0), LateResultRecorded(0, 0, Outcome.FAILED)],
        "it may only be reported in time",
    ),
    (
        "late once handed in",
        [*tried(0), LateResultRecorded(0, 0, Outcome.FAILED)],
        "it may only stay as it was reported",
    ),
    (
        "late twice",
        [AttemptStarted(0, 0), RolloutCancelled(0, "no"), *[LateResultRecorded(0, 0, Outcome.FAILED)] * 2],
        "was reported late before, as failed",
    ),
    ("version left out", [ResourcePut("prompt", 2, "?")], "is at version 0, so version 2 cannot follow, only 1"),
    (
        "reward of the closed",
        [
            *tried(0)[:2],
            AttemptEnded(0, 0, Outcome.FAILED),
            *tried(1),
            RolloutsAdmitted(1, (1,), end=0, version=0),
            AttemptRewarded(0, 0, 1.0),
        ],
        "Rollout 0 cannot be rewarded: its task 0 is closed; it was dropped",
    ),
]


@pytest.mark.parametrize("where", WHERE)
def test_an_illegal_event_is_refused_in_a_sentence(where: str, tmp_path: Path) -> None:
    for name, events, sentence in REFUSED:
        (tmp_path / name).mkdir()
        with closing(open_store(WHERE[where](tmp_path / name))) as store:
            store.append(group(0))
            with pytest.raises(IllegalTransitionError) as refused:
                store.append(events)
            assert re.search(sentence, str(refused.value)), f"{name}: {refused.value}"
            assert store.position == 3, name
            assert [state.status for state in store.rollouts()] == [Status.QUEUED] * 2, name


def test_a_reward_may_come_after_the_end_while_the_task_is_open(store: Journal) -> None:
    store.append([*group(0, 1), AttemptStarted(0, 0), AttemptEnded(0, 0, Outcome.TIMED_OUT, "60 s")])
    store.append([AttemptRewarded(0, 0, -1.0)])
    state = store.rollout(0)
    assert state.status is Status.TIMED_OUT and state.last is not None and state.last.reward == -1.0


def test_events_without_consequences_are_accepted_after_a_task_is_settled(store: Journal) -> None:
    started = [AttemptStarted(0, 0, "runner"), AttemptEnded(0, 0, Outcome.TIMED_OUT, "60 s", ended_by_queue=True)]
    store.append([*group(0, 1), *started, TaskDropped(0, 1, "failed")])
    store.append([NoteRecorded(0, 0, "span", {"took": 61.5}), LateResultRecorded(0, 0, Outcome.SUCCEEDED, reward=1.0)])
    state = store.rollout(0)
    assert (state.status, state.phase) == (Status.TIMED_OUT, Phase.DROPPED)
    assert state.last is not None and (state.last.reward, state.last.late) == (None, LATE)


def test_a_rollout_that_is_cancelled_takes_its_attempt_with_it(store: Journal) -> None:
    store.append([*group(0, 1), AttemptStarted(0, 0), RolloutCancelled(0, "the run was stopped")])
    state = store.rollout(0)
    assert state.status is Status.CANCELLED and state.last is not None
    assert (state.last.status, state.last.error) == (Status.CANCELLED, "the run was stopped")


# -- several threads --------------------------------------------------------------------------------------------------


def together(*tasks: Callable[[], None]) -> None:
    """Run these functions at the same time, and raise any error of theirs."""
    raised: list[BaseException] = []

    def run(task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as error:
            raised.append(error)

    threads = [Thread(target=run, args=(task,)) for task in tasks]
    with ExitStack() as ended:
        for thread in threads:
            thread.start()
            ended.callback(thread.join)
    if raised:
        raise raised[0]


def test_threads_may_write_and_read_at_once(store: Journal) -> None:
    def write(first: int) -> None:
        for task in range(first, 40, 4):
            store.append(group(task))
            store.append([*tried(task * 2), *tried(task * 2 + 1)])

    def follow() -> None:
        position, deadline = 0, time.monotonic() + 60
        while position < 40 * (3 + 8):
            assert time.monotonic() < deadline, f"the writers stopped at {store.position}"
            for at, _ in store.read(position):
                assert at == position + 1
                position = at

    together(*(lambda first=first: write(first) for first in range(4)), follow)
    assert store.position == 440 and [state.id for state in store.rollouts(Phase.FINISHED)] == list(range(80))
    kinds = [type(event) for _, event in store.read()]
    assert all(
        kinds[at : at + 3] == [TaskIssued, RolloutQueued, RolloutQueued] for at in range(440) if kinds[at] is TaskIssued
    )


def test_of_two_threads_with_the_same_claim_one_succeeds(store: Journal) -> None:
    store.append(group(0, 50))
    won: list[tuple[int, int]] = []

    def claim(runner: int) -> None:
        for rollout in range(50):
            try:
                store.append([AttemptStarted(rollout, 0)])
            except IllegalTransitionError:
                continue
            won.append((rollout, runner))

    together(lambda: claim(0), lambda: claim(1), lambda: claim(2))
    assert sorted(rollout for rollout, _ in won) == list(range(50))
