"""Tables of options: their type, their default, their meaning."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from etude.config.choice import options_of
from etude.config.tree import REQUIRED, describe_type, find_section_class, join_path, read_default, to_plain
from tests.pages.text import cell

__all__ = ["COMMON", "HEAD", "common_options", "equal_options", "options", "row"]

HUGE = 2**62
"""From this size on, a bound is only that of the file format."""
COMMON = "Options of every one, with these defaults unless its own options state others:"
HEAD = "| option | takes | by default | meaning |\n|---|---|---|---|"


def options(kind: type[BaseModel], path: str, without: Collection[str] = (), held: BaseModel | None = None) -> str:
    """Return the fields of a class as a table of options below a path, empty if it has none. held: the default object,
    if its values differ from those of its class."""
    rows = [
        row(join_path(path, name), field, REQUIRED if held is None else getattr(held, name))
        for name, field in kind.model_fields.items()
        if name not in without and not _is_section(field)
    ]
    return "\n".join([HEAD, *rows]) if rows else ""


def common_options(kinds: Mapping[str, type[BaseModel]]) -> set[str]:
    """Return the options that all of several choices have."""
    return set.intersection(*(set(kind.model_fields) for kind in kinds.values())) if len(kinds) > 1 else set()


def equal_options(kind: type[BaseModel], other: type[BaseModel]) -> set[str]:
    """Return the options that two choices have with equal types, defaults and descriptions."""
    names = kind.model_fields.keys() & other.model_fields.keys()
    return {name for name in names if _facts(kind, name) == _facts(other, name)}


def _facts(kind: type[BaseModel], name: str) -> tuple[str, str, str | None]:
    """Return the type, the default and the description of an option."""
    field = kind.model_fields[name]
    return str(field.annotation), repr(read_default(field)), field.description


def row(path: str, field: FieldInfo, held: Any = REQUIRED) -> str:
    """Return one option as a row. held: its default, if that differs from its class."""
    choice = options_of(field.annotation, field.metadata)
    takes = "one of " + ", ".join(f"`{name}`" for name in choice.names) if choice else cell(_takes(field))
    return f"| `{path}` | {takes} | {_default(field, held)} | {cell(field.description or '')} |"


def _takes(field: FieldInfo) -> str:
    """Return the type in words, with the bounds."""
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    bounds = [(sign, getattr(mark, name, None)) for mark in field.metadata for name, sign in signs.items()]
    limits = [f"{sign} {bound:g}" for sign, bound in bounds if bound is not None and bound < HUGE]
    return describe_type(field.annotation) + (f", {' and '.join(limits)}" if limits else "")


def _default(field: FieldInfo, held: Any) -> str:
    value = read_default(field) if held is REQUIRED else held
    if value is REQUIRED:
        return "must be given"
    choice = options_of(field.annotation, field.metadata)
    if choice is not None:
        return f"`{choice.name_of(value)}`"
    return f"`{_spoken(to_plain(value, field.annotation, field.metadata))}`"


def _spoken(value: Any) -> str:
    """Return a plain value as an override writes it."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, list):
        return f"[{', '.join(map(_spoken, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_spoken(item)}" for key, item in value.items()) + "}"
    return f"{value:g}" if isinstance(value, float) else str(value) or "''"


def _is_section(field: FieldInfo) -> bool:
    return options_of(field.annotation, field.metadata) is None and find_section_class(field.annotation) is not None
