"""Several rewards as one: their options, the executor of each, and the name of the one that failed."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from etude.config.compose import compose
from etude.config.show import to_yaml
from etude.errors import ConfigError, DataError, PluginError, UnknownKeyError
from etude.recipes.run.config import Run
from etude.records import Outcome, Task
from etude.rewards import (
    COMBINABLE_REWARDS,
    REWARDS,
    Code,
    CombinedReward,
    ExactMatch,
    Format,
    FunctionReward,
    Gsm8k,
    Judge,
    JudgingConfig,
    Math,
    Regex,
    RewardFunction,
    Verdict,
)
from tests.rewards.tasks import task

MISBEHAVES = FunctionReward(path="tests.rewards.functions:misbehaves")
WAITED = FunctionReward(path="tests.rewards.functions:waited")


class Slow(RewardFunction):
    """A reward that waits, in place."""

    seconds: float = 0.6

    async def __call__(self, task: Task, answer: str) -> float:
        await asyncio.sleep(self.seconds)
        return 0.5


class Blocking(RewardFunction):
    """A reward that blocks its thread."""

    seconds: float = 0.6

    def __call__(self, task: Task, answer: str) -> float:
        time.sleep(self.seconds)
        return 1.0


def judged(judge: Judge, *answers: str) -> Sequence[Verdict]:
    async def ask() -> Sequence[Verdict]:
        return await asyncio.gather(*(judge.judge(task(ordinal=i), answer) for i, answer in enumerate(answers)))

    return asyncio.run(ask())


# -- judging ----------------------------------------------------------------------------------------------------------


def test_parts_of_every_kind_run_on_their_own_executors() -> None:
    parts = {
        "quick": ExactMatch(),
        "waits": Slow(seconds=0.1),
        "thread": Blocking(seconds=0.1),
        "processes": Regex(pattern=r"(\d)"),
    }
    with Judge(CombinedReward(parts=parts, weights={"waits": 2.0, "processes": -0.5})) as judge:
        assert judge.one_by_one
        right, wrong = judged(judge, "4", "5")
    assert right.parts == {"quick": 1.0, "waits": 1.0, "thread": 1.0, "processes": -0.5} and right.reward == 2.5
    assert wrong.parts == {"quick": 0.0, "waits": 1.0, "thread": 1.0, "processes": 0.0} and wrong.reward == 2.0
    assert right.extracted_answer == "4" and right.outcome is Outcome.SUCCEEDED and not right.failed_part


def test_a_program_may_be_a_part() -> None:
    reward = CombinedReward(parts={"runs": Code(), "form": Regex(pattern="^```python")}, weights={"form": 0.1})
    with Judge(reward) as judge:
        verdict = asyncio.run(judge.judge(task({"inputs": ["1"], "outputs": ["1"]}), "```python\nprint(input())\n```"))
    assert verdict.parts == {"runs": 1.0, "form": 0.1}


def test_parts_are_judged_at_the_same_time() -> None:
    with Judge(CombinedReward(parts={"one": Blocking()} | {f"slow {n}": Slow() for n in range(9)})) as judge:
        began = time.perf_counter()
        (verdict,) = judged(judge, "x")
    assert time.perf_counter() - began < 6 and 0.5 < verdict.seconds < 6


def test_workers_are_refused_if_no_part_uses_them() -> None:
    parts = {"process": FunctionReward(path="tests.rewards.functions:process"), "program": Code()}
    truth = task({"inputs": [""], "outputs": ["1"]})
    with Judge(CombinedReward(parts=parts), JudgingConfig(workers=1)) as judge:
        verdict = asyncio.run(judge.judge(truth, "print(1)"))
    assert verdict.parts["process"] != os.getpid() and verdict.parts["program"] == 1.0
    with pytest.raises(ConfigError, match=r"`judging\.workers=1` judges in several processes"):
        Judge(CombinedReward(parts={"program": Code()}), JudgingConfig(workers=1))


@pytest.mark.parametrize(
    ("parts", "answer", "outcome", "message"),
    [
        ({"a": ExactMatch(), "b": MISBEHAVES}, "raise", Outcome.FAILED, "ValueError: no such luck"),
        ({"b": MISBEHAVES, "a": Slow(seconds=0.1)}, "sleep 5", Outcome.TIMED_OUT, "took longer than `judging.timeout`"),
        ({"a": ExactMatch(), "b": WAITED}, "x", Outcome.FAILED, "could not convert string to float"),
    ],
)
def test_one_part_that_fails_is_named(parts: dict[str, Any], answer: str, outcome: Outcome, message: str) -> None:
    with Judge(CombinedReward(parts=parts), JudgingConfig(timeout=0.6)) as judge:
        (verdict,) = judged(judge, answer)
    assert verdict.outcome is outcome and verdict.failed_part == "b" and math.isnan(verdict.reward)
    assert message in verdict.error and verdict.error.endswith("It is the part `b` of the reward.")


def test_a_process_that_dies_is_named_and_replaced() -> None:
    with Judge(CombinedReward(parts={"b": MISBEHAVES}), JudgingConfig(workers=1)) as judge:
        (lost,) = judged(judge, "die")
        (fine,) = judged(judge, "fine")
    assert lost.failed_part == "b" and lost.outcome is Outcome.INFRA_ERROR and fine.reward == 1.0


def test_a_failure_may_have_a_score() -> None:
    with Judge(CombinedReward(parts={"b": MISBEHAVES}), JudgingConfig(on_error="score", error_score=-1.0)) as judge:
        (verdict,) = judged(judge, "raise")
    assert verdict.reward == -1.0 and verdict.failed_part == "b"


def test_the_reward_has_the_weighted_parts() -> None:
    reward = CombinedReward(parts={"right": ExactMatch(), "later": Slow(seconds=0.0)}, weights={"later": 4.0})
    assert asyncio.run(reward(task(), "4")) == {"right": 1.0, "later": 2.0}
    assert reward.extract(" 4 ") == "4" and reward.title == "combined (right, later)"


def test_a_task_refused_by_a_part_is_refused() -> None:
    with pytest.raises(DataError, match="needs a right answer"):
        CombinedReward(parts={"form": Format(), "right": ExactMatch()}).check(task(None))
    with pytest.raises(PluginError, match="there is no file nowhere"):
        Judge(CombinedReward(parts={"mine": FunctionReward(path="nowhere.py:f")}))
    with pytest.raises(ConfigError, match=r"may take 40 seconds"):
        Judge(CombinedReward(parts={"p": Code(total_timeout=40.0)}))


def test_files_of_parts_are_listed() -> None:
    reward = CombinedReward(
        parts={"mine": FunctionReward(path="a.py:f"), "module": FunctionReward(path="a.b:f"), "right": ExactMatch()}
    )
    assert reward.files() == [Path("a.py")]
    moved = reward.with_absolute_paths(lambda path: Path("/here") / path)
    assert moved.files() == [Path("/here/a.py")] and moved.parts["module"] == reward.parts["module"]


# -- options ----------------------------------------------------------------------------------------------------------

GSM = Gsm8k(method="flexible")


@pytest.mark.parametrize(
    ("overrides", "reward"),
    [
        (["reward.parts.right=math"], CombinedReward(parts={"right": Math()})),
        (
            ["reward.parts.right=math", "reward.parts.form=format", "reward.weights.form=0.2"],
            CombinedReward(parts={"right": Math(), "form": Format()}, weights={"form": 0.2}),
        ),
        (
            ["reward.parts={right: math, form: {name: format, tags: [a]}}"],
            CombinedReward(parts={"right": Math(), "form": Format(tags=("a",))}),
        ),
        (["reward.parts.right=gsm8k", "reward.parts.right.method=flexible"], CombinedReward(parts={"right": GSM})),
        (["reward.parts.right.method=flexible", "reward.parts.right=gsm8k"], CombinedReward(parts={"right": GSM})),
        (["reward.parts.right.name=gsm8k", "reward.parts.right.method=flexible"], CombinedReward(parts={"right": GSM})),
        (["reward.parts.own=tests.rewards.test_combined:Slow"], CombinedReward(parts={"own": Slow()})),
    ],
)
def test_parts_are_set_on_the_command_line(overrides: list[str], reward: CombinedReward) -> None:
    assert compose(Run, ["reward=combined", *overrides]).reward == reward


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ([], {"right": GSM, "form": Format()}),
        (["reward.parts.right.method=strict"], {"right": Gsm8k(), "form": Format()}),
        (["reward.parts.right=math"], {"right": Math(), "form": Format()}),
        (["reward.parts.right=regex", "reward.parts.right.pattern=a"], {"right": Regex(pattern="a"), "form": Format()}),
        (["reward.parts.right={name: f1}"], {"right": COMBINABLE_REWARDS["f1"](), "form": Format()}),
        (["reward.parts.more=exact_match"], {"right": GSM, "form": Format(), "more": ExactMatch()}),
        (["reward.parts={only: exact_match}"], {"only": ExactMatch()}),
    ],
)
def test_parts_of_a_file_are_merged_with_overrides(tmp_path: Path, overrides: list[str], parts: dict[str, Any]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("reward: {name: combined, parts: {right: {name: gsm8k, method: flexible}, form: format}}")
    assert compose(Run, overrides, file=file).reward == CombinedReward(parts=parts)


def test_written_options_are_read_back(tmp_path: Path) -> None:
    run = compose(
        Run, ["reward=combined", "reward.parts.right=gsm8k", "reward.parts.form=format", "reward.weights.form=2"]
    )
    (tmp_path / "run.yaml").write_text(to_yaml(run))
    assert compose(Run, file=tmp_path / "run.yaml") == run


@pytest.mark.parametrize(
    ("overrides", "kind", "message"),
    [
        ([], ConfigError, r"reward\.parts needs a value and has none"),
        (["reward.parts={}"], ConfigError, r"`parts` names no reward\. Give at least one"),
        (["reward.parts.right=mth"], ConfigError, r"reward\.parts\.right: there is no 'mth'\. Did you mean math\?"),
        (["reward.parts.all=combined"], ConfigError, r"reward\.parts\.all: there is no 'combined'"),
        (
            ["reward.parts.right=gsm8k", "reward.parts.right.methd=x"],
            UnknownKeyError,
            r"reward\.parts\.right\.methd is not an option .*Did you mean reward\.parts\.right\.method\?",
        ),
        (["reward.parts.score=math"], ConfigError, r"`parts` has a part called 'score'"),
        (
            ["reward.parts.right=math", "reward.weights.rigt=2"],
            ConfigError,
            r"`weights` has one for 'rigt', and the parts are right",
        ),
        (["reward.parts.right=math", "reward.weights.right=0"], ConfigError, r"The weight of the part 'right' is 0"),
        (
            ["reward.parts.right=math", "reward.weights.right=.nan"],
            ConfigError,
            r"The weight of the part 'right' is nan|expects a number",
        ),
    ],
)
def test_invalid_options_are_refused(overrides: list[str], kind: type[ConfigError], message: str) -> None:
    with pytest.raises(kind, match=message):
        compose(Run, ["reward=combined", *overrides])


def test_every_other_reward_may_be_a_part() -> None:
    assert REWARDS.keys() - COMBINABLE_REWARDS.keys() == {"by_source", "combined", "environment", "nothing"}
    assert all(REWARDS[name] is COMBINABLE_REWARDS[name] for name in COMBINABLE_REWARDS)
