"""Print a run: as text with each option's description, as a plain tree, or as YAML that composes back to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml
from omegaconf import OmegaConf
from pydantic import BaseModel
from rich.text import Text

from etude.config.secrets import find_secret_key, mask
from etude.config.tree import REQUIRED, ConfigField, escape_interpolations, iter_fields, to_plain, to_tree

_WIDEST = 44


def render_config(run: BaseModel) -> Text:
    """Return the run as text, one option a line: value, description, choices, and the default if it differs.

    The text has the colors of a terminal; its `plain` has none.
    """
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


def _is_changed(entry: ConfigField) -> bool:
    return bool(own_value(entry, entry.value) != own_value(entry, entry.default))


def own_value(entry: ConfigField, value: Any) -> Any:
    """Return a field's own value as plain data: the name of a choice, None for a section."""
    if value is REQUIRED:
        return REQUIRED
    if entry.options is not None:
        return entry.options.name_of(value)
    return None if entry.is_section else to_plain(value, entry.field.annotation, entry.field.metadata)


def _format_assignment(entry: ConfigField) -> str:
    *parents, name = entry.path.split(".")
    value = "" if entry.is_section else f" {_format_own(entry, entry.value)}"
    return f"{'  ' * len(parents)}{name}:{value}"


def _format_remark(entry: ConfigField) -> str:
    remarks = [entry.field.description or ""]
    if entry.options is not None:
        remarks.append(f"[{' | '.join(entry.options.names)}]")
    if _is_changed(entry):
        is_required = entry.default is REQUIRED
        remarks.append("(required)" if is_required else f"(default: {_format_own(entry, entry.default)})")
    return " ".join(filter(None, remarks))


def _format_own(entry: ConfigField, value: Any) -> str:
    return _format_value(mask(own_value(entry, value), find_secret_key(entry.path)))


def _format_value(value: Any) -> str:
    """Return a plain value on one line, as in YAML."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_format_value(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_format_value, value))}]"
    if isinstance(value, str):
        return value if value and value == value.strip() and "\n" not in value else repr(value)
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
