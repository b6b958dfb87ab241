"""Rollouts that are made while the policy trains: never older than the bound, none lost, none for nothing."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from etude.data import SAMPLERS
from etude.images import PromptImages
from etude.protocols import Ids
from etude.recipes.collect.collector import Collector
from etude.recipes.collect.environment import EnvConfig
from etude.records import Completion, SamplingParams, Task
from etude.rollout.held_adapters import adapter_count
from etude.store import Event, Journal, RolloutsAdmitted, TaskDropped, open_store
from tests.recipes.collect.commits import record_commits
from tests.recipes.collect.test_sources import CHAT, Scripted, even, sourced
from tests.recipes.recorded_order import record_in_order
from tests.recipes.runs import Captured, refused_run, step_metrics, train
from tests.recipes.test_replays import killed

STEPS = 6
GIVEN: dict[str, Any] = {"retries": 0, "group_size": 2, "last_step": STEPS}


class Versioned(Scripted):
    """An engine whose tokens carry the version that was published last; some answers take longer."""

    version = 0

    async def generate(
        self,
        prompt: Ids,
        sampling: SamplingParams,
        *,
        images: PromptImages | None = None,
        on_start: Callable[[], None] | None = None,
    ) -> Completion:
        """Draw with the version that the engine has at the start."""
        version = self.version
        drawn = await super().generate(prompt, sampling, images=images, on_start=on_start)
        return Completion(drawn.ids, drawn.logp, np.full(len(drawn.ids), version, np.int32), "stop", drawn.text)


def slow(n: int) -> float:
    """Return the seconds that the n-th answer takes: every fifth is late."""
    return 0.01 if n % 5 == 0 else 0.0


def judged(task: Task, answer: str) -> float:
    """Fail some tasks, and give some groups equal rewards."""
    if task.ordinal in (2, 5, 8, 11):
        raise ValueError("a task that cannot be judged")
    return 0.5 if task.ordinal == 4 else even(task, answer)


def run_steps(source: Collector, engine: Versioned | Keeping, first: int, last: int) -> list[int]:
    """Run steps as the loop does; return the staleness of the oldest rollout of each."""
    staleness = []
    for step in range(first, last + 1):
        engine.version = step - 1
        source.published(step - 1)
        groups = source.next(step)
        oldest = [each.oldest for each in groups.scored if each.oldest is not None]
        staleness.append(step - 1 - min(oldest))
        time.sleep(0.02)  # the trainer computes, and rollouts of later steps are made
    return staleness


@pytest.mark.parametrize("refill", [0, 1])
@pytest.mark.parametrize("bound", [0, 1, 3])
def test_no_step_trains_on_older_rollouts_and_none_is_made_for_nothing(bound: int, refill: int) -> None:
    engine = Versioned(slow)
    with (
        closing(open_store()) as store,
        sourced(engine, store, judged, max_staleness=bound, refill=refill, **GIVEN) as s,
    ):
        staleness = run_steps(s, engine, 1, STEPS)
        assert max(staleness) == bound, "the bound is kept, and used"
        assert store.admitted().keys() == set(range(1, STEPS + 1))
        ids = [id for step in store.admitted().values() for id in step]
        assert len(ids) == len(set(ids)), "no rollout is trained on twice"
        left = {task.id for task in store.tasks()} - {id // 2 for id in ids} - _dropped(store)
        assert len(left) <= 2 * (1 + refill), "nothing is issued that no step could train on"


class Keeping(Scripted):
    """An engine that keeps an adapter for each version, as many as servers are started with.

    Rollouts that the first step does not need wait for a publish before they go on, half a second at most.
    """

    def __init__(self, bound: int) -> None:
        super().__init__()
        self.version, self.bound = 0, bound
        self.late = 0
        """The number of requests that named an older version than the newest."""

    async def generate(
        self,
        prompt: Ids,
        sampling: SamplingParams,
        *,
        images: PromptImages | None = None,
        on_start: Callable[[], None] | None = None,
    ) -> Completion:
        """Draw by the adapter of the version that is named."""
        assert sampling.version is not None and self.version - sampling.version < adapter_count(self.bound)
        self.late += sampling.version < self.version
        row, _, said = CHAT.tokenizer.decode(prompt, keep_special_tokens=True).partition("+1=")
        until = time.monotonic() + 0.5
        while self.bound and row > "1" and said and self.version == sampling.version and time.monotonic() < until:
            await asyncio.sleep(0.001)
        drawn = await super().generate(prompt, sampling, images=images, on_start=on_start)
        assert self.version - sampling.version < adapter_count(self.bound), "its adapter went while it was drawn"
        return replace(drawn, version=np.full(len(drawn.ids), sampling.version, np.int32))


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_a_rollout_keeps_the_version_of_its_first_turn_and_servers_hold_enough(bound: int) -> None:
    engine, env = Keeping(bound), EnvConfig(path="tests.recipes.partners:Echo", kwargs={"turns": 3})
    options = GIVEN | {"max_staleness": bound, "env": env, "newest_version": lambda: engine.version}
    options |= {"sampler": "sequential"}
    with closing(open_store()) as store, sourced(engine, store, even, **options) as source:
        assert max(run_steps(source, engine, 1, STEPS)) <= bound
        for id in (id for step in store.admitted().values() for id in step):
            versions = {version for turn in store.turns(id) for version in turn.completion.version.tolist()}
            assert len(store.turns(id)) == 3 and len(versions) == 1
    assert (engine.late > 0) == (bound > 0), "a rollout went on with its version after a publish"


@pytest.mark.slow
@pytest.mark.parametrize(("bound", "order"), [(1, "ordinal"), (4, "ordinal"), (4, "windowed")])
def test_a_run_that_is_killed_after_any_write_keeps_the_bound_and_loses_nothing(bound: int, order: str) -> None:
    batches: list[list[Event]] = []
    engine = Versioned(slow)
    options = GIVEN | {"max_staleness": bound, "refill": 1, "sampler": "curriculum", "order": order}
    with closing(open_store()) as store:
        batches = record_commits(store)
        with sourced(engine, store, judged, **options) as source:
            run_steps(source, engine, 1, STEPS)
        whole = store.admitted()
    for cut in range(1 + bound, len(batches), 6):
        with closing(open_store()) as store:
            for batch in batches[:cut]:
                store.append(batch)
            before = dict(store.admitted())
            with sourced(engine, store, judged, **options) as source:
                assert max(run_steps(source, engine, 1, STEPS)) <= bound
            after = store.admitted()
            assert order == "windowed" or after == whole, (
                "the same tasks are trained in the same order after every kill"
            )
            assert after.keys() == whole.keys() and after.items() >= before.items()
            assert len(_tasks(store)) == len(set(_tasks(store))), "no task is trained twice"


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(3, 0), (4, 1), (0, 3), (1, 4)])
def test_a_resumed_run_may_have_another_bound(before: int, after: int) -> None:
    """It replays what was admitted under the earlier bound, and drops groups that are too old for its own."""
    engine, options = Versioned(slow), GIVEN | {"refill": 1, "sampler": "curriculum"}
    with closing(open_store()) as store:
        batches = record_commits(store)
        with sourced(engine, store, judged, max_staleness=before, **options) as source:
            run_steps(source, engine, 1, 1)
            state, mark = source.mark()
            run_steps(source, engine, 2, 4)
    saved = next(at for at, batch in enumerate(batches) if _admits(batch, 1))
    for cut in range(saved + 1, len(batches) + 1, 10):
        with closing(killed(batches[:cut])) as store:
            old = dict(store.admitted())
            given: dict[str, Any] = {"step": 1, "state": state, "mark": mark} if store.position >= mark.position else {}
            with sourced(engine, store, judged, max_staleness=after, **options, **given) as source:
                run_steps(source, engine, given.get("step", 0) + 1, max(old))
                staleness = run_steps(source, engine, max(old) + 1, STEPS)
            assert max(staleness) <= after and (after == 0 or max(staleness) > 0), "the bound is kept, and used"
            new = store.admitted()
            assert new.keys() == set(range(1, STEPS + 1)) and new.items() >= old.items()
            ids = [id for step in new.values() for id in step]
            assert len(ids) == len(set(ids)) and all(ids.count(id ^ 1) for id in ids), "whole groups are trained on"
            left = {task.id for task in store.tasks()} - {id // 2 for id in ids} - _dropped(store)
            assert not left or min(left) > max(id // 2 for id in ids), "no task is lost between those of steps"


def _admits(batch: list[Event], step: int) -> bool:
    return any(isinstance(event, RolloutsAdmitted) and event.step == step for event in batch)


def without_baseline(task: Task, answer: str) -> float:
    """Fail the greedy answers to some tasks. They are dropped before their step, with groups that earned the same."""
    if task.ordinal % 3 == 1 and answer.endswith("!"):
        raise ValueError("an answer that cannot be judged")
    return 1.0


class Greedy(Versioned):
    """An engine that marks its greedy answers."""

    async def generate(
        self,
        prompt: Ids,
        sampling: SamplingParams,
        *,
        images: PromptImages | None = None,
        on_start: Callable[[], None] | None = None,
    ) -> Completion:
        """Append a mark to the text."""
        drawn = await super().generate(prompt, sampling, images=images, on_start=on_start)
        return replace(drawn, text=f"{drawn.text}!") if sampling.temperature == 0 else drawn


@pytest.mark.parametrize("saved", ["live", "during a replay"])
def test_the_order_of_tasks_learns_each_reward_once_after_a_resume(saved: str) -> None:
    """Groups of later steps are dropped before the checkpoint. If it is saved during a replay, the order that it holds
    does not have their rewards."""
    engine, options = Greedy(), GIVEN | {"max_staleness": 3, "sampler": "curriculum", "greedy": True}
    with closing(open_store()) as store:
        with sourced(engine, store, without_baseline, **options) as source:
            run_steps(source, engine, 1, 2)
            until = time.monotonic() + 10
            while 10 not in _dropped(store):
                assert time.monotonic() < until, "the group of a later step is not dropped"
                time.sleep(0.01)
            step, (state, mark) = 2, source.mark()
        if saved == "during a replay":
            with sourced(engine, store, without_baseline, **options) as source:
                run_steps(source, engine, 1, 1)
                step, (state, mark) = 1, source.mark()
        with sourced(engine, store, without_baseline, **options, step=step, state=state, mark=mark) as source:
            run_steps(source, engine, step + 1, STEPS)
            state, mark = source.mark()
        order = SAMPLERS["curriculum"]().start(12, 5)
        record_in_order(store, order, mark.position, 2)
        assert state == order.state()


def test_a_checkpoint_of_a_run_with_rollouts_ahead_leads_to_the_same_tasks(tmp_path: Path) -> None:
    """The order of tasks is far ahead of the step that is saved."""
    engine, options = Versioned(), GIVEN | {"max_staleness": 3}
    with closing(open_store(tmp_path / "journal.sqlite")) as store:
        with sourced(engine, store, even, **options) as source:
            run_steps(source, engine, 1, 2)
            state, mark = source.mark()
            run_steps(source, engine, 3, 4)
        with sourced(engine, store, even, **options, step=2, state=state, mark=mark) as source:
            assert source.last_replayed_step == 4
            run_steps(source, engine, 3, STEPS)
        assert _tasks(store) == sorted(set(_tasks(store))) and len(_tasks(store)) == 2 * STEPS


def _dropped(store: Journal) -> set[int]:
    return {event.task for _, event in store.read(kinds=(TaskDropped,)) if isinstance(event, TaskDropped)}


def _tasks(store: Journal) -> list[int]:
    return [task for ids in store.admitted().values() for task in dict.fromkeys(id // 2 for id in ids)]


@pytest.mark.slow
def test_a_run_trains_on_rollouts_that_were_made_during_its_updates(world: Path, tmp_path: Path) -> None:
    run = train(
        world,
        tmp_path / "run",
        max_staleness=1,
        steps=4,
        threads=2,
        placement__layout="split",
        correction__weight="truncate",
        data__val=f"[{world / 'held_out.jsonl'}]",
        evaluate__every=2,
        evaluate__sampling__max_tokens=6,
    )
    steps = step_metrics(run)
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert max(step["staleness/max"] for step in steps) == 1 and steps[0]["staleness/max"] == 0
    assert "eval/mean@1" in steps[1] and not [name for name in steps[1] if name.startswith("eval/engine")]
    assert sum(step["engine/finished"] for step in steps) > 4 * steps[0]["rollouts"], "the scored answers are in it"
    assert json.loads((run / "inputs.json").read_text())["threads"] == "trainer 1, engine 1"
    with closing(open_store(run / "journal.sqlite", read_only=True)) as store:
        issued = [task for task in store.tasks() if task.use == "train"]
        assert len(issued) == 12, "none is issued after the last step's"


@pytest.mark.slow
@pytest.mark.parametrize("running", ["finish", "restart"])
def test_each_answer_of_a_run_has_one_version_if_none_continues_with_new_weights(
    running: str, world: Path, tmp_path: Path
) -> None:
    stale = {"max_staleness": 1, "placement.layout": "split", "correction.weight": "truncate"}
    answers = {"sampling.max_tokens": 100, "data.max_prompt_length": 16, "rollout.running": running}
    run = train(world, tmp_path / "run", steps=4, threads=2, **stale, **answers)
    restarts = sum(step["engine/requests_restarted"] for step in step_metrics(run))
    with closing(open_store(run / "journal.sqlite", read_only=True)) as store:
        rollouts = [id for ids in store.admitted().values() for id in ids]
        turns = [turn for id in rollouts for turn in store.turns(id)]
    assert len(turns) == len(rollouts) > 0 and all(len(set(turn.completion.version)) == 1 for turn in turns)
    assert (restarts > 0) == (running == "restart")


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ({}, "`placement.layout=split`"),
        ({"placement.layout": "split"}, "`correction.weight=truncate`"),
        ({"collect.order": "windowed", "collect.tasks": 4}, "Set `max_staleness` to 2 or more"),
    ],
)
def test_runs_whose_engine_cannot_sample_meanwhile_are_refused(
    change: dict[str, Any], remedy: str, world: Path, tmp_path: Path, capsys: Captured
) -> None:
    assert remedy in refused_run(capsys, world, tmp_path / "run", max_staleness=1, **change)
