"""Scores: means, the unbiased best of k, majorities, by data source."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import math
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from etude.chat import RenderedPrompt
from etude.data import Dataset
from etude.images import PromptImages
from etude.protocols import Ids
from etude.recipes.collect.player import EnginePlayer
from etude.recipes.collect.sampling import EvaluationSampling, SamplingConfig, derived_seed
from etude.recipes.evaluate import EvaluatedAnswer, EvaluationConfig, Evaluator, best_of, compute_scores, write_answers
from etude.recipes.event_loop import LoopThread
from etude.records import Completion, SamplingParams, Task
from etude.rewards import Judge
from tests.waits import blocked_until, skip_time


def answer(task: int, text: str, reward: float, source: str = "a", **more: object) -> EvaluatedAnswer:
    """Return an answer of three tokens, all of it extracted."""
    fields = {"extracted": text.strip(), **more}
    return EvaluatedAnswer(task, source, "?", text, reward, {}, 3, "stop", **fields)  # type: ignore[arg-type]


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=6), st.data())
def test_the_best_of_k_is_the_mean_over_all_choices_of_k(rewards: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(rewards)))
    maxima = [max(chosen) for chosen in itertools.combinations(rewards, k)]
    assert best_of(rewards, k) == pytest.approx(sum(maxima) / len(maxima), abs=1e-9)


@given(st.integers(1, 8), st.data())
def test_for_binary_rewards_it_is_pass_at_k(n: int, data: st.DataObject) -> None:
    right, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    rewards = [1.0] * right + [0.0] * (n - right)
    assert best_of(rewards, k) == pytest.approx(1 - math.comb(n - right, k) / math.comb(n, k))


def test_scores_are_reported_by_task_and_by_source() -> None:
    answers = [answer(0, "4", 1.0), answer(0, "5", 0.0), answer(0, "5 ", 0.0), answer(0, "4", 1.0)]
    answers += [answer(1, "x", 0.0, "b"), answer(1, "y", 1.0, "b"), answer(1, "y", 1.0, "b"), answer(1, "z", 0.0, "b")]
    result = compute_scores(answers).reduce()
    assert result["eval/mean@4"] == 0.5 and result["eval/a/mean@4"] == 0.5
    assert result["eval/best@4"] == 1.0 and result["eval/best@2"] == pytest.approx(
        1 - math.comb(2, 2) / math.comb(4, 2)
    )
    assert result["eval/maj@4"] == 1.0  # 4 was given first, y most often
    assert result["eval/b/length"] == 3 and result["eval/failed"] == 0


def test_one_source_is_not_reported_twice() -> None:
    assert not any(name.startswith("eval/a/") for name in compute_scores([answer(0, "4", 1.0)]).reduce())


def test_a_failed_answer_is_counted() -> None:
    assert compute_scores([answer(0, "", 0.0, error="No answer.", failed=True)]).reduce()["eval/failed"] == 1


def test_a_majority_counts_extracted_answers() -> None:
    answers = [
        ("I say 4", "4", 1.0),
        ("4!", "4", 1.0),
        ("5", "5", 0.0),
        ("?", None, 0.0),
        ("?", None, 0.0),
        ("?", None, 0.0),
    ]
    voted = [answer(0, extracted, reward, extracted=read) for extracted, read, reward in answers]
    assert compute_scores(voted).reduce()["eval/maj@6"] == 1.0, "who says nothing has no vote"
    silent = [answer(0, "one thing", 1.0, extracted=None), answer(0, "another", 0.0, extracted=None)]
    assert "eval/maj@2" not in compute_scores(silent).reduce()
    result = compute_scores([*silent, answer(1, "4", 1.0), answer(1, "4", 1.0)]).reduce()
    assert result["eval/maj@2"] == 0.5, "a task without a vote is not won"


class Slow:
    """An engine that takes its time, and counts its concurrent requests."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.under_way, self.most = seconds, 0, 0
        self.answered = 0

    async def generate(
        self,
        prompt: Ids,
        sampling: SamplingParams,
        *,
        images: PromptImages | None = None,
        on_start: Callable[[], None] | None = None,
    ) -> Completion:
        """Return one token."""
        assert on_start is not None
        on_start()
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.under_way -= 1
        self.answered += 1
        return Completion(np.ones(1, np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32), "stop", "4")


@pytest.mark.parametrize(("seconds", "timeout", "expected"), [(0.0, 5.0, 1.0), (5.0, 0.05, 0.0)])
def test_sampling_time_excludes_waiting_for_the_judge(seconds: float, timeout: float, expected: float) -> None:
    engine = Slow(seconds)

    def slowly(task: Task, answer: str) -> float:
        """Wait for all answers, and then for longer than the time limit of one."""
        blocked_until(lambda: engine.answered == 12)
        skip_time(6)
        return 1.0

    with Judge(slowly) as judge, LoopThread() as loop:
        player = EnginePlayer(
            render=lambda _: RenderedPrompt(np.ones(3, np.int32)),
            engine=engine,
            judge=judge,
            timeout=timeout,
            max_concurrency=3,
            episodes=None,
        )
        dataset = Dataset.load([{"prompt": "2+2="}] * 12)
        result = Evaluator(
            EvaluationConfig(),
            sampling=SamplingParams(),
            seed=0,
            dataset=dataset,
            player=player,
            judge=judge,
            loop=loop,
        ).answer_all(step=0)
    assert engine.most == 3 and engine.under_way == 0
    assert {a.reward for a in result} == {expected} and {a.failed for a in result} == {not expected}


def test_few_images_of_tasks_are_in_memory_while_they_are_scored(tmp_path: Path) -> None:
    tasks, stream = 96, io.BytesIO()
    Image.new("RGB", (4, 4)).save(stream, "PNG")
    images = [[{"bytes": stream.getvalue() + bytes(200_000), "path": None}]] * tasks
    pq.write_table(pa.table({"prompt": ["<image>"] * tasks, "images": images}), tmp_path / "tasks.parquet")
    del images
    with Judge(lambda task, answer: 1.0) as judge, LoopThread() as loop:
        player = EnginePlayer(
            render=lambda _: RenderedPrompt(np.ones(3, np.int32)),
            engine=Slow(0.0),
            judge=judge,
            timeout=30.0,
            max_concurrency=tasks,
            episodes=None,
        )
        evaluator = Evaluator(
            EvaluationConfig(),
            sampling=SamplingParams(),
            seed=0,
            dataset=Dataset.load([tmp_path / "tasks.parquet"]),
            player=player,
            judge=judge,
            loop=loop,
        )
        tracemalloc.start()
        try:
            assert len(evaluator.answer_all(step=0)) == tasks
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < tasks * 200_000


def test_answers_for_scoring_are_as_long_as_in_training_unless_set_otherwise() -> None:
    assert EvaluationSampling(temperature=0.5).fill_from(SamplingConfig(max_tokens=7)) == SamplingConfig(
        max_tokens=7, temperature=0.5
    )
    assert EvaluationSampling(max_tokens=3).fill_from(SamplingConfig(max_tokens=7)).max_tokens == 3


def test_answers_are_kept_for_inspection(tmp_path: Path) -> None:
    write_answers([answer(3, "vier", 1.0)], tmp_path / "evaluations" / "a.jsonl")
    data = json.loads((tmp_path / "evaluations" / "a.jsonl").read_text())
    assert data["task"] == 3 and data["text"] == "vier" and data["reward"] == 1.0


def test_seeds_follow_from_their_purpose_alone() -> None:
    places = [
        (run, purpose, a, b) for run in (0, 1) for purpose in ("train", "evaluate") for a in (0, 1) for b in (0, 1)
    ]
    seeds = {derived_seed(run, purpose, a, b) for run, purpose, a, b in places}
    assert len(seeds) == len(places) and all(0 <= seed < 2**63 for seed in seeds)
    assert derived_seed(1, "train", 2, 3) == derived_seed(1, "train", 2, 3)


def test_sampling_options_become_sampling_parameters() -> None:
    params = SamplingConfig(max_tokens=7, temperature=0.5, stop=("\n",)).params(11)
    assert (params.max_tokens, params.temperature, params.stop, params.seed) == (7, 0.5, ("\n",), 11)
