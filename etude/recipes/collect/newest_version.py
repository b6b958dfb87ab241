"""The policy version by which a rollout samples where servers hold an adapter for each version."""

from __future__ import annotations

from collections.abc import Callable

from etude.rollout import ServerPool


def newest_version(engine: object) -> Callable[[], int] | None:
    """Return a function that returns the newest policy version of servers that hold adapters; None for other engines.

    A rollout takes this version at its first request, and names it in all its requests. A rollout that was issued at
    the floor f sends its first request later, so its one version v is at least f. A step k that trains on it is at most
    f + 1 + `max_staleness`, so its staleness (k − 1) − v is at most `max_staleness`.
    """
    if isinstance(engine, ServerPool) and engine.router.keeps_versions:
        return lambda: engine.version
    return None
