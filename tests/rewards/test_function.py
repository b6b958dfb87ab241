"""A user's function, from any place and with either signature."""

from __future__ import annotations

import asyncio
import functools
import pickle
from pathlib import Path
from typing import Any

import pytest

from etude.config import Choice, Config
from etude.errors import ConfigError, PluginError
from etude.rewards import REWARDS, FunctionReward
from etude.rewards.function import FunctionAdapter
from tests.rewards import functions
from tests.rewards.tasks import task

MODULE = "tests.rewards.functions"


def test_a_function_is_loaded_from_a_module() -> None:
    reward = FunctionReward(path=f"{MODULE}:length")
    assert reward(task(), "four") == 4.0 and not reward.is_async and reward.title == f"{MODULE}:length"
    assert pickle.loads(pickle.dumps(reward))(task(), "four") == 4.0


def test_a_function_is_loaded_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from dataclasses import dataclass\n\n@dataclass\nclass Held:\n    value: float\n\n"
        "def half(task, answer):\n    return Held(len(answer) / 2).value\n"
    )
    assert FunctionReward(path=f"{path}:half")(task(), "four") == 2.0


def test_a_function_with_verls_signature_gets_verls_arguments() -> None:
    reward = FunctionReward(path=f"{MODULE}:compute_score")
    seen = {"score": 1.0, "acc": True, "seen": True, "pred": "4sums"}
    assert reward(task(extra_info={"index": 3}), "4") == seen
    assert reward(task(), "5") == {"score": -1.0, "acc": False, "seen": False, "pred": "5sums"}
    assert FunctionAdapter(functions.takes_any)(task(), "4") == 2.0  # data_source and extra_info
    assert FunctionAdapter(lambda ground_truth, solution_str: float(ground_truth == solution_str))(task(), "4") == 1.0


@pytest.mark.parametrize("truth", [{"target": 3, "numbers": [1, 2]}, [{"a": 1}], 0, True, []])
def test_a_ground_truth_has_any_form(truth: Any) -> None:
    reward = FunctionAdapter(lambda solution_str, ground_truth: float(ground_truth == truth))
    reward.check(task(truth))
    assert reward(task(truth), "1 + 2") == 1.0


def test_verls_signature_needs_a_ground_truth() -> None:
    with pytest.raises(ValueError, match="Task 7 of sums needs a right answer"):
        FunctionReward(path=f"{MODULE}:compute_score")(task(None), "4")


@pytest.mark.parametrize(
    "function",
    [functions.waited, functions.Holder(1.0), functools.partial(functions.waited)],
    ids=["function", "object", "partial"],
)
def test_coroutine_functions_are_recognised_before_a_call(function: Any) -> None:
    adapted = FunctionAdapter(function)
    assert adapted.is_async and asyncio.run(adapted(task(), "0")) == 1.0
    assert not FunctionAdapter(functions.length).is_async


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        (f"{MODULE}:lenght", r"tests\.rewards\.functions has no lenght\. Did you mean length"),
        ("nowhere_at_all:f", r"there is no module nowhere_at_all"),
        ("no_colon", r"is incomplete\. .* `reward\.path=my_reward\.py:score`"),
        ("mine.py", r"is incomplete\. .* `reward\.path=my_reward\.py:score`"),
        (f"{MODULE}:NO_FUNCTION", r"is of type int, which cannot be called"),
        ("nowhere/mine.py:f", r"there is no file nowhere/mine\.py \(seen from /"),
        (
            f"{MODULE}:no_known_names",
            r"takes \(question, reply\), which is neither \(task, answer\) nor verl's",
        ),
        (f"{MODULE}:many", r"takes \(prompts, completions, \*\*kwargs\).* TRL's functions judge a list of completions"),
        (f"{MODULE}:owes_more", r"also takes tokenizer, which Etude does not pass"),
    ],
)
def test_each_way_to_fail_has_its_sentence(path: str, sentence: str) -> None:
    with pytest.raises(PluginError, match=sentence):
        FunctionReward(path=path).prepare()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "def fail():\n    raise RuntimeError('no licence')\nfail()",
            r"running .*mine\.py raised RuntimeError in line 2: no licence",
        ),
        ("def", r"running .*mine\.py raised SyntaxError"),
        ("def score(task, answer): ...", r"mine\.py has no scores\. Did you mean score"),
    ],
)
def test_a_file_that_fails_is_named(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(PluginError, match=sentence):
        FunctionReward(path=f"{path}:scores").prepare()


def test_a_callable_without_a_signature_is_refused() -> None:
    with pytest.raises(PluginError, match="does not say what its parameters are"):
        FunctionAdapter(dict)


def test_positional_only_parameters_are_refused() -> None:
    def positional(task: Any, answer: Any, /) -> float:
        return 0.0

    with pytest.raises(PluginError, match=r"takes \(task, answer\), which is neither"):
        FunctionAdapter(positional)


def test_it_is_chosen_by_name() -> None:
    choice = Choice(REWARDS).options(Config)
    assert choice.validate({"name": "function", "path": "a:b"}) == FunctionReward(path="a:b")
    with pytest.raises(ConfigError):
        FunctionReward()
