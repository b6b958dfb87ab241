"""A run with rollouts of an older policy keeps its bound and loses nothing, however often it is killed."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.scenario import KillPoint, RunKiller, make_world
from tests.chaos.stale import POINTS, WINDOWED, random_stale_kills, run_killed, stale

pytestmark = pytest.mark.xdist_group("stale kills")

KILLS = int(os.environ.get("KILLS", "100"))
"""The number of kills of each kind of run: `make soak KILLS=1000` for more."""
LIMIT_S = 1500.0
"""Seconds after which no further run is begun."""


@pytest.fixture(scope="module")
def killer() -> RunKiller:
    """The object that starts and kills processes."""
    return RunKiller()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model and the tasks that every process starts from."""
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.mark.smoke
def test_a_run_killed_in_a_publish_at_an_admission_and_in_a_save_keeps_its_promises(
    killer: RunKiller, world: Path, tmp_path: Path
) -> None:
    """One run is killed with half of the weights sent, with a step that is admitted and not trained, and with half of a
    checkpoint."""
    kills = [KillPoint("transferring", 4), KillPoint("admitted", 6), KillPoint("checkpoint.writing", 2)]
    killed, staleness = run_killed(killer, tmp_path / "run", world, 4, kills)
    assert killed == len(kills) and staleness > 0


@pytest.mark.parametrize(("bound", "changes"), [(1, {}), (4, {}), (4, WINDOWED)])
def test_a_run_killed_at_each_point_keeps_its_promises(
    killer: RunKiller, world: Path, tmp_path: Path, bound: int, changes: dict[str, Any]
) -> None:
    """The kills follow each other in one run, each some steps further."""
    kills = [KillPoint(point, count) for point, count in zip(POINTS, (3, 200, 4, 5, 6, 3, 4, 5, 1), strict=True)]
    killed, staleness = run_killed(killer, tmp_path / "run", world, bound, kills, **changes)
    assert killed == len(kills) and staleness > 0


@pytest.mark.soak
@pytest.mark.parametrize(("bound", "changes"), [(1, {}), (4, {}), (4, WINDOWED)])
def test_a_run_killed_at_random_times_keeps_its_promises(
    killer: RunKiller, world: Path, tmp_path: Path, bound: int, changes: dict[str, Any]
) -> None:
    began = time.monotonic()
    assert killer.run_once(tmp_path / "whole", world, KillPoint(), **stale(bound, **changes))
    seconds, kills, number = time.monotonic() - began, 0, 0
    while kills < KILLS:
        assert time.monotonic() - began < LIMIT_S, f"only {kills} kills in {LIMIT_S:g} seconds"
        plan = random_stale_kills(16, 100 * bound + number, seconds)
        kills += run_killed(killer, tmp_path / str(number), world, bound, plan, **changes)[0]
        number += 1
    print(f"max_staleness={bound}: {kills} kills of {number} runs in {time.monotonic() - began:.0f} seconds")
