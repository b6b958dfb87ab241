"""The warnings and errors of a run about stale rollouts, before they cost it its policy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from etude.algorithms import LOSSES, AlgorithmConfig
from etude.config.compose import compose
from etude.errors import ConfigError
from etude.observe import Mean, Metrics
from etude.recipes.run.config import Run
from etude.recipes.run.rules.checks import check_algorithm
from etude.recipes.run.rules.stale_data import check_stale_ratios, check_staleness
from etude.recipes.run.steps.ess_warnings import ROLLOUT_ESS, EssWarnings
from etude.rollout import TorchEngineConfig
from tests.recipes.runs import Captured, run_of, train


def warned(floor: float, shares: list[float | None], caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings of steps with these effective sample sizes; None measured nothing."""
    warnings = EssWarnings(floor)
    for step, share in enumerate(shares, 1):
        warnings.check(step, Metrics({} if share is None else {ROLLOUT_ESS: Mean.of(share, 8)}))
    return [line for line in caplog.messages if "effective sample size" in line]


def test_steps_under_the_floor_are_warned_of_at_once_and_when_they_have_doubled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lines = warned(0.3, [0.9, 0.2, 0.1, 0.05, 0.04, 0.9, 0.29], caplog)
    assert [int(line.partition("In step ")[2].split()[0]) for line in lines] == [2, 3, 5, 7]
    assert "is 0.2 of the rollouts, under `ess_floor=0.3`: few" in lines[0]
    assert "as in the 3 steps before" in lines[2] and "before" not in lines[3].partition("few")[0]


@pytest.mark.parametrize(("floor", "shares"), [(0.0, [0.0, 1e-9]), (0.5, [None, 0.5]), (0.1, [1.0])])
def test_nothing_is_said_without_a_reason(
    floor: float, shares: list[float | None], caplog: pytest.LogCaptureFixture
) -> None:
    assert not warned(floor, shares, caplog)


def test_a_step_that_measured_nothing_does_not_end_a_row(caplog: pytest.LogCaptureFixture) -> None:
    assert len(warned(0.5, [0.1, None, 0.1, 0.1], caplog)) == 2


def test_a_run_warns_of_its_steps(world: Path, tmp_path: Path, capsys: Captured) -> None:
    train(world, tmp_path / "run", steps=1, ess_floor=1.0)
    assert "under `ess_floor=1`" in capsys.readouterr().err


# -- ratios without a bound -------------------------------------------------------------------------------------------

BOUNDED: dict[str, dict[str, Any]] = {
    "truncated weights": {"correction": {"weight": "truncate"}},
    "VCPO": {
        "loss": "reinforce",
        "correction": {"weight": "truncate", "level": "sequence", "step_scaling": "sqrt_ess"},
    },
    "masked weights": {"correction": {"weight": "mask"}},
    "rejection": {"loss": "reinforce", "correction": {"reject": [{"low": 0.5, "high": 2.0}]}},
    "OPSM": {"correction": {"opsm_delta": 0.1}},
    "PPO around the sampler": {"correction": {"policies": "two"}},
    "a capped weight": {"loss": {"name": "reinforce", "cap": 2.0}},
    **{name: {"loss": name} for name in ("dppo", "ipo", "flash_reinforce", "m2po", "vespo", "decoupled_ppo")},
}
UNBOUNDED: dict[str, dict[str, Any]] = {
    "PPO around the policy of the step's start": {},
    "REINFORCE without a weight": {"loss": "reinforce"},
    "GPG": {"loss": "gpg"},
    "KL-Cov around the sampler": {"loss": "kl_cov", "correction": {"policies": "two"}},
    "scaled steps alone": {"correction": {"step_scaling": "sqrt_ess"}},
}


@pytest.mark.parametrize("name", BOUNDED)
def test_stale_rollouts_are_trained_on_where_the_ratio_to_the_sampler_is_bounded(name: str) -> None:
    algorithm = AlgorithmConfig(**BOUNDED[name])
    check_stale_ratios(algorithm, 4, allow_unbounded=False)
    with pytest.raises(ConfigError, match="changes nothing here: the ratio to the sampler is bounded"):
        check_stale_ratios(algorithm, 4, allow_unbounded=True)


@pytest.mark.parametrize("name", UNBOUNDED)
def test_stale_rollouts_without_a_bound_are_refused_or_asked_for(name: str) -> None:
    algorithm = AlgorithmConfig(**UNBOUNDED[name])
    with pytest.raises(ConfigError, match=r"`max_staleness=1` trains on .* collapse. Set `correction.weight=truncate`"):
        check_stale_ratios(algorithm, 1, allow_unbounded=False)
    check_stale_ratios(algorithm, 1, allow_unbounded=True)
    check_stale_ratios(algorithm, 0, allow_unbounded=False)


def test_each_remedy_that_is_named_is_one() -> None:
    with pytest.raises(ConfigError) as refused:
        check_stale_ratios(AlgorithmConfig(), 1, allow_unbounded=False)
    remedies = re.findall(r"`((?:loss|correction)\.?\w*=\w+)`", str(refused.value))
    assert len(remedies) == 4
    for remedy in remedies:
        check_stale_ratios(compose(Run, [remedy]), 1, allow_unbounded=False)


def test_a_run_without_stale_rollouts_refuses_the_option(world: Path) -> None:
    run = run_of(world, allow_unbounded_ratios=True)
    with pytest.raises(ConfigError, match="`allow_unbounded_ratios=true` changes nothing here: `max_staleness=0`"):
        check_algorithm(run)


def test_servers_that_sleep_while_the_policy_trains_are_refused(world: Path) -> None:
    run = run_of(world, max_staleness=1, rollout="vllm", **{"train.offload": True})
    with pytest.raises(ConfigError, match=r"has servers sleep then\. Leave `train.offload` out"):
        check_staleness(run)


@pytest.mark.parametrize("option", ["rollout.running", "rollout.kv"])
def test_publishing_in_flight_is_refused_where_no_request_runs_meanwhile(option: str, world: Path) -> None:
    beside = {option: {"rollout.running": "restart", "rollout.kv": "recompute"}[option]}
    with pytest.raises(ConfigError, match=f"`{option}=re.*` is for answers under way .* `max_staleness=0` there are"):
        check_staleness(run_of(world, **beside))
    stale = {"max_staleness": 1, "placement.layout": "split"}
    check_staleness(run_of(world, **beside, **stale))
    check_staleness(run_of(world, **beside, rollout="vllm"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"update_timeout": 5.0}, r"`rollout\.running=continue` waits for none"),
        ({"running": "finish", "kv": "recompute"}, r"`rollout\.running=finish` leaves none"),
    ],
)
def test_options_of_publishing_that_have_no_effect_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TorchEngineConfig(**options)


def test_every_loss_that_clips_or_drops_says_that_it_bounds_its_ratio() -> None:
    assert {name for name, kind in LOSSES.items() if not kind().bounds_ratio()} == {"kl_cov", "gpg", "reinforce"}
