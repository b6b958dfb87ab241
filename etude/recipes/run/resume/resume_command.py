"""The command that continues a run, for its last words and for the page of the run."""

from __future__ import annotations

from etude.agents.agent import is_importable
from etude.config.env import etude_command


def describe_resume(recipe: str, directory: str, agent: str | None, *, has_store: bool) -> str:
    """Return a sentence that tells how to continue a run.

    directory: as the user would type it. agent: the name of its agent. has_store: its rollouts are in a store of their
    own, which needs a key.
    """
    if agent is not None and not is_importable(agent):
        return f"Go on by running the program again: `fit` with the directory {directory}."
    key = "ETUDE_STORE_KEY=… " if has_store else ""
    return f"Go on with: {key}{etude_command()} {recipe} --resume {directory}"
