"""Configuration: composed by Hydra, validated by pydantic, printed with the meaning of each option.

A package with options subclasses `Config`, and writes each default and each description once, in the class. `Choice`
marks a field whose value is one of several classes. The other files work on any such tree:

    compose              defaults, files and overrides become one frozen object; a sweep becomes several jobs
    validation_errors    problems become sentences
    together             checks of several options tell all problems in one error
    show                 the object becomes text, a tree, or YAML that composes back to it
    secrets              secrets are masked in everything that is printed
    env                  the only reader of the process environment
    plugin               classes and functions by `module:Name` or `file.py:name`

Public names are imported when they are first read, and `compose` imports Hydra. A process that only reads its
environment or loads a plug-in, such as a runner, imports neither pydantic nor Hydra.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from etude.lazy import lazy_getattr

if TYPE_CHECKING:
    from etude.config.base import Config
    from etude.config.choice import Choice
    from etude.config.plugin import load_object, load_plugin

__all__ = ["Choice", "Config", "load_object", "load_plugin"]


__getattr__ = lazy_getattr(
    __name__, {"base": ("Config",), "choice": ("Choice",), "plugin": ("load_object", "load_plugin")}
)
