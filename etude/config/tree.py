"""A configuration as a tree: fields by dotted path, values as plain data, types in words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from etude.config.choice import ChoiceOptions, options_of

M = TypeVar("M", bound=BaseModel)

REQUIRED = PydanticUndefined
"""The default of a field without a default."""

_TYPE_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    NoneType: "null",
    Any: "anything",
}


@dataclass(frozen=True)
class ConfigField:
    """One field of a configuration, with its path and its value."""

    path: str
    """The dotted path from the root."""
    field: FieldInfo
    """The declaration: annotation, description, constraints."""
    value: Any
    """The value; of a class, the default; `REQUIRED` if there is neither."""
    default: Any
    """The default."""
    options: ChoiceOptions | None
    """The choices, if the field is a choice."""

    @property
    def is_section(self) -> bool:
        """True if the field only groups other fields."""
        return self.options is None and self.kind is not None

    @property
    def kind(self) -> type[BaseModel] | None:
        """The class of the field's object; None for a single value."""
        if self.value is REQUIRED and self.options is None:
            return find_section_class(self.field.annotation)
        return type(self.value) if isinstance(self.value, BaseModel) else None


def join_path(path: str, name: str) -> str:
    """Return the dotted path of a name below a path."""
    return f"{path}.{name}" if path else name


def iter_paths(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Iterate over the paths of a plain tree, each with its value; a mapping has None, and its own paths follow."""
    for name, value in tree.items():
        here = join_path(path, str(name))
        yield here, None if isinstance(value, Mapping) else value
        if isinstance(value, Mapping):
            yield from iter_paths(value, here)


def read_default(field: FieldInfo) -> Any:
    """Return a field's default; `REQUIRED` if it has none."""
    return field.get_default(call_default_factory=True, validated_data={})


def find_section_class(annotation: Any) -> type[BaseModel] | None:
    """Return the class of a nested section, also of an optional one; None for other annotations."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    models = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
    return models[0] if len(models) == 1 and set(kinds) <= {models[0], NoneType} else None


def iter_fields(
    kind: type[BaseModel], value: BaseModel | None, default: BaseModel | None, path: str = ""
) -> Iterator[ConfigField]:
    """Iterate over the fields of a configuration in order; sections and choices come before their fields."""
    for name, field in kind.model_fields.items():
        standard = getattr(default, name) if default is not None else read_default(field)
        current = getattr(value, name) if value is not None else standard
        entry = ConfigField(
            join_path(path, name), field, current, standard, options_of(field.annotation, field.metadata)
        )
        yield entry
        if entry.kind is not None:
            inner = current if isinstance(current, BaseModel) else None
            yield from iter_fields(entry.kind, inner, standard if type(standard) is entry.kind else None, entry.path)


def iter_possible_fields(
    kind: type[BaseModel], path: str = "", above: tuple[type, ...] = ()
) -> Iterator[tuple[str, FieldInfo]]:
    """Iterate over the possible fields of a configuration over all its choices; items of a list or mapping are at
    `*`."""
    above = (*above, kind)
    for name, field in kind.model_fields.items():
        here = join_path(path, name)
        yield here, field
        for suffix, inner in _iter_models(field.annotation, field.metadata):
            if inner not in above:
                yield from iter_possible_fields(inner, here + suffix, above)


def _iter_models(
    annotation: Any, metadata: list[Any] | None = None, suffix: str = ""
) -> Iterator[tuple[str, type[BaseModel]]]:
    options = options_of(annotation, metadata or ())
    if options is not None:
        yield from ((suffix, kind) for kind in options.table.values())
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield suffix, annotation
    else:
        below = suffix if get_origin(annotation) in (Union, UnionType, Annotated) else ".*"
        for argument in get_args(annotation):
            yield from _iter_models(argument, suffix=below)


def to_plain(value: Any, annotation: Any = None, metadata: list[Any] | None = None) -> Any:
    """Return a value as plain data (numbers, text, lists, mappings), with the names of choices beside their fields."""
    options = options_of(annotation, metadata or ())
    if isinstance(value, BaseModel):
        fields = type(value).model_fields.items()
        tree = {name: to_plain(getattr(value, name), field.annotation, field.metadata) for name, field in fields}
        return {"name": options.name_of(value), **tree} if options is not None else tree
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {to_plain(key): to_plain(item, find_item_type(annotation)) for key, item in value.items()}
    if isinstance(value, AbstractSet):
        return sorted(to_plain(item) for item in value)
    if isinstance(value, list | tuple):
        return [to_plain(item, find_item_type(annotation, index)) for index, item in enumerate(value)]
    return str(value) if isinstance(value, Path) else value


def escape_interpolations(value: Any) -> Any:
    """Escape a plain value, so that OmegaConf finds no interpolation in it."""
    if isinstance(value, dict):
        return {key: escape_interpolations(item) for key, item in value.items()}
    if isinstance(value, list):
        return [escape_interpolations(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def to_tree(run: BaseModel) -> dict[str, Any]:
    """Return a configuration as a plain nested dictionary."""
    tree: dict[str, Any] = to_plain(run)
    return tree


def find_item_type(annotation: Any, index: int = 0) -> Any:
    """Return the annotation of the items of a list or mapping."""
    if get_origin(annotation) in (Union, UnionType):
        annotation = next(kind for kind in get_args(annotation) if kind is not NoneType)
    arguments = get_args(annotation)
    if get_origin(annotation) is tuple and Ellipsis not in arguments:
        return arguments[index] if index < len(arguments) else None
    is_mapping = isinstance(get_origin(annotation), type) and issubclass(get_origin(annotation), Mapping)
    return next(iter(arguments[1 if is_mapping else 0 :]), None)


def describe_type(annotation: Any, metadata: list[Any] | None = None) -> str:
    """A type in plain words."""
    options = options_of(annotation, metadata or ())
    origin, arguments = get_origin(annotation), get_args(annotation)
    if options is not None:
        return f"one of {options.listing}"
    if origin is Annotated:
        return describe_type(arguments[0])
    if origin is Literal:
        return f"one of {', '.join(map(repr, arguments))}"
    if origin in (Union, UnionType):
        return " or ".join(describe_type(kind) for kind in arguments)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return f"one of {', '.join(repr(member.value) for member in annotation)}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"a mapping of {', '.join(annotation.model_fields)}"
    return _TYPE_NAMES.get(annotation) or _describe_container(origin or annotation, arguments)


def _describe_container(origin: Any, arguments: tuple[Any, ...]) -> str:
    if not isinstance(origin, type):
        return str(origin)
    if issubclass(origin, Mapping):
        return f"a mapping (each value: {describe_type(arguments[1])})" if arguments else "a mapping"
    if issubclass(origin, tuple) and arguments and Ellipsis not in arguments:
        return f"a list of {len(arguments)} ({', '.join(map(describe_type, arguments))})"
    if issubclass(origin, list | tuple | AbstractSet):
        return f"a list (each: {describe_type(arguments[0])})" if arguments else "a list"
    return origin.__name__


def replace_option(options: M, path: str, value: Any) -> M:
    """Return the same options with another value at a dotted path."""
    name, _, rest = path.partition(".")
    return options.model_copy(update={name: replace_option(getattr(options, name), rest, value) if rest else value})
