"""etude/tools/shell_completion/options.json: the options of all commands, read from the fields of their classes."""

from __future__ import annotations

import json
from argparse import ArgumentParser, _SubParsersAction
from collections.abc import Iterator, Mapping
from inspect import cleandoc
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml  # type: ignore[import-untyped]  # OmegaConf brings it, and its stubs are a package of their own
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from etude.cli import build_parser
from etude.config import load_plugin
from etude.config.choice import NONE, options_of
from etude.config.tree import find_section_class, join_path, read_default
from etude.recipes.presets import PRESETS
from etude.recipes.run_argument import READ_OPTIONS

__all__ = ["FILE_OPTIONS", "option_classes", "page"]

FILE_OPTIONS = frozenset({"data.train", "data.val", "reward.path"})
"""Options of type text that are file names."""


def page() -> str:
    """Return the options of each class, the presets, and the options of commands that do not use all; one a line."""
    merged: dict[str, dict[str, Any]] = {}
    for root in option_classes(build_parser()):
        kind = load_plugin(root, BaseModel)
        for option in _merge_options(_options(kind)):
            merged.setdefault(json.dumps(option), {**option, "classes": []})["classes"].append(kind.__name__)
    parts = {
        "presets": _object({name: _preset(path) for name, path in PRESETS.items()}),
        "read": _object({command: list(names) for command, names in READ_OPTIONS.items()}),
        "options": "[\n" + ",\n".join(map(_line, merged.values())) + "\n]",
    }
    return "{\n" + ",\n".join(f'"{name}": {text}' for name, text in parts.items()) + "\n}\n"


def _object(values: Mapping[str, Any]) -> str:
    return "{\n" + ",\n".join(f"{_line(key)}: {_line(value)}" for key, value in values.items()) + "\n}"


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def option_classes(parser: ArgumentParser) -> list[str]:
    """Return all classes whose fields are options of a command, as `module:Name`."""
    classes = list((parser.get_default("roots") or {}).values())
    for action in parser._actions:
        if isinstance(action, _SubParsersAction):
            classes += [root for inner in action.choices.values() for root in option_classes(inner)]
    return list(dict.fromkeys(classes))


def _preset(path: Path) -> dict[str, Any]:
    """Return a preset's description, and its choices."""
    text = path.read_text(encoding="utf-8")
    meaning = text.lstrip("# ").split(": ")[0].splitlines()[0]
    return {"meaning": meaning, "chosen": dict(_named_choices(yaml.safe_load(text) or {}))}


def _named_choices(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Iterate over possible choices in a file: the path and the name."""
    for key, value in tree.items():
        here = join_path(path, key)
        if isinstance(value, Mapping):
            yield from _named_choices(value, here)
        elif isinstance(value, str):
            yield (path, value) if key == "name" else (here, value)


def _options(kind: type[BaseModel], path: str = "", when: Mapping[str, str] | None = None) -> Iterator[dict[str, Any]]:
    """Iterate over the options of a class: values, description, and the choices that the option depends on."""
    for name, field in kind.model_fields.items():
        here, options = join_path(path, name), options_of(field.annotation, field.metadata)
        option = {"path": here, "meaning": field.description or "", "when": dict(when or {})}
        if options is not None:
            default = read_default(field)
            chosen = options.name_of(default) if default is None or isinstance(default, BaseModel) else ""
            values = [[choice, _first_line(choice_class)] for choice, choice_class in options.table.items()]
            none = [[NONE, "switch it off"]] if options.optional else []
            yield {**option, "values": values + none, "chosen": chosen}
            for choice, choice_class in options.table.items():
                yield from _options(choice_class, here, {**(when or {}), here: choice})
        elif (section := find_section_class(field.annotation)) is not None:
            yield from _options(section, here, when)
        else:
            yield {**option, **_describe_value(field, here)}


def _describe_value(field: FieldInfo, path: str) -> dict[str, Any]:
    """Describe the values of an option: fixed words, a path, or anything; and if it is a list."""
    kinds = list(_kinds(field.annotation))
    values = [word for kind in kinds for word in (get_args(kind) if get_origin(kind) is Literal else ())]
    values += ["true", "false"] if bool in kinds else []
    values += ["null"] if NoneType in kinds and values else []
    return {
        "values": [[str(word), ""] for word in values],
        "paths": path in FILE_OPTIONS or any(isinstance(kind, type) and issubclass(kind, Path) for kind in kinds),
        "list": any(get_origin(kind) in (tuple, list) for kind in _members(field.annotation)),
    }


def _members(annotation: Any) -> Iterator[Any]:
    """Iterate over the members of a union, without annotations."""
    if get_origin(annotation) is Annotated:
        yield from _members(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, UnionType):
        for inner in get_args(annotation):
            yield from _members(inner)
    else:
        yield annotation


def _kinds(annotation: Any) -> Iterator[Any]:
    """Iterate over the types of a value, or of a list's items."""
    for kind in _members(annotation):
        if get_origin(kind) in (tuple, list):
            yield from (member for inner in get_args(kind) if inner is not Ellipsis for member in _members(inner))
        else:
            yield kind


def _merge_options(options: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge options that several choices have into one, which depends on any of them."""
    merged: dict[str, dict[str, Any]] = {}
    for option in options:
        existing = merged.setdefault(option["path"], {**option, "when": []})
        if option["when"] not in existing["when"]:
            existing["when"].append(option["when"])
        existing["values"] += [value for value in option["values"] if value not in existing["values"]]
    return list(merged.values())


def _first_line(kind: type) -> str:
    return cleandoc(kind.__doc__ or "").split("\n")[0]
