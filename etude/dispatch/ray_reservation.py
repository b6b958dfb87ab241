"""The reservation of a pool's bundles on a Ray cluster."""

from __future__ import annotations

import threading
import time
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from etude.dispatch.multi_rank_crew import REPORT_INTERVAL, TICK
from etude.dispatch.resource_pool import ResourcePool, count_bundles, describe_shortage
from etude.errors import CrewError
from etude.observe import format_seconds, get_logger

_ray: Any = ray
"""Ray's functions whose types are missing or wrong."""


class PoolReservation:
    """The bundles of a pool, reserved until this is closed. Ray packs them onto few nodes if that is possible."""

    def __init__(self, pool: ResourcePool, *, fixed_size: bool = False) -> None:
        """fixed_size: no other node can join the cluster."""
        self.pool = pool
        self._fixed_size = fixed_size
        self._group = placement_group([dict(pool.bundle)] * pool.ranks, strategy="PACK")

    def wait(self, timeout: float, closing: threading.Event) -> None:
        """Wait until the bundles are free, and log from time to time what is lacking. Raise if they never can be."""
        log, start = get_logger("dispatch"), time.monotonic()
        if self._fixed_size and self._num_possible < self.pool.ranks:
            raise CrewError(
                f"The cluster has no room for {self._description()}, and no other node joins it. {self._shortage()} "
                f"Lower `ranks` or `threads`, or have `RAY_ADDRESS` name a larger cluster."
            )
        ready, last_report = self._group.ready(), start
        while not ray.wait([ready], timeout=TICK)[0]:
            elapsed = time.monotonic() - start
            if elapsed > timeout or closing.is_set():
                raise CrewError(
                    f"The cluster has had no room for {self._description()} for {elapsed:.0f} s. {self._shortage()} "
                    "Wait until others are done, add nodes, lower `ranks` or `threads`, or give it longer with "
                    "`crew.timeout`."
                )
            if time.monotonic() - last_report > REPORT_INTERVAL:
                last_report = time.monotonic()
                log.info(
                    "After %s, there is no room for %s. %s",
                    format_seconds(elapsed),
                    self._description(),
                    self._shortage(),
                )

    @property
    def _num_possible(self) -> int:
        """The number of such bundles on all nodes, if all of them were free."""
        return count_bundles(self.pool, [node["Resources"] for node in _ray.nodes() if node["Alive"]])

    def _shortage(self) -> str:
        sentence = describe_shortage(self.pool, _ray.cluster_resources(), _ray.available_resources())
        sentence = sentence or "The cluster has enough of everything, but not a whole place on single nodes."
        if (possible := self._num_possible) < self.pool.ranks:
            sentence += f" With nothing else running, its nodes would have room for {possible}."
        return sentence

    def options(self, role: str, rank: int) -> dict[str, Any]:
        """Return the options that place an actor on one of the bundles."""
        resources = self.pool.role_resources(role)
        return {
            "num_cpus": resources.get("CPU", 0.0),
            "num_gpus": resources.get("GPU", 0.0),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, rank),
        }

    def close(self) -> None:
        """Release the bundles."""
        remove_placement_group(self._group)

    def _description(self) -> str:
        return f"{self.pool.ranks} ranks of {' and '.join(self.pool.roles)}"
