"""Show a run: as text with each field's meaning, as a plain tree, and as YAML that composes back to an equal run."""

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
from etude.config.secrets import mask, telling_name
from etude.config.tree import REQUIRED, Entry, entries, escaped, fields_within, model_of, plain, to_tree, words

__all__ = ["Leaf", "all_paths", "free_form", "leaves", "rendered", "show", "to_tree", "to_yaml", "undocumented"]

_WIDEST = 44
_CONTAINERS = (dict, list, tuple, set, frozenset, Mapping, MutableMapping, Sequence, MutableSequence, Set, MutableSet)


@dataclass(frozen=True)
class Leaf:
    """One option of a run."""

    path: str
    """Dotted path, as an override writes it."""
    type: str
    """What it accepts, in words."""
    default: Any
    """What it is when nothing is asked for; for a choice, the name. `REQUIRED` where it must be given."""
    meaning: str
    """Its description."""


def show(run: BaseModel) -> str:
    """The resolved run, one field a line: value, meaning, alternatives, and the default where it differs."""
    return rendered(run).plain


def rendered(run: BaseModel) -> Text:
    """What `show` says, coloured for a terminal."""
    lines = [(entry, _assignment(entry), _remark(entry)) for entry in entries(type(run), run, None)]
    width = min(_WIDEST, max((len(left) for _, left, _ in lines), default=0))
    text = Text()
    for entry, left, remark in lines:
        text.append(left.ljust(width) if remark else left, style="bold" if _is_changed(entry) else "")
        text.append(f"  # {remark}" if remark else "", style="dim")
        text.append("\n")
    return text


NEXT_LINE = "\x85"
"""A line break to YAML's readers, which OmegaConf's writer leaves as it is; in quotes it is spelled out."""


def to_yaml(run: BaseModel, *, masked: bool = True) -> str:
    """The run as YAML of the shape that `compose(file=…)` reads; with `masked` its secrets are shown as `***`."""
    tree = to_tree(run)
    composed = OmegaConf.create(escaped(mask(tree) if masked else tree))
    text = OmegaConf.to_yaml(composed)
    if NEXT_LINE not in text:
        return text
    return str(yaml.safe_dump(OmegaConf.to_container(composed), default_style='"', sort_keys=False))


def leaves(root_or_run: BaseModel | type[BaseModel]) -> list[Leaf]:
    """Every option of a composed run, or of a class by its defaults; a choice is one, its fields are others."""
    kind = root_or_run if isinstance(root_or_run, type) else type(root_or_run)
    run = None if isinstance(root_or_run, type) else root_or_run
    return [
        Leaf(
            entry.path,
            words(entry.field.annotation, entry.field.metadata),
            _named(entry, entry.default),
            entry.field.description or "",
        )
        for entry in entries(kind, run, None)
        if not entry.is_section
    ]


def all_paths(root: type[BaseModel]) -> set[str]:
    """The distinct paths of options over all choices; what a list or mapping holds counts with it."""
    return {path for path, field in fields_within(root) if "*" not in path and not _holds_fields(field)}


def free_form(root: type[BaseModel]) -> list[str]:
    """The fields that accept anything: `Any`, a bare container, or a section that allows keys it does not name."""
    found = {path for path, field in fields_within(root) if any(map(_is_free, (field.annotation, *field.metadata)))}
    return sorted({*found, root.__name__} if _is_free(root) else found)


def undocumented(root: type[BaseModel]) -> list[str]:
    """The fields that do not say what they mean."""
    return sorted({path for path, field in fields_within(root) if not field.description})


def _holds_fields(field: FieldInfo) -> bool:
    return options_of(field.annotation, field.metadata) is None and model_of(field.annotation) is not None


def _is_changed(entry: Entry) -> bool:
    return bool(_named(entry, entry.value) != _named(entry, entry.default))


def _named(entry: Entry, value: Any) -> Any:
    """A field's own value as plain data: of a choice the name alone, of a section nothing."""
    if value is REQUIRED:
        return REQUIRED
    if entry.options is not None:
        return entry.options.name_of(value)
    return None if entry.is_section else plain(value, entry.field.annotation, entry.field.metadata)


def _assignment(entry: Entry) -> str:
    *above, name = entry.path.split(".")
    value = "" if entry.is_section else f" {_spoken(mask(_named(entry, entry.value), telling_name(entry.path)))}"
    return f"{'  ' * len(above)}{name}:{value}"


def _remark(entry: Entry) -> str:
    remarks = [entry.field.description or ""]
    if entry.options is not None:
        remarks.append(f"[{' | '.join(entry.options.names)}]")
    if _is_changed(entry):
        default = _named(entry, entry.default)
        shown = "required" if default is REQUIRED else f"default: {_spoken(mask(default, telling_name(entry.path)))}"
        remarks.append(f"({shown})")
    return " ".join(filter(None, remarks))


def _spoken(value: Any) -> str:
    """A plain value on one line, as YAML would have it."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_spoken(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_spoken, value))}]"
    if isinstance(value, str):
        return value if value and value == value.strip() and "\n" not in value else repr(value)
    return (
        {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else str(value)
    )


def _is_free(annotation: Any) -> bool:
    """Whether a type, or one within it, says nothing of what it holds."""
    if isinstance(annotation, Choice):
        return any(map(_is_free, annotation.table.values()))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation.model_config.get("extra") == "allow"
    kind, arguments = get_origin(annotation) or annotation, get_args(annotation)
    if annotation is Any or annotation is object or (not arguments and any(kind is bare for bare in _CONTAINERS)):
        return True
    return kind is not Literal and any(_is_free(argument) for argument in arguments if argument is not Ellipsis)
