"""One override: a text of the command line, read by Hydra's own grammar (`loss=gspo`, `seed=range(1,4)`), or a value.

A program has values, not texts: `held` takes them as they are, so that no escape, quote or `${` in them is read.
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

__all__ = ["ParsedOverride", "make_override", "parse_override"]

_PARSER = OverridesParser.create()


@dataclass(frozen=True)
class ParsedOverride:
    """What one override asks for."""

    path: str
    """The dotted path it sets."""
    text: str
    """Its value as written."""
    values: list[Any]
    """Its value read; several for a sweep, none where they cannot be counted."""
    is_sweep: bool
    """Whether it asks for one job for each value."""

    @property
    def is_hydra(self) -> bool:
        """Whether it speaks of Hydra itself (`hydra.sweep.subdir=…`, `hydra/launcher=…`)."""
        return self.path.startswith("hydra.")


def parse_override(text: str, example: str) -> ParsedOverride:
    """Read one override; `example` is a key to show where it cannot be read."""
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
            f"The override {shown} adds or removes a part of the tree, and every part has its place. Write key=value."
        )
    return ParsedOverride(
        path=str(override.key_or_group).replace("/", "."),
        text=text.partition("=")[2],
        values=_read_values(override),
        is_sweep=override.is_sweep_override(),
    )


def make_override(path: str, value: Any) -> ParsedOverride:
    """The override that sets a path to a value of Python's, which stands for itself."""
    return ParsedOverride(
        path=path, text=repr(value), values=[escape_interpolations(_check_and_convert(path, value))], is_sweep=False
    )


def _check_and_convert(path: str, value: Any) -> Any:
    """A value as plain data; refused where an option can hold nothing of its type."""
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
    except HydraException:  # a continuous range or a pattern, whose values only a sweeper knows
        return []
