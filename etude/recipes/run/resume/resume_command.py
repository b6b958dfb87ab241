"""The command that continues a run, for its last words and for the page of the run."""

from __future__ import annotations

from collections.abc import Iterable

from etude.agents.agent import is_importable
from etude.config.env import etude_command


def describe_resume(recipe: str, directory: str, agents: Iterable[str], *, has_store: bool) -> str:
    """Return a sentence that tells how to continue a run.

    directory: as the user would type it. agents: the names of its agents. has_store: its rollouts are in a store of
    their own, which needs a key.
    """
    if not all(map(is_importable, agents)):
        return f"Go on by running the program again: `fit` with the directory {directory}."
    key = "ETUDE_STORE_KEY=… " if has_store else ""
    return f"Go on with: {key}{etude_command()} {recipe} --resume {directory}"
