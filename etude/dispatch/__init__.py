"""Calls to all workers of a crew: how they are split over ranks, and how the results are joined."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from etude.config.env import silence_ray
from etude.dispatch.config import CrewConfig
from etude.dispatch.local_crew import LocalCrew
from etude.errors import MissingPackageError

if TYPE_CHECKING:
    from etude.dispatch.multi_rank_crew import MultiRankCrew

__all__ = ["ClusterBackend", "CrewConfig", "LocalCrew", "crew_of"]

ClusterBackend = Literal["local", "ray"]
"""The ranks of a run: processes of this machine, or Ray actors."""


def crew_of(backend: ClusterBackend) -> Callable[..., MultiRankCrew[Any]]:
    """Return the class that starts a crew of several ranks there."""
    if backend == "local":
        from etude.dispatch.process_crew import ProcessCrew

        return ProcessCrew
    silence_ray()
    try:
        from etude.dispatch.ray_crew import RayCrew
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"cluster=ray needs the package ray, which cannot be imported here ({error}). Install it with: "
            f"pip install 'etude[ray]'"
        ) from error
    return RayCrew
