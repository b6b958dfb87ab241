"""A Ray of one's own: where it lies."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.components import require
from tests.dispatch.test_ray_nodes import JOINS, program, told_by
from tests.processes import gone


def test_it_lies_where_the_paths_of_its_sockets_are_short_enough() -> None:
    require("ray")
    from etude.dispatch.ray_cluster import PREFIX, REACH, WITHIN, _short

    longest = REACH - len(f"/{PREFIX}{WITHIN}")
    assert 15 < longest < 40
    for length in range(5, 60):
        directory = "/" + "d" * (length - 1)
        assert _short(directory) == (directory if length <= longest else "/tmp")
    assert _short("/" + "\u00e9" * 15) == "/tmp", "bytes count"


@pytest.mark.soak
def test_a_long_tmpdir_does_not_keep_it_from_starting(tmp_path: Path) -> None:
    require("ray")
    place = tmp_path / ("long" * 20)
    place.mkdir()
    told = told_by(program(JOINS, tmp_path / "logs", TMPDIR=str(place), RAY_ADDRESS=""))
    assert told["count"] == 11 and all(gone(pid, 30) for pid in told["pids"])
