"""Configuration: composed by Hydra, validated by pydantic, shown with its meaning.

A room that has options subclasses `Config`, and writes each default and each meaning once, in the class.
Where there is something to choose, `Choice` names what there is. The rest of the room works on any such tree:

    etude.config.compose    overrides, a file and defaults become one frozen object; sweeps become jobs
    etude.config.check      problems become sentences
    etude.config.show       the object becomes text, a tree, or YAML that composes back to it
    etude.config.secrets    what looks like a secret is masked, everywhere
    etude.config.env        the one reader of the process environment

Only the words needed to declare options are imported here; Hydra loads with `etude.config.compose`.
"""

from __future__ import annotations

from etude.config.choice import Choice
from etude.config.model import Config
from etude.config.plugin import load_named, load_plugin

__all__ = ["Choice", "Config", "load_named", "load_plugin"]
