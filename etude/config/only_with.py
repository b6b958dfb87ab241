"""Rules across options, beside the option: it has an effect only with some values of another one.

metric: Annotated[str, OnlyWith("collect.refill", bool, "needs `collect.refill`. Leave it out.")] = Field(…)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from etude.errors import ConfigError


@dataclass(frozen=True)
class OnlyWith:
    """Marks an option that another one must allow to differ from its default."""

    option: str
    """The dotted path of the other option, from the root."""
    allows: Callable[[Any], bool]
    """Returns whether the option has an effect with this value of the other one."""
    otherwise: str
    """The rest of the sentence that begins with the option and its value; `{other}` is the other one's value."""


def idle_options(root: BaseModel) -> Iterator[ConfigError]:
    """Yield a problem for each option that differs from its default and has no effect."""
    for path, section, name in _fields(root, ""):
        field = type(section).model_fields[name]
        value = getattr(section, name)
        for mark in (one for one in field.metadata if isinstance(one, OnlyWith)):
            other: Any = root
            for part in mark.option.split("."):
                other = getattr(other, part)
            if value != field.default and not mark.allows(other):
                shown = str(value).lower() if isinstance(value, bool) else value
                yield ConfigError(f"`{path}={shown}` {mark.otherwise.format(other=other)}")


def _fields(options: BaseModel, prefix: str) -> Iterator[tuple[str, BaseModel, str]]:
    """Yield each field of a tree: its dotted path, its section, and its name there."""
    for name in type(options).model_fields:
        value = getattr(options, name)
        yield f"{prefix}{name}", options, name
        if isinstance(value, BaseModel):
            yield from _fields(value, f"{prefix}{name}.")
