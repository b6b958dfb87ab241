"""Resource pools: the roles that share them, and the shortage of a cluster."""

from __future__ import annotations

import pytest

from etude.dispatch.resource_pool import ResourcePool, count_bundles, describe_shortage
from etude.errors import ConfigError


def test_roles_that_share_a_bundle_get_a_part_each() -> None:
    pool = ResourcePool(("policy", "critic"), ranks=4, cpus=3, gpus=1)
    assert pool.bundle == {"CPU": 3, "GPU": 1}
    assert pool.role_resources("policy") == pool.role_resources("critic") == {"CPU": 1.5, "GPU": 0.5}
    assert ResourcePool(("policy",), 2, 1).role_resources("policy") == {"CPU": 1}


def test_missing_resources_are_reported_with_their_numbers() -> None:
    pool = ResourcePool(("policy",), ranks=3, cpus=2, gpus=1)
    assert describe_shortage(pool, {"CPU": 8, "GPU": 3}, {"CPU": 6, "GPU": 3}) is None
    shortage = describe_shortage(pool, {"CPU": 8.0}, {"CPU": 5.5, "memory": 1e9})
    assert shortage == (
        "CPU: 3 × 2 are requested, the cluster has 8, of which 5.5 are free; "
        "GPU: 3 × 1 are requested, the cluster has 0, of which 0 are free."
    )


def test_a_bundle_must_fit_on_one_node() -> None:
    nodes = [{"CPU": 5.0, "GPU": 1.0, "memory": 1e9}, {"CPU": 3.0}, {}]
    assert count_bundles(ResourcePool(("policy",), ranks=1, cpus=2), nodes) == 3
    assert count_bundles(ResourcePool(("policy",), ranks=1, cpus=4), nodes) == 1
    assert count_bundles(ResourcePool(("policy",), ranks=1, cpus=8), nodes) == 0
    assert count_bundles(ResourcePool(("policy",), ranks=1, cpus=1, gpus=0.1), nodes) == 5
    assert count_bundles(ResourcePool(("policy",), ranks=1, cpus=0.1), [{"CPU": 1.0}]) == 10


def test_a_pool_without_bundles_is_refused() -> None:
    for roles, ranks, sentence in (
        ((), 1, "has one or more roles"),
        (("policy", "policy"), 1, "no role twice"),
        (("policy",), 0, "a place for each rank, and 0 were requested"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            ResourcePool(roles, ranks, 1)
    with pytest.raises(ConfigError, match="`judge` has no place in a pool of policy"):
        ResourcePool(("policy",), 1, 1).role_resources("judge")
