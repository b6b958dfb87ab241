"""Rules across options, beside the option: it has an effect only with some values of another one.

metric: Annotated[str, OnlyWith("collect.refill", bool, "needs `collect.refill`. Leave it out.")] = Field(…)

A mark on a section is for all its options. Of several marks on one field, the error names the first that forbids it. A
mark may also name an option of the same section, such as `.refill`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from pydantic import BaseModel

from etude.config.tree import read_default
from etude.errors import ConfigError


@dataclass(frozen=True)
class OnlyWith:
    """Marks an option that another one must allow to differ from its default."""

    option: str
    """The dotted path of the other option, or of a property: from the root, or with a first dot in the same section."""
    allows: Callable[[Any], bool]
    """Returns whether the option has an effect with this value of the other one."""
    otherwise: str
    """The rest of the sentence that begins with the option and its value; `{other}` is the other one's value, and
    `{section}` the path of the option's section."""


def idle_options(root: BaseModel, sections: Collection[str] = ()) -> Iterator[ConfigError]:
    """Yield a problem for each option that differs from its default and has no effect.

    sections: the names of those to check; all, if there are none.
    """
    for path, section, name in _fields(root, ""):
        field = type(section).model_fields[name]
        value = getattr(section, name)
        if value == read_default(field) or (sections and path.partition(".")[0] not in sections):
            continue
        for mark in (one for one in field.metadata if isinstance(one, OnlyWith)):
            is_beside = mark.option.startswith(".")
            other = attrgetter(mark.option.removeprefix("."))(section if is_beside else root)
            if not mark.allows(other):
                sentence = mark.otherwise.format(other=other, section=path.rpartition(".")[0])
                yield ConfigError(f"`{_shown(path, value)}` {sentence}")
                break


def _shown(path: str, value: object) -> str:
    """Return an option with its value, or the name of a section."""
    if isinstance(value, BaseModel):
        return path
    return f"{path}={str(value).lower() if isinstance(value, bool) else value}"


def _fields(options: BaseModel, prefix: str) -> Iterator[tuple[str, BaseModel, str]]:
    """Yield each field of a tree: its dotted path, its section, and its name there."""
    for name in type(options).model_fields:
        value = getattr(options, name)
        yield f"{prefix}{name}", options, name
        below = {f"{name}.{key}": item for key, item in value.items()} if isinstance(value, Mapping) else {name: value}
        for path, item in below.items():
            if isinstance(item, BaseModel):
                yield from _fields(item, f"{prefix}{path}.")
