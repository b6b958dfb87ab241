"""The rules of `etude doctor RUN`: each finds its defect, and none finds anything in a run that learns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from etude.observe.step_history import StepHistory
from etude.recipes.diagnosis import RULES, Evidence, RunFinding, diagnose
from etude.recipes.diagnosis.evidence import TaskRewards
from etude.tools.doctor.run import examine
from tests.recipes.runs import train

STEPS = 40
Curve = float | NDArray[np.float64]
NOISE = np.random.default_rng(0).normal(0.0, 0.02, STEPS)
LINE = np.linspace(0.0, 1.0, STEPS)
HEALTHY: dict[str, Curve] = {
    "reward": 0.2 + 0.6 * LINE + NOISE,
    "reward/right": 0.2 + 0.6 * LINE + NOISE,
    "zero_variance_share": 0.3,
    "failed_share": 0.0,
    "learning_rate": 1e-5,
    "grad_norm": 0.5,
    "optimizer_steps": 4.0,
    "policy_kl": 0.001,
    "kl": 0.02 * LINE,
    "clip_share": 0.01,
    "mismatch/k3": 1e-4,
    "mismatch/sampler_perplexity": 3.0 - LINE,
    "mismatch/rollout_effective_sample_size": 0.95,
    "answer_length": 60.0,
    "truncated": 0.02,
    "time/step": 10.0,
    "time/collect": 6.0,
    "engine/busy_seconds": 5.5,
    "judging_seconds": 0.1,
    "staleness/mean": 0.0,
    "memory_share": 0.6,
}
FLAT = 0.2 + NOISE
EARLY = {"reward": FLAT, "eval/mean@1": 0.2 + 0.6 * LINE}
"""A reward that has not risen yet, in a run whose evaluation has."""
RISEN = 0.2 + 0.6 * np.minimum(3 * LINE, 1.0) + NOISE
OVERFIT = {"reward": RISEN, "reward/right": RISEN, "eval/mean@1": 0.5 - 0.4 * (LINE - 0.4) ** 2}
"""A reward that no longer rises, while the evaluation falls."""
STALE = {"max_staleness": 2}
LOST = LINE > 0.5
RUINED = {"reward": np.where(LOST, 0.0, RISEN), "truncated": np.where(LOST, 0.95, 0.02)}
"""A policy whose answers no longer end, from the middle of the run on."""
DEFECTS: dict[str, tuple[dict[str, Curve], dict[str, Any]]] = {
    "reward collapsed": (RUINED, {}),
    "reward constant": ({"reward": 0.0, "zero_variance_share": 1.0}, {}),
    "gradient zero": ({"grad_norm": 0.0}, {}),
    "reward flat": ({"reward": FLAT}, {}),
    "groups level": (EARLY | {"zero_variance_share": 0.97}, {}),
    "entropy gone": (EARLY | {"mismatch/sampler_perplexity": np.exp(0.5 * (1 - LINE) ** 8)}, {}),
    "KL grows": (EARLY | {"policy_kl": 0.001 + 0.2 * LINE**2}, {}),
    "mismatch grows": ({"mismatch/k3": 1e-4 + 0.1 * LINE**2}, {}),
    "sample size low": ({"mismatch/rollout_effective_sample_size": 0.95 - 0.92 * LINE**0.5}, {}),
    "lengths at the limit": (EARLY | {"answer_length": 98.0}, {}),
    "answers cut off": (EARLY | {"truncated": 0.5}, {}),
    "reward gamed": ({"reward/polite": LINE, "eval/mean@1": 0.5 - 0.4 * (LINE - 0.3) ** 2}, {}),
    "reward fails": ({"failed_share": 0.2, "failed_attempts/timeout": 12.0}, {}),
    "engines idle": ({"engine/busy_seconds": 1.0}, {}),
    "no effect of updates": ({"policy_kl": 1e-9}, {}),
    "clip": ({"clip_share": 0.7}, {}),
    "staleness at the bound": ({"staleness/mean": 1.95}, STALE),
    "memory nearly full": ({"memory_share": 0.95}, {}),
}


USUAL = [TaskRewards("", row, 100 + row, times=3, answers=24, least=0.0, most=1.0) for row in range(16)]
NEVER = [TaskRewards("", row, 100 + row, times=2, answers=16, least=0.0, most=0.0) for row in range(16, 20)]
ALWAYS = [TaskRewards("", row, 100 + row, times=2, answers=16, least=1.0, most=1.0) for row in range(16, 30)]
ONCE = [replace(task, times=1, answers=8) for task in NEVER]
"""The rewards of rows: of tasks with both right and wrong answers, and of others."""
GAMES = [TaskRewards("game", row, 300 + row, times=3, answers=24, least=-1.0, most=10.0) for row in range(16)]
"""The tasks of another data source, which earn otherwise."""
TASKS = {"tasks never earn": USUAL + NEVER + GAMES, "tasks always earn": USUAL + ALWAYS + GAMES}


def findings(
    changes: dict[str, Curve],
    options: dict[str, Any] | None = None,
    steps: int = STEPS,
    tasks: Sequence[TaskRewards] = USUAL,
) -> list[RunFinding]:
    """Return the findings of a healthy run with some other curves, or tasks."""
    history = StepHistory()
    curves = {name: np.broadcast_to(curve, STEPS) for name, curve in (HEALTHY | changes).items()}
    for place in range(steps):
        history.add(place + 1, {name: float(curve[place]) for name, curve in curves.items()})
    healthy = {"sampling": {"max_tokens": 100}, "loss": {"clip_high": 0.2}}
    return diagnose(Evidence(history, healthy | (options or {}), tasks))


@pytest.mark.parametrize("steps", [0, 1, 5, 12, 25, STEPS])
def test_a_healthy_run_has_no_finding_at_any_time(steps: int) -> None:
    assert findings({}, steps=steps) == []


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_finds_its_defect_alone(rule: str) -> None:
    changes, options = DEFECTS.get(rule, ({}, {}))
    found = findings(changes, options, tasks=TASKS.get(rule, USUAL))
    (finding,) = (finding for finding in found if not finding.cause)
    assert finding.rule == rule
    assert 0 < finding.severity <= 1 and 1 <= finding.first <= finding.last == STEPS
    assert "`" in finding.remedy and finding.numbers and np.isfinite(list(finding.numbers.values())).all()


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        pytest.param({"clip_share": 0.0}, None, id="clip"),
        pytest.param({"learning_rate": 0.0}, None, id="no effect of updates"),
        pytest.param({"optimizer_steps": 1.0, "policy_kl": 0.0, "kl": 0.0}, None, id="no effect of updates"),
        pytest.param({"reward": 0.8 - 0.6 * LINE + NOISE}, None, id="reward flat"),
        pytest.param(EARLY | {"kl": 2.0 * LINE}, None, id="KL grows"),
    ],
)
def test_a_rule_finds_its_other_defects(
    changes: dict[str, Curve], options: dict[str, Any] | None, request: pytest.FixtureRequest
) -> None:
    (finding,) = findings(changes, options)
    assert request.node.callspec.id.startswith(finding.rule)


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        pytest.param({"zero_variance_share": 0.2 + 0.8 * LINE, "truncated": 1.0}, {}, id="all tasks are learned"),
        pytest.param({"optimizer_steps": 1.0, "policy_kl": 0.0, "clip_share": 0.0}, {}, id="one update a step"),
        pytest.param({"staleness/mean": 2.0, "time/collect": 0.5}, STALE, id="at the bound, without a wait"),
        pytest.param(EARLY | {"answer_length": 400.0, "turns": 5.0}, {}, id="several turns"),
        pytest.param({"reward/polite": LINE, "eval/mean@1": 0.3 + 0.3 * LINE}, {}, id="reward and evaluation rise"),
        pytest.param({"kl": 2.0 * LINE}, {}, id="a drift that pays"),
        pytest.param(OVERFIT, {}, id="an evaluation that falls alone"),
        pytest.param(RUINED | {"truncated": 0.02, "eval/mean@1": LINE}, {}, id="tasks that became harder"),
        pytest.param({"reward": np.where(np.arange(STEPS) == 30, 0.0, RISEN), "truncated": 0.1}, {}, id="one low step"),
    ],
)
def test_what_looks_like_a_defect_and_is_none_is_not_found(changes: dict[str, Curve], options: dict[str, Any]) -> None:
    assert findings(changes, options) == []


@pytest.mark.parametrize(
    "tasks",
    [
        pytest.param(USUAL + ONCE, id="tasks that came once"),
        pytest.param(USUAL * 3 + NEVER, id="few of many"),
        pytest.param(NEVER, id="a reward that is the same for all"),
    ],
)
def test_tasks_that_may_earn_yet_are_not_found(tasks: list[TaskRewards]) -> None:
    assert findings({}, tasks=tasks) == []


RATE_TOO_HIGH = [
    {"reward": 0.383, "truncated": 0.0, "answer_length": 7.0, "zero_variance_share": 0.0, "grad_norm": 0.915},
    *[{"reward": 0.0, "truncated": 0.95, "answer_length": 7.9, "zero_variance_share": 1.0, "grad_norm": 0.0}] * 9,
]
"""The demonstration with a learning rate of 0.1."""


def of_steps(steps: Sequence[dict[str, float]], **options: Any) -> list[RunFinding]:
    """Return the findings of these steps."""
    history = StepHistory()
    for step, values in enumerate(steps, start=1):
        history.add(step, {"learning_rate": 0.1, "policy_kl": 1e-13} | values)
    return diagnose(Evidence(history, {"sampling": {"max_tokens": 8}} | options))


def test_a_collapse_stands_before_its_consequences_with_its_step_its_update_and_its_learning_rate() -> None:
    collapse, *others = of_steps(RATE_TOO_HIGH)
    assert (collapse.rule, collapse.first, collapse.last) == ("reward collapsed", 2, 10)
    assert "from 0.383 to 0 in step 2" in collapse.what and "`truncated` went from 0 to 0.95" in collapse.what
    assert "update of step 1" in collapse.what and "gradient norm 0.915" in collapse.what
    assert "from the policy that sampled" not in collapse.what, "the one update of a step cannot measure that"
    assert "`train.learning_rate=0.1`; usual is 1e-6" in collapse.remedy
    assert [other.rule for other in others] == ["groups level", "answers cut off", "lengths at the limit"]
    assert {other.cause for other in others} == {"reward collapsed"}
    assert not any("max_tokens" in other.remedy for other in others)
    assert [finding.rule for finding in of_steps(RATE_TOO_HIGH[:4])] == ["reward collapsed"], "after three low steps"


def test_a_collapse_of_stale_rollouts_names_the_update_that_made_their_policy() -> None:
    good = {"reward": 0.5, "answer_length": 60.0, "truncated": 0.0, "staleness/mean": 2.0, "policy_kl": 0.01}
    bad = good | {"reward": 0.01, "answer_length": 3.0}
    steps = [good] * 6 + [good | {"policy_kl": 4.0}] + [good] * 2 + [bad] * 5
    collapse = next(finding for finding in of_steps(steps, mini_batches=4) if finding.rule == "reward collapsed")
    assert collapse.first == 10 and "`answer_length` went from 60 to 3" in collapse.what
    assert "update of step 7" in collapse.what and "4 nats a token from the policy that sampled" in collapse.what
    assert "`mini_batches=1`" in collapse.remedy and "checkpoint before step 7" in collapse.remedy


def test_a_run_from_a_reward_that_sees_nothing_names_the_reward_first() -> None:
    steps = [{"reward": 0.0, "zero_variance_share": 1.0, "grad_norm": 0.0, "truncated": 0.9}] * 6
    first, *others = of_steps(steps, reward={"name": "exact_match"})
    assert first.rule == "reward constant" and "`reward=exact_match`" in first.remedy and "90% of them" in first.what
    assert [(other.rule, other.cause) for other in others] == [
        ("answers cut off", ""),
        ("gradient zero", "reward constant"),
        ("groups level", "reward constant"),
    ]


def test_a_run_without_options_has_the_findings_that_need_none() -> None:
    history = StepHistory()
    for step in range(1, 8):
        history.add(step, {"truncated": 0.9, "answer_length": 6.0, "reward": float("nan")})
    assert [finding.rule for finding in diagnose(Evidence(history, {}))] == ["answers cut off"]


@pytest.fixture(scope="module")
def failing(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose reward raises on most answers, and whose learning rate is 0."""
    reward = "tests.recipes.rewards:strict"
    directory = tmp_path_factory.mktemp("failing") / "run"
    return train(world, directory, steps=5, reward__path=reward, train__learning_rate=0)


@pytest.mark.slow
def test_a_real_run_that_fails_has_its_findings(failing: Path) -> None:
    found = {finding.rule for finding in examine(failing).findings}
    assert found == {
        *("reward fails", "reward constant", "gradient zero", "no effect of updates", "groups level"),
        *("answers cut off", "lengths at the limit"),
    }


@pytest.mark.slow
def test_a_real_run_that_learns_has_no_finding(world: Path, tmp_path: Path) -> None:
    examined = examine(train(world, tmp_path / "run", steps=20))
    assert (examined.findings, examined.problems, examined.steps) == ([], [], 20)
