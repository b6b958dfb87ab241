"""The options of a run as a list, and the fields that no option may be: untyped, or without a description."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, MutableSequence, MutableSet, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from etude.config.choice import Choice, options_of
from etude.config.show import own_value
from etude.config.tree import describe_type, find_section_class, iter_fields, iter_possible_fields

_CONTAINERS = (dict, list, tuple, set, frozenset, Mapping, MutableMapping, Sequence, MutableSequence, Set, MutableSet)


@dataclass(frozen=True)
class OptionDescription:
    """One option of a run."""

    path: str
    """The dotted path, as in an override."""
    type: str
    """The accepted values, in words."""
    default: Any
    """The default; for a choice, its name. `REQUIRED` if there is none."""
    meaning: str
    """The description."""


def list_options(root_or_run: BaseModel | type[BaseModel]) -> list[OptionDescription]:
    """List the options of a composed run, or of a class with its defaults. A choice is an option, and so are its
    fields."""
    kind = root_or_run if isinstance(root_or_run, type) else type(root_or_run)
    run = None if isinstance(root_or_run, type) else root_or_run
    return [
        OptionDescription(
            entry.path,
            describe_type(entry.field.annotation, entry.field.metadata),
            own_value(entry, entry.default),
            entry.field.description or "",
        )
        for entry in iter_fields(kind, run, None)
        if not entry.is_section
    ]


def list_option_paths(root: type[BaseModel]) -> set[str]:
    """Return the distinct paths of options over all choices; the items of a list or mapping do not count."""
    return {path for path, field in iter_possible_fields(root) if "*" not in path and not _holds_fields(field)}


def find_untyped_fields(root: type[BaseModel]) -> list[str]:
    """List the fields that accept anything: `Any`, a bare container, or a section that allows unknown keys."""
    untyped = {
        path for path, field in iter_possible_fields(root) if any(map(_is_untyped, (field.annotation, *field.metadata)))
    }
    return sorted({*untyped, root.__name__} if _is_untyped(root) else untyped)


def find_undocumented_fields(root: type[BaseModel]) -> list[str]:
    """List the fields without a description."""
    return sorted({path for path, field in iter_possible_fields(root) if not field.description})


def _holds_fields(field: FieldInfo) -> bool:
    return options_of(field.annotation, field.metadata) is None and find_section_class(field.annotation) is not None


def _is_untyped(annotation: Any) -> bool:
    """Return True if a type, or a type within it, accepts anything."""
    if isinstance(annotation, Choice):
        return any(map(_is_untyped, annotation.table.values()))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation.model_config.get("extra") == "allow"
    kind, arguments = get_origin(annotation) or annotation, get_args(annotation)
    if annotation is Any or annotation is object or (not arguments and any(kind is bare for bare in _CONTAINERS)):
        return True
    return kind is not Literal and any(_is_untyped(argument) for argument in arguments if argument is not Ellipsis)
