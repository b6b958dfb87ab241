"""The rules of `etude doctor RUN`: each finds its defect, and none finds anything in a run that learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from etude.observe.step_history import StepHistory
from etude.recipes.diagnosis import RULES, Evidence, RunFinding, diagnose
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
DEFECTS: dict[str, tuple[dict[str, Curve], dict[str, Any]]] = {
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


def findings(changes: dict[str, Curve], options: dict[str, Any] | None = None, steps: int = STEPS) -> list[RunFinding]:
    """Return the findings of a healthy run with some other curves."""
    history = StepHistory()
    curves = {name: np.broadcast_to(curve, STEPS) for name, curve in (HEALTHY | changes).items()}
    for place in range(steps):
        history.add(place + 1, {name: float(curve[place]) for name, curve in curves.items()})
    return diagnose(Evidence(history, {"sampling": {"max_tokens": 100}, "loss": {"clip_high": 0.2}} | (options or {})))


@pytest.mark.parametrize("steps", [0, 1, 5, 12, 25, STEPS])
def test_a_healthy_run_has_no_finding_at_any_time(steps: int) -> None:
    assert findings({}, steps=steps) == []


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_finds_its_defect_alone(rule: str) -> None:
    changes, options = DEFECTS[rule]
    (finding,) = findings(changes, options)
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
    ],
)
def test_what_looks_like_a_defect_and_is_none_is_not_found(changes: dict[str, Curve], options: dict[str, Any]) -> None:
    assert findings(changes, options) == []


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
    assert found == {"reward fails", "no effect of updates", "groups level", "answers cut off", "lengths at the limit"}


@pytest.mark.slow
def test_a_real_run_that_learns_has_no_finding(world: Path, tmp_path: Path) -> None:
    examined = examine(train(world, tmp_path / "run", steps=20))
    assert (examined.findings, examined.problems, examined.steps) == ([], [], 20)
