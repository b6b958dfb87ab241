"""An engine's answers that score the model are in the journal of the run, and continue after a kill."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import numpy as np
import pytest

from etude.chat import RenderedPrompt
from etude.data import Dataset
from etude.errors import CollectionError, EngineError
from etude.recipes.collect import evaluation_player
from etude.recipes.collect.engine_runner import EngineRunner, engine_limits
from etude.recipes.collect.evaluation_player import EvaluationPlayer, evaluation_number
from etude.recipes.collect.player import EnginePlayer
from etude.recipes.collect.requested import RequestedRollouts
from etude.recipes.evaluate import EvaluationConfig, Evaluator
from etude.recipes.event_loop import LoopThread
from etude.records import SamplingParams, Task
from etude.rewards import Judge, JudgingConfig
from etude.store import Journal, Phase, open_store
from etude.store.queue.local_queue import open_own_queue
from tests.recipes.collect.test_sources import Scripted, even

ROWS, SAMPLES = 4, 3


@contextmanager
def evaluating(engine: Scripted, store: Journal) -> Iterator[tuple[Evaluator, RequestedRollouts, LoopThread]]:
    """Return an evaluator that records its answers, its rollouts, and the event loop of both."""
    sampling = SamplingParams(max_tokens=4)

    def judged(task: Task, answer: str) -> float:
        assert task.ordinal == task["row"], "a reward sees the same task at any step"
        return even(task, answer)

    with ExitStack() as stack:
        judge = stack.enter_context(Judge(judged, JudgingConfig()))
        loop = stack.enter_context(LoopThread())
        player = EnginePlayer(
            render=lambda prompt: RenderedPrompt(np.frombuffer(prompt.encode(), np.uint8).astype(np.int32)),
            engine=engine,
            judge=judge,
            timeout=5.0,
            max_concurrency=1,
            episodes=None,
        )
        queue = stack.enter_context(open_own_queue(store))
        runner = EngineRunner(queue, {"val": (player, sampling)}, seed=5)
        requested = RequestedRollouts(queue, store, judge, runner, engine_limits(3))
        evaluator = Evaluator(
            EvaluationConfig(samples=SAMPLES),
            sampling=sampling,
            seed=5,
            dataset=Dataset.load([{"prompt": f"{row}+1="} for row in range(ROWS)]),
            player=EvaluationPlayer(requested, store, "one way of scoring"),
            judge=judge,
            loop=loop,
            unrecorded=player,
        )
        yield evaluator, requested, loop
        loop.run(requested.close())


def test_an_evaluation_that_was_cut_off_asks_only_for_the_answers_that_it_lacks() -> None:
    """The scores are those of answers that are not recorded. Another step is scored anew."""
    with closing(open_store()) as store:
        engine = Scripted(lambda n: EngineError("gone") if n == 6 else 0.05)
        with evaluating(engine, store) as (cut, _, _), pytest.raises(EngineError, match="gone"):
            cut.answer_all(step=2)
        engine = Scripted()
        with evaluating(engine, store) as (resumed, _, _):
            answers = resumed.answer_all(step=2)
            asked = len(engine.asked)
            assert asked <= ROWS * SAMPLES - 4, "answers that were judged before the cut are not sampled again"
            assert resumed.answer_all(step=2) == answers and len(engine.asked) == asked
            assert resumed.with_sampling().answer_all(step=2) == answers
            assert resumed.answer_all(step=3) == answers and len(engine.asked) == asked + 2 * ROWS * SAMPLES
        assert all(task.use == "val" and task.phase is Phase.DROPPED for task in store.tasks())
        assert {state.use for state in store.rollouts()} == {"val"}


def test_an_evaluation_ends_with_an_error_if_its_run_stops_making_rollouts() -> None:
    """As when a judge ends the collecting of a run with staleness, while the policy is scored."""
    with closing(open_store()) as store, evaluating(Scripted(lambda n: 30.0), store) as (evaluator, requested, loop):
        answers = evaluator.begin(step=1)
        loop.run(asyncio.sleep(0.2))
        loop.run(requested.close())
        with pytest.raises(CollectionError, match="has stopped making rollouts"):
            evaluator.wait_for(answers)
        with pytest.raises(CollectionError, match="has stopped making rollouts"):
            evaluator.answer_all(step=2)


def test_two_ways_of_scoring_never_share_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation_player, "MAX_EVALUATIONS", 4)  # so that some have the same hash
    with closing(open_store()) as store:
        ways = ["one", "two", "three", "four"]
        numbers = [evaluation_number(store, way) for way in ways]
        assert sorted(numbers) == [0, 1, 2, 3] and [evaluation_number(store, way) for way in ways] == numbers
        with pytest.raises(CollectionError, match="scored in 4 ways"):
            evaluation_number(store, "five")
