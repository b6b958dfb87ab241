"""What a run says of stale rollouts before they cost it its policy."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.observe import Mean, Metrics
from etude.recipes.run.stale_data import ROLLOUT_ESS, EssWarnings
from tests.recipes.runs import Captured, train


def warned(floor: float, shares: list[float | None], capsys: Captured) -> list[str]:
    """The warnings of steps with these effective sample sizes; None measured nothing."""
    warnings = EssWarnings(floor)
    for step, share in enumerate(shares, 1):
        warnings.check(step, Metrics({} if share is None else {ROLLOUT_ESS: Mean.of(share, 8)}))
    return [line for line in capsys.readouterr().err.splitlines() if "effective sample size" in line]


def test_steps_under_the_floor_are_warned_of_at_once_and_when_they_have_doubled(capsys: Captured) -> None:
    lines = warned(0.3, [0.9, 0.2, 0.1, 0.05, 0.04, 0.9, 0.29], capsys)
    assert [int(line.partition("In step ")[2].split()[0]) for line in lines] == [2, 3, 5, 7]
    assert "is 0.2 of the rollouts, under `ess_floor=0.3`: few" in lines[0]
    assert "as in the 3 before" in lines[2] and "before" not in lines[3].partition("few")[0]


@pytest.mark.parametrize(("floor", "shares"), [(0.0, [0.0, 1e-9]), (0.5, [None, 0.5]), (0.1, [1.0])])
def test_nothing_is_said_without_a_reason(floor: float, shares: list[float | None], capsys: Captured) -> None:
    assert not warned(floor, shares, capsys)


def test_a_step_that_measured_nothing_does_not_end_a_row(capsys: Captured) -> None:
    assert len(warned(0.5, [0.1, None, 0.1, 0.1], capsys)) == 2


def test_a_run_warns_of_its_steps(world: Path, tmp_path: Path, capsys: Captured) -> None:
    train(world, tmp_path / "run", steps=1, ess_floor=1.0)
    assert "under `ess_floor=1`" in capsys.readouterr().err
