"""One override: a text of the command line in Hydra's grammar (`loss=gspo`, `seed=range(1,4)`), or a Python value.

`make_override` takes a Python value without parsing: escapes, quotes and `${` have no meaning in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, QuotedString
from hydra.errors import HydraException
from pydantic import BaseModel

from etude.config.secrets import mask_text
from etude.config.tree import escape_interpolations, to_plain
from etude.errors import ConfigError

_PARSER = OverridesParser.create()


@dataclass(frozen=True)
class ParsedOverride:
    """One parsed override."""

    path: str
    """The dotted path that it sets."""
    text: str
    """The value as written."""
    values: list[Any]
    """The parsed value; several for a sweep, none if a sweep's values cannot be listed."""
    is_sweep: bool
    """True if it asks for one job for each value."""

    @property
    def is_hydra(self) -> bool:
        """True for an option of Hydra itself (`hydra.sweep.subdir=…`, `hydra/launcher=…`)."""
        return self.path.startswith("hydra.")


def parse_override(text: str, example: str) -> ParsedOverride:
    """Parse one override; `example` is a key for the error message."""
    shown = mask_text(text)
    try:
        override = _PARSER.parse_override(text)
    except HydraException:
        raise ConfigError(
            f"The override {shown} cannot be read. Write key=value, for example {example}=…, "
            "and quote a value that holds spaces or any of = , : { } [ ] ( )."
        ) from None
    if not override.key_or_group:
        raise ConfigError(f"The override {shown} names no key. Write key=value, for example {example}=….")
    if override.package is not None or override.type is OverrideType.DEL:
        raise ConfigError(
            f"The override {shown} adds or removes a part of the tree, which is not allowed. Write key=value."
        )
    return ParsedOverride(
        path=str(override.key_or_group).replace("/", "."),
        text=text.partition("=")[2],
        values=_read_values(override),
        is_sweep=override.is_sweep_override(),
    )


def make_override(path: str, value: Any) -> ParsedOverride:
    """Return the override that sets a path to a Python value."""
    return ParsedOverride(
        path=path, text=repr(value), values=[escape_interpolations(_check_and_convert(path, value))], is_sweep=False
    )


def _check_and_convert(path: str, value: Any) -> Any:
    """Convert a value to plain data; refuse a type that no option can have."""
    if isinstance(value, Enum | Path | BaseModel):
        return to_plain(value)
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral | Real):  # numpy's too
        return int(value) if isinstance(value, Integral) else float(value)
    if isinstance(value, Mapping):
        return {to_plain(key): _check_and_convert(f"{path}.{key}", item) for key, item in value.items()}
    if isinstance(value, AbstractSet):
        return sorted(_check_and_convert(path, item) for item in value)
    if isinstance(value, list | tuple):
        return [_check_and_convert(path, item) for item in value]
    raise ConfigError(
        f"`{path}` was given a value of type {type(value).__name__}. An option is text, a number, True or False, None, "
        "a path, or a list or a mapping of those."
    )


def _read_values(override: Override) -> list[Any]:
    if not override.is_sweep_override():
        return [override.value()]
    try:
        return [value.text if isinstance(value, QuotedString) else value for value in override.sweep_iterator()]
    except HydraException:  # a continuous range or a pattern: only the sweeper knows its values
        return []
