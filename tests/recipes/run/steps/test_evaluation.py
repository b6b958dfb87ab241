"""Evaluation beside the trainer: it is drawn by the weights of its step, and its scores stand under that step."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from etude.chat import RenderedPrompt
from etude.config.only_with import idle_options
from etude.data import Dataset
from etude.errors import EngineError
from etude.images import PromptImages
from etude.observe import JsonlSink, Metrics, RunInfo, RunLog, Sum, null_progress
from etude.protocols import Ids
from etude.recipes.collect.player import EnginePlayer
from etude.recipes.evaluate import EvaluationConfig, Evaluator
from etude.recipes.event_loop import LoopThread
from etude.recipes.run.directory import read_metrics
from etude.recipes.run.steps.evaluation import PeriodicEvaluation
from etude.records import Completion, SamplingParams
from etude.rewards import Judge
from etude.store import open_store
from etude.store.journal import events
from tests.recipes.runs import run_of

HELD, STEPS = 3, 8
"""The number of versions that the engine holds, and the run's steps."""


class Adapters:
    """An engine that holds versions, and answers when it may."""

    def __init__(self) -> None:
        self.version = 0
        self.may_answer = threading.Event()
        self.failure: EngineError | None = None

    async def generate(
        self,
        prompt: Ids,
        sampling: SamplingParams,
        *,
        images: PromptImages | None = None,
        on_start: Callable[[], None] | None = None,
    ) -> Completion:
        """Draw one token by the version that the request names, which must be held until the end."""
        assert sampling.version is not None
        while not self.may_answer.is_set():
            await asyncio.sleep(0.001)
        if self.failure is not None:
            raise self.failure
        assert self.version < sampling.version + HELD, "the adapter was unloaded before the answer"
        version = np.full(1, sampling.version, np.int32)
        return Completion(np.ones(1, np.int32), np.zeros(1, np.float32), version, "stop", "4")


@contextmanager
def evaluated(directory: Path, engine: Adapters) -> Iterator[tuple[PeriodicEvaluation, Callable[[int], None]]]:
    """Yield the evaluation of a run, which is due after each second step, and a function that makes a step."""
    config, dataset = EvaluationConfig(every=2, when="beside"), Dataset.load([{"prompt": "2+2="}] * 3)
    with (
        Judge(lambda task, answer: 1.0) as judge,
        LoopThread() as loop,
        closing(open_store()) as store,
        RunLog([JsonlSink()], RunInfo("run", directory, STEPS)) as log,
    ):
        player = EnginePlayer(
            render=lambda _: RenderedPrompt(np.ones(3, np.int32)),
            engine=engine,
            judge=judge,
            timeout=5.0,
            max_concurrency=8,
            episodes=None,
            newest_version=lambda: engine.version,
        )
        parts: dict[str, Any] = {"sampling": SamplingParams(), "seed": 0, "dataset": dataset, "loop": loop}
        evaluator = Evaluator(config, player=player, judge=judge, **parts)
        evaluation = PeriodicEvaluation(
            *(evaluator, directory, STEPS, store, Metrics, "val", null_progress),
            shares_engine=True,
            kept_versions=HELD,
            add_late=log.add_late,
        )

        def train(step: int) -> None:
            with log.step(step) as at:
                evaluation.before_publish(step)
                engine.version = step
                at.add(Metrics({"trained": Sum.of(step)}))
                at.add(evaluation.maybe_run(step))

        yield evaluation, train
        engine.may_answer.set()


def test_the_trainer_goes_on_and_the_scores_stand_under_their_step(tmp_path: Path) -> None:
    engine, best = Adapters(), list[int]()
    with evaluated(tmp_path, engine) as (evaluation, train):
        evaluation.mark_best = lambda step, score, measured: best.append(step)
        for step in (1, 2, 3):
            train(step)
        assert evaluation.beside is not None and not evaluation.scores
        engine.may_answer.set()
        evaluation.finish()
        assert evaluation.scores == {2: 1.0} and best == [2]
        (scored,) = [event for _, event in evaluation.store.read(kinds=(events.PolicyEvaluated,))]
        assert isinstance(scored, events.PolicyEvaluated) and scored.step == 2
    lines = read_metrics(tmp_path)
    assert [line["trained"] for line in lines] == [1, 2, 3]
    assert [line.get("eval/mean@1") for line in lines] == [None, 1.0, None]
    answers = (tmp_path / "evaluations" / "step-00000002.jsonl").read_text().splitlines()
    assert [json.loads(answer)["version"] for answer in answers] == [2, 2, 2], "not the newest version"


def test_what_would_end_an_evaluation_waits_for_it(tmp_path: Path) -> None:
    """The publish that unloads its adapter, the next evaluation, and the checkpoint of a later step."""
    engine = Adapters()
    with evaluated(tmp_path, engine) as (evaluation, train):
        for wait in (lambda: evaluation.before_publish(2 + HELD), lambda: train(4), lambda: evaluation.before_save(3)):
            engine.may_answer.clear()
            evaluation.scores.clear()
            engine.version = 2
            evaluation.evaluation_id += "'"  # another way to score, so that the journal has no scores of the step
            evaluation.maybe_run(2)
            evaluation.before_publish(1 + HELD)
            evaluation.before_save(2)
            assert evaluation.beside is not None, "neither of them waits"
            release = threading.Timer(0.05, engine.may_answer.set)
            release.start()
            wait()
            assert evaluation.scores == {2: 1.0}
            release.join()
            evaluation.finish()


def test_the_last_step_is_scored_before_the_run_ends(tmp_path: Path) -> None:
    engine = Adapters()
    engine.may_answer.set()
    with evaluated(tmp_path, engine) as (evaluation, train):
        for step in range(1, STEPS + 1):
            train(step)
        assert evaluation.beside is None and evaluation.scores.keys() == {2, 4, 6, 8}
    assert [line["step"] for line in read_metrics(tmp_path) if "eval/mean@1" in line] == [2, 4, 6, 8]


def test_an_engine_that_fails_ends_the_run_after_its_step(tmp_path: Path) -> None:
    engine = Adapters()
    engine.failure = EngineError("no server is left")
    with evaluated(tmp_path, engine) as (evaluation, train):
        train(2)
        evaluation.raise_failed()
        engine.may_answer.set()
        evaluation.finish()
        with pytest.raises(EngineError, match="no server is left"):
            evaluation.raise_failed()
    assert [line["step"] for line in read_metrics(tmp_path)] == [2]


def test_the_last_step_is_not_saved_while_the_failure_of_an_earlier_one_is_unraised(tmp_path: Path) -> None:
    engine = Adapters()
    engine.failure = EngineError("no server is left")
    engine.may_answer.set()
    with evaluated(tmp_path, engine) as (evaluation, train):
        train(2)
        evaluation.maybe_run(STEPS)
        with pytest.raises(EngineError, match="no server is left"):
            evaluation.before_save(STEPS)


ADAPTERS = {"rollout": "vllm", "rollout.adapters": "only", "lora.rank": 2}


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"max_staleness": 1, "placement.layout": "split"}, "embedded engine has one version .*`rollout=vllm`"),
        ({"max_staleness": 1, "rollout": "vllm"}, "replaces the weights of all servers.*`rollout.adapters=only`"),
        (ADAPTERS, "`max_staleness=1` or more"),
        (ADAPTERS | {"max_staleness": 1, "agent.path": "tests.recipes.players:solver"}, "an agent's calls"),
        (ADAPTERS | {"max_staleness": 1}, None),
    ],
)
def test_weights_that_do_not_stay_are_refused(changes: dict[str, Any], refusal: str | None, world: Path) -> None:
    run = run_of(world, **changes, **{"evaluate.when": "beside"})
    problems = [str(problem) for problem in idle_options(run, ["evaluate"])]
    assert bool(problems) == (refusal is not None)
    assert all(re.search(refusal or "", problem) for problem in problems)
