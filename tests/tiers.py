"""The tiers of the tests, by marker; CONTRIBUTING.md says which command runs which.

A test without a marker is in `make check`. The markers `slow`, `kept`, `smoke`, `integration`, `soak` and `gpu` are
written at the test. If a marker follows from the test's place, its needs or its recorded seconds, this module sets it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.durations import Record, allowed, fixture_key, key_of

TESTS = Path(__file__).parent

INTEGRATION_PATHS = (
    "bench",
    "chaos",
    "clients",
    "learn",
    "agents/execution/test_processes.py",
    "agents/execution/test_stubborn.py",
    "agents/proxy/test_unmodified.py",
    "contracts/test_train_engines.py",
    "contracts/test_train_meshes.py",
    "demo/tabular/test_compare.py",
    "demo/test_first_steps.py",
    "dispatch/test_process_crew.py",
    "dispatch/test_ray.py",
    "dispatch/test_ray_cluster.py",
    "dispatch/test_ray_machines.py",
    "dispatch/test_ray_nodes.py",
    "examples/test_notebook.py",
    "models/kernels/test_interpreted.py",
    "models/test_allocator.py",
    "recipes/collect/test_agent_rollouts.py",
    "recipes/test_carried_groups.py",
    "recipes/workers/test_weight_sender.py",
    "recipes/test_interrupt.py",
    "recipes/agents/test_remote_store.py",
    "recipes/test_no_silent_no_op.py",
    "recipes/test_orphans.py",
    "recipes/test_ranks_run.py",
    "recipes/test_ray_nodes_run.py",
    "recipes/test_ray_run.py",
    "recipes/test_served_adapters.py",
    "recipes/test_sweep.py",
    "rewards/sandbox/test_escapes.py",
    "rollout/test_real_servers.py",
    "rollout/test_server_pool.py",
    "rollout/test_served_faults.py",
    "store/journal/test_postgres.py",
    "store/queue/test_retention.py",
    "store/http/test_server_killed.py",
    "store/journal/test_sql_killed.py",
    "view/test_evaluations.py",
    "view/test_pages.py",
    "view/test_real_runs.py",
)
"""Folders and files in which every test is integration. They are not even imported if that marker is left out."""

TEST_PATHS = (
    "agents/proxy/test_sdks.py",
    "chat/test_answer_text.py",
    "house/test_site.py",
    "observe/test_trackers.py",
    "store/http/test_server_fuzzed.py",
)
"""The files in which every test is slow, because they load large libraries. `make check` does not import them."""

SMOKE_PATHS = (
    "bench/test_gpu_battery.py",
    "chaos/test_agent_kills.py",
    "chaos/test_kills.py",
    "chaos/test_stale_kills.py",
    "clients/test_clients.py",
    "contracts/test_rollout_queue.py",
    "demo/test_first_steps.py",
    "house/test_readme.py",
    "learn/test_presets.py",
    "models/kernels/test_interpreted.py",
    "recipes/test_ranks_run.py",
    "recipes/test_ray_run.py",
    "recipes/test_served_runs.py",
    "view/test_pages.py",
)
"""The files with tests of the marker `smoke`. `make smoke` imports no others."""

INTEGRATION_NEEDS = frozenset({"postgres", "ray", "vllm", "sglang"})
"""A test with one of these as a parameter, or as its group of `xdist_group`, is integration."""

INTEGRATION_FIXTURES = frozenset({"a_ray", "vllm_server", "sglang_server"})
"""A test that uses one of these is integration."""

WITHOUT_INTEGRATION, WITHOUT_SLOW, ONLY_SMOKE = "not integration", "not slow", "smoke"
"""The words by which a marker expression leaves tiers out, and the prefix of an expression that selects only smoke."""


def mark(items: Sequence[pytest.Item], record: Record) -> None:
    """Set the markers that follow from each test's place, its needs and its recorded seconds."""
    for item in items:
        if _is_integration(item):
            item.add_marker(pytest.mark.integration)
        elif _is_slow(item, record):
            item.add_marker(pytest.mark.slow)


def longest_first(items: list[pytest.Item], record: Record) -> None:
    """Order files by their duration, the longest first, so that no process starts a long one when others are done."""
    units = {item: unit_of(item) for item in items}
    seconds: dict[str, float] = {}
    for item, unit in units.items():
        seconds[unit] = seconds.get(unit, 0.0) + record.tests.get(key_of(item.nodeid), 0.0)
    items.sort(key=lambda item: (-seconds[units[item]], units[item]))


def unit_of(item: pytest.Item) -> str:
    """Return the unit that runs in one process, because its tests share slow fixtures: a group, or else a file."""
    group = item.get_closest_marker("xdist_group")
    return str(group.args[0]) if group is not None else item.nodeid.partition("::")[0]


def is_left_out(path: Path, expression: str) -> bool:
    """Return whether a marker expression leaves out every test under a path."""
    if expression.startswith(ONLY_SMOKE):
        return path.suffix == ".py" and not _is_below(path, SMOKE_PATHS)
    if WITHOUT_SLOW in expression and _is_below(path, TEST_PATHS):
        return True
    return WITHOUT_INTEGRATION in expression and _is_below(path, INTEGRATION_PATHS)


def names_of(item: pytest.Item) -> set[str]:
    """Return the names of a test's markers."""
    return {marker.name for marker in item.iter_markers()}


def fixtures_of(item: pytest.Item) -> Iterator[str]:
    """Return the shared fixtures of a test, as the record names them."""
    known = getattr(item, "_fixtureinfo", None)
    for name, definitions in () if known is None else known.name2fixturedefs.items():
        if definitions[-1].scope != "function":
            yield fixture_key(definitions[-1].baseid, name)


def _is_slow(item: pytest.Item, record: Record) -> bool:
    if item.get_closest_marker("kept") is not None:
        return False
    return _is_below(item.path, TEST_PATHS) or record.is_slow(key_of(item.nodeid), fixtures_of(item), allowed(item))


def _is_integration(item: pytest.Item) -> bool:
    groups = {str(value) for marker in item.iter_markers("xdist_group") for value in marker.args}
    call = getattr(item, "callspec", None)
    values = set() if call is None else {value for value in call.params.values() if isinstance(value, str)}
    return (
        not INTEGRATION_NEEDS.isdisjoint(groups | values)
        or not INTEGRATION_FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))
        or _is_below(item.path, INTEGRATION_PATHS)
    )


@cache  # for each file once, and not for each of its tests
def _is_below(path: Path, names: tuple[str, ...]) -> bool:
    place = path.relative_to(TESTS).as_posix() if TESTS in path.parents else ""
    return any(place == name or place.startswith(f"{name}/") for name in names)
