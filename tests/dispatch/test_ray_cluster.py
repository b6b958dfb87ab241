"""A Ray of the run's own: its directory, its token, and its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.components import require
from tests.dispatch.test_ray_nodes import JOINS
from tests.processes import gone
from tests.rays import a_head, output_of, program


def test_the_directory_keeps_the_paths_of_sockets_short() -> None:
    require("ray")
    from etude.dispatch.ray_cluster import DIRECTORY_PREFIX, LONGEST_RELATIVE_PATH, MAX_SOCKET_PATH, _short_directory

    longest = MAX_SOCKET_PATH - len(f"/{DIRECTORY_PREFIX}{LONGEST_RELATIVE_PATH}")
    assert 15 < longest < 40
    for length in range(5, 60):
        directory = "/" + "d" * (length - 1)
        assert _short_directory(directory) == (directory if length <= longest else "/tmp")
    assert _short_directory("/" + "\u00e9" * 15) == "/tmp", "bytes count"


def test_directories_of_a_killed_controller_are_removed_by_the_next(tmp_path: Path) -> None:
    """Directories that are in use, or that belong to another user, stay."""
    require("ray")
    from etude.dispatch.ray_cluster import DIRECTORY_PREFIX, _lock_directory, _remove_stale_directories

    here, left, starting, other = (
        tmp_path / name for name in (f"{DIRECTORY_PREFIX}1", f"{DIRECTORY_PREFIX}2", f"{DIRECTORY_PREFIX}3", "ray-4")
    )
    for place in (here, left, starting, other):
        (place / "r" / "session").mkdir(parents=True)
    with _lock_directory(here):
        _lock_directory(left).close()
        _lock_directory(other).close()
        _remove_stale_directories(tmp_path)
        assert sorted(tmp_path.iterdir()) == sorted((here, starting, other))
    _remove_stale_directories(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted((starting, other))


@pytest.mark.soak
def test_ray_starts_with_a_long_tmpdir(tmp_path: Path) -> None:
    require("ray")
    place = tmp_path / ("long" * 20)
    place.mkdir()
    output = output_of(program(JOINS, tmp_path / "logs", TMPDIR=str(place), RAY_ADDRESS=""))
    assert output["count"] == 11 and all(gone(pid, 30) for pid in output["pids"])


AGAIN = """
import json, os, sys
from contextlib import closing
del os.environ["RAY_AUTH_MODE"]
from etude.dispatch import crew_of
crew_of("ray")
from etude.dispatch.ray_cluster import RayCluster
import ray

def seen():
    return [os.environ.get("RAY_AUTH_MODE"), os.environ.get("RAY_AUTH_TOKEN")]

def left():
    return [name for name in os.environ if name.startswith("RAY_AUTH")]

seen_by = []
for _ in range(2):
    with closing(RayCluster(1)) as cluster:
        seen_by.append([*ray.get(ray.remote(seen).remote()), left(), cluster.is_own])
ray.init(address=sys.argv[1], log_to_driver=False)
seen_by.append([*ray.get(ray.remote(seen).remote()), left(), RayCluster(1).is_own])
ray.shutdown()
print(json.dumps({"seen_by": seen_by}))
"""


@pytest.mark.soak
def test_one_process_may_start_several_rays_each_with_its_own_token(tmp_path: Path) -> None:
    """A Ray that was started by others follows, which asks for no token."""
    require("ray")
    open_to_all = {"RAY_AUTH_MODE": "disabled"}
    with a_head(guard=open_to_all) as head:
        seen = output_of(program(AGAIN, head.address, RAY_ADDRESS="", HOME=str(tmp_path), **open_to_all))["seen_by"]
    first, second, other = seen
    assert [first[0], second[0]] == ["token"] * 2 and len({first[1], second[1], None, ""}) == 4
    assert first[2:] == second[2:] == [[], True]
    assert other == ["disabled", None, [], False]
