"""The source of groups: each attempt has a journaled outcome, no rollout keeps running, and a replay is the same."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from etude import call_task
from etude.batch import Batch
from etude.chat import ChatRenderer, RenderedPrompt, Tokenizer
from etude.data import SAMPLERS, Dataset
from etude.envs import Observation, TextEnv
from etude.errors import CollectionError, EngineError, RewardError
from etude.images import PromptImages
from etude.protocols import Ids
from etude.recipes.collect.collector import Collector
from etude.recipes.collect.config import CollectionConfig
from etude.recipes.collect.engine_runner import EngineRunner, engine_limits
from etude.recipes.collect.environment import EnvConfig, Environment
from etude.recipes.collect.episodes import EpisodePlayer
from etude.recipes.collect.player import EnginePlayer
from etude.recipes.collect.requested import RequestedRollouts
from etude.recipes.collect.rollouts import PutSamples, StepGroups
from etude.recipes.collect.statistics import CollectionWarnings
from etude.recipes.collect.step_groups import StepGroupsBuilder
from etude.recipes.event_loop import LoopThread
from etude.records import Completion, Outcome, SamplingParams, Task
from etude.rewards import Judge, JudgingConfig
from etude.store import (
    AttemptEnded,
    AttemptRewarded,
    Journal,
    JournalMark,
    Phase,
    Status,
    TaskDropped,
    TurnRecorded,
    open_store,
)
from etude.store.journal.events import RolloutsAdmitted
from etude.store.queue.local_queue import open_own_queue
from tests.recipes.collect.commits import record_commits
from tests.recipes.runs import rows_of
from tests.rewards.functions import stubborn
from tests.waits import skip_time
from tests.worlds import make_tokenizer

TASKS = [{"prompt": f"{row}+1=", "answer": str(row + 1), "data_source": "sums"} for row in range(12)]


class Scripted:
    """An engine whose answers depend on the seed. A script can delay a request or let it fail."""

    version = 100
    """The version of its tokens: no step of these tests is past it."""

    def __init__(self, script: Callable[[int], float | Exception | None] = lambda n: None, tokens: int = 3) -> None:
        """Create the engine. For the n-th request `script` gives seconds to wait, an exception to raise, or None."""
        self._script, self._tokens = script, tokens
        self.asked: list[int | None] = []
        self.prompts: list[list[int]] = []
        self.greedily = 0
        self.answering = self.most = 0

    async def generate(
        self,
        prompt: Ids,
        sampling: SamplingParams,
        *,
        images: PromptImages | None = None,
        on_start: Callable[[], None] | None = None,
    ) -> Completion:
        """Return tokens drawn by the seed of the request."""
        assert on_start is not None
        on_start()
        self.asked.append(sampling.seed)
        self.prompts.append(prompt.tolist())
        self.greedily += sampling.temperature == 0
        act = self._script(len(self.asked))
        self.answering += 1
        self.most = max(self.most, self.answering)
        try:
            if isinstance(act, Exception):
                raise act
            await asyncio.sleep(act or 0)
        finally:
            self.answering -= 1
        ids = np.random.default_rng(sampling.seed).integers(0, 10, self._tokens).astype(np.int32)
        logp, version = np.full(self._tokens, -2.3, np.float32), np.full(self._tokens, self.version, np.int32)
        return Completion(ids, logp, version, "stop", "".join(map(str, ids)))


def characters() -> ChatRenderer:
    """Return the renderer of a model with a tokenizer of characters and without a chat template."""
    with TemporaryDirectory() as directory:
        make_tokenizer(Path(directory))
        return ChatRenderer(Tokenizer.load(Path(directory)))


def even(task: Task, answer: str) -> float:
    """Return 1 if an answer ends in an even digit."""
    return float(bool(answer) and int(answer[-1]) % 2 == 0)


CHAT = characters()
BEGINNING = JournalMark(0, 0)


@contextmanager
def sourced(
    engine: Scripted,
    store: Journal,
    reward: Callable[..., Any] = even,
    *,
    judging: JudgingConfig | None = None,
    step: int = 0,
    state: Any = None,
    mark: JournalMark = BEGINNING,
    sampler: str = "shuffled",
    max_concurrency: int = 64,
    greedy: bool = False,
    env: EnvConfig | None = None,
    keep: PutSamples = tuple,
    code_changed: bool = False,
    max_staleness: int = 0,
    last_step: int | None = None,
    newest_version: Callable[[], int] | None = None,
    batch_columns: Mapping[str, str] | None = None,
    **collection: Any,
) -> Iterator[Collector]:
    """Return a source over twelve tasks, with two groups of three per step."""
    dataset = Dataset.load(TASKS)
    with (
        Judge(reward, judging or JudgingConfig()) as judge,
        LoopThread() as loop,
        open_own_queue(store) as queue,
    ):
        config = CollectionConfig(**({"tasks": 2, "group_size": 3} | collection))
        player = EnginePlayer(
            render=lambda prompt: RenderedPrompt(np.frombuffer(prompt.encode(), np.uint8).astype(np.int32)),
            engine=engine,
            judge=judge,
            timeout=config.timeout,
            max_concurrency=max_concurrency,
            episodes=EpisodePlayer(Environment(env), CHAT, 200) if env is not None else None,
            newest_version=newest_version,
        )
        sampling = SamplingParams(max_tokens=4)
        builder = StepGroupsBuilder(
            config,
            CollectionWarnings(one_by_one=judge.one_by_one, pays=judge.has_reward),
            episodic=env is not None,
            greedy=greedy,
            tags=(),
            max_staleness=max_staleness,
            batch_columns=batch_columns or {},
        )
        requested = RequestedRollouts(
            queue,
            store,
            judge,
            EngineRunner(queue, {"train": (player, sampling)}, seed=5),
            engine_limits(config.retries),
            code_changed=code_changed,
        )
        collector = Collector(
            requested,
            builder,
            dataset=dataset,
            order=SAMPLERS[sampler]().start(len(dataset), 5, dataset.sources),
            judge=judge,
            store=store,
            loop=loop,
            code_changed=code_changed,
            last_step=last_step,
            keep=keep,
        )
        with closing(collector):
            collector.resume_from(step, state, mark)
            yield collector


def group_records(groups: StepGroups) -> list[Any]:
    """Return the trained samples and rollouts of a step, in a comparable form."""
    rows = [
        (
            *(s.rollout, s.ids.tolist(), s.action.tolist(), np.nan_to_num(s.logp).tolist(), s.turn.tolist()),
            *(None if s.reward is None else s.reward.tolist(), None if s.anchor is None else s.anchor.tolist()),
        )
        for s in rows_of(groups)
    ]
    return [rows, groups.rollouts]


@pytest.fixture
def complaints() -> Iterator[list[str]]:
    """The messages that asyncio logs, such as an exception that was never retrieved."""
    result: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: result.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("asyncio").addHandler(listener)
    yield result
    logging.getLogger("asyncio").removeHandler(listener)


def outcomes(store: Journal, rollout: int) -> list[Status]:
    """Return the outcomes of a rollout's attempts."""
    return [attempt.status for attempt in store.rollout(rollout).attempts]


def test_a_reward_that_ignores_its_cancellation_does_not_hold_the_end_of_a_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(call_task, "CANCEL_S", 0.05)
    began = time.monotonic()
    with sourced(Scripted(), open_store(), stubborn, max_staleness=1) as source:
        source.published(0)
        source._loop.run(asyncio.sleep(0.05))
    assert time.monotonic() - began < 10


def test_a_step_gets_whole_groups_in_the_order_of_the_run() -> None:
    engine, store = Scripted(), open_store()
    with sourced(engine, store) as source:
        first, second = source.next(1), source.next(2)
    assert [r.group for r in first.rollouts] == [0, 0, 0, 1, 1, 1] and {r.group for r in second.rollouts} == {2, 3}
    assert len(set(engine.asked)) == 12, "every rollout has its own seed"
    assert first.metrics.reduce()["sampled_tokens"] == 18 and not first.replayed
    assert store.admitted() == {1: (0, 1, 2, 3, 4, 5), 2: (6, 7, 8, 9, 10, 11)}
    rows = {task.row for task in store.tasks()}
    assert len(rows) == 4, "no row twice within an epoch"


def test_a_rollout_that_hangs_times_out_and_is_retried_with_another_seed() -> None:
    engine, store = Scripted(lambda n: 30.0 if n == 2 else None), open_store()
    with sourced(engine, store, timeout=0.2) as source:
        groups = source.next(1)
    assert outcomes(store, 1) == [Status.TIMED_OUT, Status.SUCCEEDED] and len(groups.rollouts) == 6
    assert "0.2 seconds" in store.rollout(1).attempts[0].error
    assert engine.asked[1] != engine.asked[6] and engine.answering == 0
    assert groups.metrics.reduce()["failed_attempts/timed_out"] == 1


def test_retries_are_limited_and_then_the_rollout_is_left_out() -> None:
    def fails(task: Task, answer: str) -> float:
        if task.ordinal == 0 and calls.append(answer) is None and len(calls) % 3 == 1:
            raise ValueError("not this one")
        return even(task, answer)

    calls: list[str] = []
    store = open_store()
    with sourced(Scripted(), store, fails, retries=2) as source:
        groups = source.next(1)
    failed = [r.id for r in store.rollouts() if Status.FAILED in outcomes(store, r.id)]
    assert failed and all(outcomes(store, id)[-1] is Status.SUCCEEDED for id in failed)
    assert groups.metrics.reduce()["failed_attempts/failed"] >= 1

    def always(task: Task, answer: str) -> float:
        if task.ordinal == 0:
            raise ValueError("never")
        return even(task, answer)

    store = open_store()
    with sourced(Scripted(), store, always, retries=2) as source:
        groups = source.next(1)
    assert outcomes(store, 0) == [Status.FAILED] * 3
    assert {r.group for r in groups.rollouts} == {1, 2}, "a group of failed rollouts is replaced"
    dropped = [event for _, event in store.read(kinds=(TaskDropped,)) if isinstance(event, TaskDropped)]
    assert [(event.task, event.cause) for event in dropped] == [(0, "every rollout failed")]
    assert groups.metrics.reduce()["dropped_tasks/every_rollout_failed"] == 1


@pytest.mark.parametrize("code_changed", [True, False])
def test_failures_before_a_stop_are_counted_and_changed_code_starts_the_step_again(
    code_changed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(task: Task, answer: str) -> float:
        while task.ordinal == 3 and len(list(store.read(kinds=(TaskDropped,)))) < 3:
            await asyncio.sleep(0.01)  # until the other tasks of the step are dropped
        raise ValueError("no judge today")

    monkeypatch.setattr("etude.rewards.judge.MAX_CONSECUTIVE_FAILURES", 10)
    store = open_store()
    with sourced(Scripted(), store, never, retries=0) as source, pytest.raises(RewardError, match="10 in a row"):
        source.next(1)
    with sourced(Scripted(), store, even, retries=0, code_changed=code_changed) as source:
        first, second = source.next(1), source.next(2)
    figures = first.metrics.reduce()
    assert figures["dropped_tasks/every_rollout_failed"] == 3 and figures["failed_attempts/failed"] >= 9
    assert 0 < figures["failed_share"] < 1
    assert len({rollout.group for rollout in first.rollouts}) == (2 if code_changed else 1)
    assert not second.metrics.reduce()["failed_attempts"]


def test_a_step_of_failed_rollouts_reports_the_last_error_and_is_not_admitted() -> None:
    def never(task: Task, answer: str) -> float:
        raise ValueError("no judge today")

    store = open_store()
    with sourced(Scripted(), store, never, retries=0) as source, pytest.raises(CollectionError, match="no judge today"):
        source.next(1)
    assert not store.admitted()


@pytest.mark.parametrize("who", ["engine", "judge"])
def test_an_error_that_stops_a_run_ends_all_rollouts(who: str, complaints: list[str]) -> None:
    """The failure of one attempt ends the others, also those that failed at the same time."""

    def script(n: int) -> float | Exception | None:
        return 30.0 if n > 3 else EngineError("out of memory") if who == "engine" else None

    def never(task: Task, answer: str) -> float:
        raise ValueError("no judge today")

    engine, store = Scripted(script), open_store()
    error = EngineError if who == "engine" else RewardError
    reward = even if who == "engine" else never
    with sourced(engine, store, reward, judging=JudgingConfig(on_error="stop")) as source:
        with pytest.raises(error):
            source.next(1)
        assert engine.answering == 0
    gc.collect()
    assert not complaints
    assert {state.phase for state in store.rollouts()} == {Phase.RUNNING}
    again = Scripted()
    with sourced(again, store) as source:
        groups = source.next(1)
    with sourced(Scripted(), open_store()) as source:
        whole = source.next(1)
    assert group_records(groups) == group_records(whole), "interrupted rollouts are requested again with the same seeds"
    assert outcomes(store, 0) == [Status.INFRA_ERROR, Status.SUCCEEDED]


def test_a_replayed_step_has_the_same_groups(tmp_path: Path) -> None:
    with closing(open_store(tmp_path / "journal.sqlite")) as store, sourced(Scripted(), store) as source:
        state, mark = source.mark()
        before = [source.next(step) for step in (1, 2)]
    engine = Scripted()
    with (
        closing(open_store(tmp_path / "journal.sqlite")) as store,
        sourced(engine, store, state=state, mark=mark) as source,
    ):
        after = [source.next(step) for step in (1, 2)]
        assert not engine.asked and all(groups.replayed for groups in after)
        third = source.next(3)
    assert [group_records(groups) for groups in after] == [group_records(groups) for groups in before]
    with closing(open_store()) as store, sourced(Scripted(), store) as source:
        whole = [source.next(step) for step in (1, 2, 3)]
    assert group_records(third) == group_records(whole[2])


def test_groups_of_zero_variance_are_replaced_and_counted() -> None:
    store = open_store()
    with sourced(Scripted(), store, lambda task, answer: float(task.ordinal % 2 and even(task, answer)), refill=3) as s:
        groups = s.next(1)
    numbers = groups.metrics.reduce()
    assert numbers["dropped_tasks"] == numbers["dropped_tasks/every_rollout_earned_the_same"] > 0
    for group in {r.group for r in groups.rollouts}:
        assert len({r.reward for r in groups.rollouts if r.group == group}) == 2


def test_groups_are_compared_by_the_named_part_of_the_reward() -> None:
    """A shaping part that differs in every answer keeps no group, before a kill and after it."""

    def shaped(task: Task, answer: str) -> dict[str, float]:
        return {"right": task.ordinal % 2 * even(task, answer), "shape": int(answer) / 1e4}

    store = open_store()
    with sourced(Scripted(), store, shaped, refill=3, metric="right") as source:
        numbers, groups = source.next(1).metrics.reduce(), source.next(2)
    assert numbers["dropped_tasks/every_rollout_earned_the_same"] > 0
    for group in {r.group for r in groups.rollouts}:
        assert len({r.parts["right"] for r in groups.rollouts if r.group == group}) == 2
    again = open_store()
    for _, event in store.read():
        if isinstance(event, RolloutsAdmitted):
            break
        again.append([event])
    with sourced(Scripted(), again, shaped, refill=3, metric="right") as source:
        resumed = [source.next(step) for step in (1, 2)]
    assert group_records(resumed[1]) == group_records(groups)
    with sourced(Scripted(), open_store(), shaped, refill=3) as source:
        assert source.next(1).metrics.reduce()["dropped_tasks"] == 0, "the total rewards of every group differ"
    with (
        sourced(Scripted(), open_store(), shaped, refill=3, metric="left") as source,
        pytest.raises(CollectionError, match=r"`collect.metric=left` .* has the parts right, shape"),
    ):
        source.next(1)


def test_an_answer_without_tokens_is_an_ordinary_rollout() -> None:
    store = open_store()
    with sourced(Scripted(tokens=0), store) as source:
        groups = source.next(1)
    batch = Batch.from_records(rows_of(groups), groups.rollouts)
    assert batch.num_rollouts == 6 and not bool(batch.action.any())
    turns = [event for _, event in store.read(kinds=(TurnRecorded,))]
    assert len(turns) == 6 and {r.outcome for r in groups.rollouts} == {Outcome.SUCCEEDED}


class Thinking(Scripted):
    """An engine that takes a while for each answer, on a thread. The running time moves on by ten seconds with each."""

    async def generate(
        self,
        prompt: Ids,
        sampling: SamplingParams,
        *,
        images: PromptImages | None = None,
        on_start: Callable[[], None] | None = None,
    ) -> Completion:
        """Return tokens drawn by the seed of the request."""
        assert on_start is not None
        on_start()
        self.answering += 1
        self.most = max(self.most, self.answering)
        await asyncio.to_thread(time.sleep, 0.03)
        self.answering -= 1
        skip_time(10)
        return await super().generate(prompt, sampling, images=images, on_start=lambda: None)


def test_the_time_limit_excludes_the_queue_and_the_judge() -> None:
    """All answers take longer than the limit of one."""

    def slowly(task: Task, answer: str) -> float:
        time.sleep(0.03)
        return even(task, answer)

    engine, store = Thinking(), open_store()
    with sourced(engine, store, slowly, timeout=60, retries=0, max_concurrency=2, group_size=6) as source:
        groups = source.next(1)
    assert len(groups.rollouts) == 12 and groups.metrics.reduce()["failed_attempts"] == 0
    assert engine.most == 2, "the number of concurrent requests is limited"
    turns = sorted(_turns_of(store), key=lambda turn: turn.began)
    assert all(turn.at - turn.began > 0.02 for turn in turns), "the time of sampling an answer"
    beside = [sum(other.began < turn.began < other.at for other in turns) for turn in turns]
    assert max(beside) <= 1, "without the wait in the queue"
    ends = {
        event.rollout: event.at for _, event in store.read(kinds=(AttemptEnded,)) if isinstance(event, AttemptEnded)
    }
    assert all(ends[turn.rollout] - turn.at > 0.025 for turn in turns), "without the wait for the judge"


def _turns_of(store: Journal) -> list[TurnRecorded]:
    return [event for _, event in store.read(kinds=(TurnRecorded,)) if isinstance(event, TurnRecorded)]


def test_a_step_of_failed_rollouts_starts_again() -> None:
    def never(task: Task, answer: str) -> float:
        raise ValueError("no judge today")

    store = open_store()
    with sourced(Scripted(), store, never, retries=0) as source, pytest.raises(CollectionError):
        source.next(1)
    with sourced(Scripted(), store) as source:
        assert len(source.next(1).rollouts) == 6


# -- a greedy answer for each group -----------------------------------------------------------------------------------


def test_each_task_has_a_greedy_answer_whose_reward_its_rollouts_record() -> None:
    engine, store = Scripted(), open_store()
    with sourced(engine, store, lambda task, answer: float(answer[0]), greedy=True) as source:
        groups = source.next(1)
    assert len(engine.asked) == 8 and engine.greedily == 2
    assert [r.id for r in groups.rollouts] == [0, 1, 2, 4, 5, 6], "rollouts 3 and 7 are the greedy ones"
    assert store.admitted() == {1: (0, 1, 2, 4, 5, 6)} and len(rows_of(groups)) == 6
    for id in (3, 7):
        assert store.rollout(id).phase is Phase.DROPPED and len(store.turns(id)) == 1
    for task, id in ((0, 3), (1, 7)):
        last = store.rollout(id).last
        assert last is not None and {r.greedy_reward for r in groups.rollouts if r.group == task} == {last.reward}
    batch = Batch.from_records(rows_of(groups), groups.rollouts)
    assert batch.greedy_reward is not None and groups.metrics.reduce()["greedy_reward"] >= 0
    assert groups.metrics.reduce()["sampled_tokens"] == 24


def test_without_a_greedy_answer_a_task_is_dropped_with_that_cause() -> None:
    def grumpy(task: Task, answer: str) -> float:
        if task.ordinal == 0 and answer == greedy:
            raise ValueError("not the greedy one")
        return even(task, answer)

    probe = Scripted()
    with sourced(probe, open_store(), greedy=True) as source:
        source.next(1)
    greedy = "".join(map(str, np.random.default_rng(probe.asked[3]).integers(0, 10, 3)))

    store = open_store()
    with sourced(Scripted(), store, grumpy, greedy=True, retries=0) as source:
        groups = source.next(1)
    assert {r.group for r in groups.rollouts} == {1, 2}
    dropped = [event for _, event in store.read(kinds=(TaskDropped,)) if isinstance(event, TaskDropped)]
    assert [(event.task, event.cause) for event in dropped] == [(0, "the greedy answer failed")]
    assert groups.metrics.reduce()["dropped_tasks/the_greedy_answer_failed"] == 1


# -- many turns -------------------------------------------------------------------------------------------------------

ECHO = EnvConfig(path="tests.recipes.partners:Echo", kwargs={"turns": 3})


def total(task: Task, answer: str) -> float:
    """Return a reward in addition to those of the environment."""
    return float(answer[-1]) / 10


def test_turns_are_journaled_with_their_rewards() -> None:
    store = open_store()
    with sourced(Scripted(), store, total, env=ECHO) as source:
        groups = source.next(1)
    turns = store.turns(0)
    assert [turn.index for turn in turns] == [0, 1, 2] and all(turn.reward == 0.375 for turn in turns)
    rewarded = {e.rollout: e for _, e in store.read(kinds=(AttemptRewarded,)) if isinstance(e, AttemptRewarded)}
    assert all(each.paid == 1.125 for each in rewarded.values())
    times = [(turn.began, turn.at) for turn in _turns_of(store) if turn.rollout == 0]
    assert all(0 < began <= at for began, at in times) and times == sorted(times), "each turn has its own times"
    last = store.rollout(0).last
    assert last is not None and last.total == last.reward + 1.125  # type: ignore[operator]
    batch = Batch.from_records(rows_of(groups), groups.rollouts)
    assert batch.num_rows == 6 and batch.metric is not None and batch.reward is not None
    assert batch.metric.tolist() == [reward + 1.125 for reward in batch.reward.tolist()]
    assert batch.anchor is not None and batch.observation is not None and int(batch.observation.sum()) == 6 * 2 * 4
    numbers = groups.metrics.reduce()
    assert numbers["turns"] == 3 and numbers["sampled_tokens"] == 54 and numbers["tool_calls"] == 0


def test_each_turn_has_its_own_seed_and_the_first_that_of_a_single_answer() -> None:
    alone, many = Scripted(), Scripted()
    with sourced(alone, open_store()) as source:
        source.next(1)
    with sourced(many, open_store(), env=ECHO) as source:
        source.next(1)
    assert len(set(many.asked)) == 18 and set(alone.asked) < set(many.asked)


def test_the_role_of_a_rollout_is_journaled() -> None:
    store, sides = open_store(), EnvConfig(path="tests.recipes.partners:Sides")
    with sourced(Scripted(), store, env=sides) as source:
        first = source.next(1)
    with sourced(Scripted(), store, env=sides) as source:
        again = source.next(1)
    assert (
        [r.role for r in first.rollouts] == [1, 1, 1, 2, 2, 2]
        and again.replayed
        and group_records(again) == group_records(first)
    )
    assert len({turn.anchor for id in range(6) for turn in store.turns(id)[:1]}) == 1, (
        "a named state is the same for all"
    )
    batch = Batch.from_records(rows_of(again), again.rollouts)
    assert batch.role is not None and batch.role.tolist() == [1, 1, 1, 2, 2, 2]


def test_a_group_has_zero_variance_only_if_its_total_rewards_are_equal() -> None:
    """Groups are compared by their total rewards, although the reward function gives the same to every answer."""
    store = open_store()
    odd = EnvConfig(path=f"{__name__}:Evens")
    with sourced(Scripted(), store, lambda task, answer: 0.5, env=odd, refill=3) as source:
        groups = source.next(1)
    assert groups.metrics.reduce()["dropped_tasks"] == 0, "a group with equal rewards would be replaced"
    batch = Batch.from_records(rows_of(groups), groups.rollouts)
    assert batch.metric is not None and set(batch.reward.tolist()) == {0.5}  # type: ignore[union-attr]
    for group in batch.group.unique():
        assert len(set(batch.metric[batch.group == group].tolist())) > 1


class Evens(TextEnv):
    """An environment that rewards an even answer."""

    def play(self, answer: str) -> Observation:
        return Observation(reward=float(int(answer) % 2 == 0), done=True)


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("env", [None, ECHO])
def test_a_run_killed_at_any_write_resumes_exactly(env: EnvConfig | None, greedy: bool, tmp_path: Path) -> None:
    """The journal is cut off after each of its writes in turn, as by a kill. All following steps are the same."""
    options: dict[str, Any] = {"env": env, "greedy": greedy, "refill": 1}

    def judged(task: Task, answer: str) -> float:
        if task.ordinal == 0 and answer[0] in "0123":
            raise ValueError("an answer that cannot be judged")
        return 0.5 if task.ordinal == 1 else even(task, answer)

    with closing(open_store()) as store:
        batches = record_commits(store)
        with sourced(Scripted(), store, judged, **options) as source:
            whole = [group_records(source.next(step)) for step in (1, 2)]
    assert any(isinstance(event, TaskDropped) for batch in batches for event in batch), "nothing was refilled"
    assert len(batches) > 6
    for cut in range(len(batches) + 1):
        with closing(open_store()) as store:
            for batch in batches[:cut]:
                store.append(batch)
            with sourced(Scripted(), store, judged, **options) as source:
                again = [group_records(source.next(step)) for step in (1, 2)]
        assert again == whole, f"after batch {cut} of {len(batches)}"
