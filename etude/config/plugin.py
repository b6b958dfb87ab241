"""Plug-ins: `module:Name` instead of a name from a table, so that nobody forks Etude to add a choice."""

from __future__ import annotations

import importlib
import re
from difflib import get_close_matches
from typing import Any

from etude.errors import PlugInError

__all__ = ["load_plugin", "plugin_spec"]

_SPEC = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def load_plugin(spec: str, base: type | None) -> Any:
    """Import what `module:Name` names; where `base` is given it must be a subclass of it."""
    if not _SPEC.fullmatch(spec):
        raise PlugInError(
            f"The plug-in '{spec}' cannot be read. Write module:Name, for example my_package.losses:MyLoss."
        )
    module_name, _, name = spec.partition(":")
    found: Any = _import(spec, module_name)
    for part in name.split("."):
        if not hasattr(found, part):
            near = get_close_matches(part, [known for known in vars(found) if not known.startswith("_")])
            hint = f" Did you mean {' or '.join(near)}?" if near else " Check its spelling."
            raise PlugInError(f"The plug-in '{spec}' was asked for, and {module_name} has no {part}.{hint}")
        found = getattr(found, part)
    if base is not None and not (isinstance(found, type) and issubclass(found, base)):
        raise PlugInError(
            f"The plug-in '{spec}' must be a subclass of {base.__module__}.{base.__qualname__}, and it is not. "
            f"Derive it from {base.__qualname__}."
        )
    return found


def plugin_spec(kind: type) -> str:
    """The `module:Name` by which `load_plugin` finds a class."""
    return f"{kind.__module__}:{kind.__qualname__}"


def _import(spec: str, module_name: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except Exception as error:  # a plug-in's module may raise anything while it is imported
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent is not None and f"{module_name}.".startswith(f"{absent}."):
            raise PlugInError(
                f"The plug-in '{spec}' was asked for, and there is no module {absent}. "
                "Check its spelling, and that it is installed or on PYTHONPATH."
            ) from error
        raise PlugInError(
            f"The plug-in '{spec}' was asked for, and importing {module_name} raised {type(error).__name__}: {error}. "
            "Fix that module and try again."
        ) from error
