"""One Ray for all tests of a process: starting it takes longer than most of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from etude.config.env import keep_ray_quiet
from tests.components import require

CPUS, STORE = 4, 200 * 2**20


@contextmanager
def joined() -> Iterator[None]:
    """A small Ray on this machine, until the end."""
    require("ray")
    keep_ray_quiet()
    import ray

    ray.init(
        address="local",
        num_cpus=CPUS,
        include_dashboard=False,
        object_store_memory=STORE,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _node_ip_address="127.0.0.1",
    )
    try:
        yield
    finally:
        ray.shutdown()
