"""A run that saves during its replay can be resumed: admissions are found by their step, not by their position."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from etude.data import SAMPLERS, Dataset
from etude.errors import StoreError
from etude.recipes.collect.agent_config import AgentConfig
from etude.recipes.collect.agent_runners import AgentRunners
from etude.recipes.collect.collector import Collector
from etude.recipes.collect.config import CollectionConfig
from etude.recipes.collect.environment import EnvConfig
from etude.recipes.collect.requested import RequestedRollouts
from etude.recipes.collect.statistics import CollectionWarnings
from etude.recipes.collect.step_groups import StepGroupsBuilder
from etude.recipes.event_loop import LoopThread
from etude.records import Outcome, Task
from etude.rewards import Judge, JudgingConfig
from etude.store import Event, Journal, JournalMark, TaskDropped, open_store
from etude.store.journal.events import RolloutsAdmitted
from etude.store.queue.local_queue import LocalRolloutQueue
from etude.store.queue.rollout_queue import AttemptReport, QueueOwner, RolloutLimits
from tests.recipes.collect.commits import record_commits
from tests.recipes.collect.test_sources import ECHO, TASKS, Scripted, even, group_records, sourced
from tests.store.made import turn

ADMITTED, STEPS = 3, 4
"""Steps that were admitted before the run was killed, and steps in all."""


class Saved(NamedTuple):
    """The state of a source in a checkpoint."""

    step: int = 0
    state: Any = None
    mark: JournalMark = JournalMark(0, 0)


def saved(source: Collector, step: int) -> Saved:
    """Return the checkpoint of the latest step; its state goes through JSON, as in a file."""
    state, mark = source.mark()
    return Saved(step, json.loads(json.dumps(state)), mark)


def judged(task: Task, answer: str) -> float:
    """Judge so that some groups fail, and some have equal rewards and are replaced."""
    if task.ordinal in (0, 4):
        raise ValueError("a task that cannot be judged")
    return 0.5 if task.ordinal == 6 else even(task, answer)


GIVEN: dict[str, Any] = {"sampler": "curriculum", "refill": 1, "retries": 0, "group_size": 2}


class Whole(NamedTuple):
    """A run without an interruption."""

    batches: list[list[Event]]
    """The written events, write by write."""
    groups: list[Any]
    """The groups that each step trained on."""
    saved: list[Saved]
    """The checkpoint of each step, and of the beginning."""


def whole(**given: Any) -> Whole:
    """Make all steps without an interruption."""
    with closing(open_store()) as store:
        batches = record_commits(store)
        with sourced(Scripted(), store, judged, **given) as source:
            result, checkpoints = [], [saved(source, 0)]
            for step in range(1, STEPS + 1):
                result.append(group_records(source.next(step)))
                checkpoints.append(saved(source, step))
    return Whole(batches, result, checkpoints)


def killed(batches: Sequence[Sequence[Event]]) -> Journal:
    """Return the journal of a run that was killed after these writes."""
    store = open_store()
    for batch in batches:
        store.append(batch)
    return store


def admitted(batches: Sequence[Sequence[Event]], step: int) -> int:
    """Return the number of writes at the admission of a step."""
    return 1 + next(at for at, batch in enumerate(batches) if any(_admits(event, step) for event in batch))


def _admits(event: Event, step: int) -> bool:
    return isinstance(event, RolloutsAdmitted) and event.step == step


@pytest.mark.parametrize(("env", "greedy"), [(None, False), (ECHO, True)])
def test_a_run_may_save_at_each_step_of_a_replay_and_be_resumed_there(env: EnvConfig | None, greedy: bool) -> None:
    """Each process replays one step, saves, and is killed; the last one goes on to the end."""
    options = {**GIVEN, "env": env, "greedy": greedy}
    straight = whole(**options)
    dropped = {event.step for batch in straight.batches for event in batch if isinstance(event, TaskDropped)}
    assert len(dropped & {1, 2, 3}) > 1, "tasks are dropped in steps that are replayed"
    checkpoint = Saved()
    with closing(killed(straight.batches[: admitted(straight.batches, ADMITTED)])) as store:
        for last in (1, 2, 3, STEPS):
            with sourced(Scripted(), store, judged, **options, **checkpoint._asdict()) as source:
                assert source.last_replayed_step == (ADMITTED if checkpoint.step < ADMITTED else 0)
                for step in range(checkpoint.step + 1, last + 1):
                    groups = source.next(step)
                    assert group_records(groups) == straight.groups[step - 1], (
                        f"step {step}, saved after {checkpoint.step}"
                    )
                    assert groups.replayed == (step <= ADMITTED)
                    assert source.mark()[0] == straight.saved[step].state
                checkpoint = saved(source, last)
        assert store.admitted().keys() == set(range(1, STEPS + 1))


def test_whenever_a_run_is_killed_it_may_save_in_its_replay_and_be_killed_again() -> None:
    """The journal ends after each write of the second step in turn, some of whose tasks are dropped; the first replay
    is saved."""
    straight = whole(**GIVEN)
    first, last = admitted(straight.batches, 1), admitted(straight.batches, 2)
    assert any(isinstance(event, TaskDropped) for batch in straight.batches[first : last - 2] for event in batch)
    for cut in range(first, last + 1):
        with closing(killed(straight.batches[:cut])) as store:
            with sourced(Scripted(), store, judged, **GIVEN) as source:
                assert group_records(source.next(1)) == straight.groups[0]
                checkpoint = saved(source, 1)
            with sourced(Scripted(), store, judged, **GIVEN, **checkpoint._asdict()) as source:
                assert group_records(source.next(2)) == straight.groups[1], f"after write {cut} of {last}"
                assert source.mark()[0] == straight.saved[2].state


def test_an_older_checkpoint_leads_to_the_same_steps() -> None:
    """The newest is damaged: the run falls back, and saves during its replay."""
    straight = whole(**GIVEN)
    with closing(killed(straight.batches[: admitted(straight.batches, ADMITTED)])) as store:
        with sourced(Scripted(), store, judged, **GIVEN, **straight.saved[1]._asdict()) as source:
            assert group_records(source.next(2)) == straight.groups[1]
            checkpoint = saved(source, 2)
        with sourced(Scripted(), store, judged, **GIVEN, **checkpoint._asdict()) as source:
            assert [group_records(source.next(step)) for step in (3, 4)] == straight.groups[2:]
            assert source.mark()[0] == straight.saved[4].state


def test_an_admission_before_the_mark_that_is_damaged_is_refused(tmp_path: Path) -> None:
    """Otherwise its step would count as never admitted."""
    straight, path = whole(**GIVEN), tmp_path / "journal.sqlite"
    with closing(open_store(path)) as store:
        for batch in straight.batches[: admitted(straight.batches, 2)]:
            store.append(batch)
        with sourced(Scripted(), store, judged, **GIVEN) as source:
            source.next(1)
            checkpoint = saved(source, 1)
    with closing(sqlite3.connect(path)) as raw, raw:
        changed = raw.execute(
            "UPDATE events SET kind = 'note_recorded' WHERE position = ?", (checkpoint.mark.position,)
        )
        assert changed.rowcount == 1
    with (
        closing(open_store(path)) as store,
        pytest.raises(StoreError, match="does not match its checksum"),
        sourced(Scripted(), store, judged, **GIVEN, **checkpoint._asdict()),
    ):
        pass


# -- agents -----------------------------------------------------------------------------------------------------------


async def played(queue: LocalRolloutQueue) -> None:
    """Play every queued rollout. A rollout has the same answer each time."""
    while True:
        for claim in await queue.claim("runner", 16, 10.0):
            await queue.record_turn(claim.attempt_id, turn(seed=claim.attempt_id.rollout))
            reward = float(np.random.default_rng(claim.attempt_id.rollout).integers(2))
            fails = claim.task.ordinal in (0, 4)
            ended = (
                AttemptReport(Outcome.FAILED, "not this one")
                if fails
                else AttemptReport(Outcome.SUCCEEDED, reward=reward)
            )
            await queue.finish(claim.attempt_id, ended)


def by_agents(queue: LocalRolloutQueue, store: Journal, judge: Judge) -> RequestedRollouts:
    """Return the requested rollouts of a run whose agents try each once."""
    limits = RolloutLimits(max_attempts=1)
    runners = AgentRunners(queue, AgentConfig(), store.position)
    return RequestedRollouts(queue, store, judge, runners, {"train": limits, "val": limits})


@contextmanager
def agents(store: Journal, checkpoint: Saved) -> Iterator[Collector]:
    """Open a source of rollouts that a runner plays, over the same tasks, as a run does."""
    dataset = Dataset.load(TASKS)
    order = SAMPLERS["curriculum"]().start(len(dataset), 5, dataset.sources)
    queue = LocalRolloutQueue(store)
    with Judge(even, JudgingConfig()) as judge, LoopThread() as loop:
        loop.run(queue.acquire_lease(QueueOwner("this run", "here")))
        builder = StepGroupsBuilder(
            CollectionConfig(tasks=2, group_size=2, refill=1),
            CollectionWarnings(one_by_one=judge.one_by_one, pays=judge.has_reward),
            episodic=True,
            greedy=False,
            tags=(),
            max_staleness=0,
        )
        collector = Collector(
            by_agents(queue, store, judge),
            builder,
            dataset=dataset,
            order=order,
            judge=judge,
            store=store,
            loop=loop,
        )
        collector.resume_from(*checkpoint)
        playing = loop.submit(played(queue))
        with closing(collector):
            yield collector
        playing.cancel()
        loop.run(queue.close())


def test_rollouts_of_agents_are_replayed_and_saved_during_the_replay() -> None:
    with closing(open_store()) as store, agents(store, Saved()) as source:
        straight, states = [], []
        for step in range(1, STEPS + 1):
            straight.append(group_records(source.next(step)))
            states.append(source.mark()[0])
        dropped = {event.cause for _, event in store.read(kinds=(TaskDropped,)) if isinstance(event, TaskDropped)}
        assert len(dropped) == 2, "some groups failed, and some earned the same"
    checkpoint = Saved()
    with closing(open_store()) as store:
        with agents(store, checkpoint) as source:
            assert [group_records(source.next(step)) for step in (1, 2, 3)] == straight[:3]
        for last in (1, 2, STEPS):
            with agents(store, checkpoint) as source:
                for step in range(checkpoint.step + 1, last + 1):
                    groups = source.next(step)
                    assert group_records(groups) == straight[step - 1] and groups.replayed == (step <= ADMITTED)
                    assert source.mark()[0] == states[step - 1]
                checkpoint = saved(source, last)
