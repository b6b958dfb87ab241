"""Configuration: composed by Hydra, validated by pydantic, shown with its meaning.

A room that has options subclasses `Config`, and writes each default and each meaning once, in the class.
Where there is something to choose, `Choice` names what there is. The rest of the room works on any such tree:

    etude.config.compose    overrides, a file and defaults become one frozen object; sweeps become jobs
    etude.config.validation_errors      problems become sentences
    etude.config.show       the object becomes text, a tree, or YAML that composes back to it
    etude.config.secrets    what looks like a secret is masked, everywhere
    etude.config.env        the one reader of the process environment

The words needed to declare options load when they are asked for, and Hydra with `etude.config.compose`: a process that
only reads its environment or finds a plug-in, as a runner does, loads neither pydantic nor Hydra.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etude.config.base import Config
    from etude.config.choice import Choice
    from etude.config.plugin import load_object, load_plugin

__all__ = ["Choice", "Config", "load_object", "load_plugin"]


def __getattr__(name: str) -> Any:
    """The public names, from the files they are in."""
    if name == "Choice":
        from etude.config.choice import Choice

        return Choice
    if name == "Config":
        from etude.config.base import Config

        return Config
    if name in ("load_object", "load_plugin"):
        from etude.config import plugin

        return getattr(plugin, name)
    raise AttributeError(f"module 'etude.config' has no attribute '{name}'")
