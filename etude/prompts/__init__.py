"""Algorithms that search for a better prompt of an agent, and train no weights: `etude.APO` and `etude.GEPA`."""

from __future__ import annotations

from typing import Any

from etude.errors import MissingPackageError


def load_gepa() -> Any:
    """Return the package gepa, if it is installed."""
    try:
        import gepa
    except ImportError as error:
        raise MissingPackageError(
            f"This search is the package gepa, which cannot be imported here ({error}). Install it with: "
            "pip install 'etude[gepa]'"
        ) from error
    return gepa
