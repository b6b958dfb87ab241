"""Print a run: as text with each option's description, as a plain tree, or as YAML that composes back to it."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, MutableSequence, MutableSet, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

import yaml  # type: ignore[import-untyped]  # OmegaConf brings it, and its stubs are a package of their own
from omegaconf import OmegaConf
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from rich.text import Text

from etude.config.choice import Choice, options_of
from etude.config.secrets import find_secret_key, mask
from etude.config.tree import (
    REQUIRED,
    ConfigField,
    describe_type,
    escape_interpolations,
    find_section_class,
    iter_fields,
    iter_possible_fields,
    to_plain,
    to_tree,
)

__all__ = [
    "OptionDescription",
    "find_undocumented_fields",
    "find_untyped_fields",
    "format_config",
    "list_option_paths",
    "list_options",
    "render_config",
    "to_tree",
    "to_yaml",
]

_WIDEST = 44
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


def format_config(run: BaseModel) -> str:
    """Return the run as text, one option a line: value, description, choices, and the default if it differs."""
    return render_config(run).plain


def render_config(run: BaseModel) -> Text:
    """Return the text of `format_config`, colored for a terminal."""
    lines = [(entry, _format_assignment(entry), _format_remark(entry)) for entry in iter_fields(type(run), run, None)]
    width = min(_WIDEST, max((len(left) for _, left, _ in lines), default=0))
    text = Text()
    for entry, left, remark in lines:
        text.append(left.ljust(width) if remark else left, style="bold" if _is_changed(entry) else "")
        text.append(f"  # {remark}" if remark else "", style="dim")
        text.append("\n")
    return text


NEXT_LINE = "\x85"
"""A line break for YAML readers, which OmegaConf's writer does not escape; a quoted string escapes it."""


def to_yaml(run: BaseModel, *, masked: bool = True) -> str:
    """Return the run as YAML that `compose(file=…)` reads; `masked` replaces its secrets by `***`."""
    tree = to_tree(run)
    composed = OmegaConf.create(escape_interpolations(mask(tree) if masked else tree))
    text = OmegaConf.to_yaml(composed)
    if NEXT_LINE not in text:
        return text
    return str(yaml.safe_dump(OmegaConf.to_container(composed), default_style='"', sort_keys=False))


def list_options(root_or_run: BaseModel | type[BaseModel]) -> list[OptionDescription]:
    """List the options of a composed run, or of a class with its defaults. A choice is an option, and so are its
    fields."""
    kind = root_or_run if isinstance(root_or_run, type) else type(root_or_run)
    run = None if isinstance(root_or_run, type) else root_or_run
    return [
        OptionDescription(
            entry.path,
            describe_type(entry.field.annotation, entry.field.metadata),
            _own_value(entry, entry.default),
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


def _is_changed(entry: ConfigField) -> bool:
    return bool(_own_value(entry, entry.value) != _own_value(entry, entry.default))


def _own_value(entry: ConfigField, value: Any) -> Any:
    """Return a field's own value as plain data: the name of a choice, None for a section."""
    if value is REQUIRED:
        return REQUIRED
    if entry.options is not None:
        return entry.options.name_of(value)
    return None if entry.is_section else to_plain(value, entry.field.annotation, entry.field.metadata)


def _format_assignment(entry: ConfigField) -> str:
    *parents, name = entry.path.split(".")
    value = (
        ""
        if entry.is_section
        else f" {_format_value(mask(_own_value(entry, entry.value), find_secret_key(entry.path)))}"
    )
    return f"{'  ' * len(parents)}{name}:{value}"


def _format_remark(entry: ConfigField) -> str:
    remarks = [entry.field.description or ""]
    if entry.options is not None:
        remarks.append(f"[{' | '.join(entry.options.names)}]")
    if _is_changed(entry):
        default = _own_value(entry, entry.default)
        shown = (
            "required"
            if default is REQUIRED
            else f"default: {_format_value(mask(default, find_secret_key(entry.path)))}"
        )
        remarks.append(f"({shown})")
    return " ".join(filter(None, remarks))


def _format_value(value: Any) -> str:
    """Return a plain value on one line, as in YAML."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_format_value(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_format_value, value))}]"
    if isinstance(value, str):
        return value if value and value == value.strip() and "\n" not in value else repr(value)
    return (
        {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else str(value)
    )


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
