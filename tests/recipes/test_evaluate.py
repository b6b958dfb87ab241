"""Scores: means, the unbiased best of k, majorities, by data source."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.recipes.evaluate import Answer, best_of, scores, write_answers
from etude.recipes.sampling import Sampling, derived_seed


def answer(task: int, text: str, reward: float, source: str = "a", **more: object) -> Answer:
    """An answer of three tokens."""
    return Answer(task, source, "?", text, reward, {}, 3, "stop", **more)  # type: ignore[arg-type]


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=6), st.data())
def test_the_best_of_k_is_the_mean_over_all_choices_of_k(rewards: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(rewards)))
    every = [max(chosen) for chosen in itertools.combinations(rewards, k)]
    assert best_of(rewards, k) == pytest.approx(sum(every) / len(every), abs=1e-9)


@given(st.integers(1, 8), st.data())
def test_for_right_and_wrong_it_is_pass_at_k(n: int, data: st.DataObject) -> None:
    right, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    rewards = [1.0] * right + [0.0] * (n - right)
    assert best_of(rewards, k) == pytest.approx(1 - math.comb(n - right, k) / math.comb(n, k))


def test_scores_are_told_by_task_and_by_source() -> None:
    answers = [answer(0, "4", 1.0), answer(0, "5", 0.0), answer(0, "5 ", 0.0), answer(0, "4", 1.0)]
    answers += [answer(1, "x", 0.0, "b"), answer(1, "y", 1.0, "b"), answer(1, "y", 1.0, "b"), answer(1, "z", 0.0, "b")]
    found = scores(answers).reduce()
    assert found["eval/mean@4"] == 0.5 and found["eval/a/mean@4"] == 0.5
    assert found["eval/best@4"] == 1.0 and found["eval/best@2"] == pytest.approx(1 - math.comb(2, 2) / math.comb(4, 2))
    assert found["eval/maj@4"] == 1.0  # 4 was given first, y most often
    assert found["eval/b/length"] == 3 and found["eval/failed"] == 0


def test_one_source_is_not_told_twice() -> None:
    assert not any(name.startswith("eval/a/") for name in scores([answer(0, "4", 1.0)]).reduce())


def test_an_answer_that_failed_is_counted() -> None:
    assert scores([answer(0, "", 0.0, error="No answer.")]).reduce()["eval/failed"] == 1


def test_answers_are_kept_to_be_looked_at(tmp_path: Path) -> None:
    write_answers([answer(3, "vier", 1.0)], tmp_path / "evaluations" / "a.jsonl")
    told = json.loads((tmp_path / "evaluations" / "a.jsonl").read_text())
    assert told["task"] == 3 and told["text"] == "vier" and told["reward"] == 1.0


def test_seeds_follow_from_what_they_are_for_and_nothing_else() -> None:
    places = [
        (run, purpose, a, b) for run in (0, 1) for purpose in ("train", "evaluate") for a in (0, 1) for b in (0, 1)
    ]
    seeds = {derived_seed(run, purpose, a, b) for run, purpose, a, b in places}
    assert len(seeds) == len(places) and all(0 <= seed < 2**63 for seed in seeds)
    assert derived_seed(1, "train", 2, 3) == derived_seed(1, "train", 2, 3)


def test_sampling_becomes_parameters() -> None:
    params = Sampling(max_tokens=7, temperature=0.5, stop=("\n",)).params(11)
    assert (params.max_tokens, params.temperature, params.stop, params.seed) == (7, 0.5, ("\n",), 11)
