"""One Ray for all tests of a process: starting it takes longer than most of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from etude.dispatch import crew_of
from tests.components import require

CPUS = 4


@contextmanager
def joined() -> Iterator[None]:
    """A small Ray on this machine, until the end."""
    require("ray")
    crew_of("ray")
    from etude.dispatch.ray_cluster import Cluster

    with closing(Cluster(CPUS)):
        yield
