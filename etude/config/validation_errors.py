"""Validation problems as sentences: the option, the given value, the rule, and the remedy.

pydantic finds the problems of a tree. This file turns all of them into one error with a sentence for each, and adds the
field's description. The message of a custom validator is kept as written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from etude.config.choice import ChoiceOptions, options_of
from etude.config.foreign_names import answer_foreign_names, iter_leaf_paths
from etude.config.secrets import find_secret_key, mask, mask_text
from etude.config.suggestions import count_slips
from etude.config.tree import describe_type, find_item_type, find_section_class, join_path, to_plain
from etude.errors import ConfigError, PluginError, UnknownChoiceError, UnknownKeyError

_RULES = {
    "greater_than_equal": "at least {ge}",
    "greater_than": "greater than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "multiple_of": "a multiple of {multiple_of}",
    "finite_number": "a finite number",
    "too_short": "a list of at least {min_length} entries",
    "too_long": "a list of at most {max_length} entries",
    "string_too_short": "text of at least {min_length} characters",
    "string_too_long": "text of at most {max_length} characters",
    "string_pattern_mismatch": "text that matches {pattern}",
}
_MOST_SLIPS, _LONG_NAME = 2, 12
"""The most slips of the pen in a name of so many letters; a shorter name has one. More is another name."""
_NAME_OF_WORDS = 5
"""Letters of a name that one slip does not make another word."""
_MOST_LISTED = 20
_LONGEST = 80


@dataclass(frozen=True)
class ConfigLocation:
    """A position in a configuration tree."""

    path: str
    """The dotted path from the root; empty for the root."""
    annotation: Any
    """The expected type."""
    metadata: list[Any]
    """The metadata of the annotation."""
    field: FieldInfo | None
    """The field at this position, or around it; None for the root, and for an unknown key."""
    owner: type[BaseModel]
    """The class that has the field, or should have it."""
    owner_path: str
    """The path of the object of that class."""
    options: ChoiceOptions | None
    """The choice that selected that class."""

    @property
    def holds_fields(self) -> bool:
        """True if the position has an object with fields, not a single value."""
        options = options_of(self.annotation, self.metadata)
        return self.field is None or options is not None or find_section_class(self.annotation) is not None


def to_config_error(
    root: type[BaseModel],
    error: ValidationError,
    tree: Any,
    *,
    title: str = "",
    origins: Mapping[str, str] | None = None,
) -> ConfigError:
    """Return one error for all problems of a tree; `origins` has the file that set a path."""
    errors: dict[str, ConfigError] = {}
    for details in error.errors(include_url=False):
        location = _locate(root, details, tree)
        sentence = _explain(root, details, location, tree)
        origin = (origins or {}).get(location.path)
        if origin:
            sentence = type(sentence)(f"{str(sentence).removesuffix('.')}. It is set in {origin}.")
        # A union reports once for each member; a broken rule tells more than the wrong types of the others.
        identity = str(sentence) if location.holds_fields else location.path
        if identity not in errors or details["type"] in _RULES:
            errors[identity] = sentence
    return merge_errors(list(errors.values()), title)


def merge_errors(problems: list[ConfigError], title: str = "") -> ConfigError:
    """Merge several errors into one with a sentence for each, with masked secrets."""
    start = f"{title}: " if title else ""
    sentences = [mask_text(str(problem), yaml=False) for problem in problems]
    if len(sentences) == 1:
        return type(problems[0])(start + sentences[0])
    kinds = {type(problem) for problem in problems}
    kind = kinds.pop() if len(kinds) == 1 else ConfigError
    listed = "\n".join(f"- {sentence}" for sentence in sentences)
    merged = kind(f"{start}There are {len(sentences)} problems.\n{listed}")
    merged.problems = tuple(problems)
    return merged


def prefix_error(error: ConfigError, path: str) -> ConfigError:
    """Return the same error with a path in front of its message."""
    return type(error)(f"{path}: {error}")


def make_unknown_key_error(
    root: type[BaseModel], path: str, location: ConfigLocation, candidates: Iterable[str], value: Any = None
) -> UnknownKeyError:
    """Return the error for an unknown key: Etude's name for it, the choice that has it, or the nearest names."""
    candidates = set(candidates)
    parent, _, leaf = path.rpartition(".")
    if path in candidates and parent != location.owner_path:
        return UnknownKeyError(f"{path} is one name with dots here. Write {leaf} under {parent}, indented.")
    own_paths = [join_path(location.owner_path, name) for name in location.owner.model_fields]
    in_section = bool(parent) and parent == location.owner_path and location.options is None
    if in_section and (slip := _find_one_slip(path, own_paths)):
        return UnknownKeyError(f"{path} is not an option. Did you mean {slip}?")
    if sentences := answer_foreign_names(root, path, value, candidates):
        return UnknownKeyError(" ".join(sentences))
    here, kind = location.owner_path, location.owner
    table = {} if location.options is None else location.options.table
    sentence, siblings = f"{path} is not an option.", list[str]()
    if table:
        chosen = next((name for name, option in table.items() if option is kind), kind.__name__)
        sentence = f"{path} is not an option of {here}={chosen}."
        siblings = [f"{here}={name}" for name, option in table.items() if leaf in option.model_fields]
    if siblings:
        sentence += f" It belongs to {_join_with_or(siblings)}."
    below = [] if location.options is not None else [key.removeprefix(path) for key in iter_leaf_paths(path, value)]
    near = _find_closest_paths(path, own_paths, ()) or _find_closest_paths(
        path, candidates if not siblings else (), below
    )
    if near:
        return UnknownKeyError(f"{sentence} Did you mean {_join_with_or(near)}?")
    if not here and len(own_paths) > _MOST_LISTED:
        return UnknownKeyError(f"{sentence} No option has a name like it: `etude config show` prints all.")
    return UnknownKeyError(f"{sentence} The options there are {', '.join(own_paths) or 'none'}.")


def iter_known_paths(kind: type[BaseModel], node: Any, path: str = "") -> Iterator[str]:
    """Iterate over the dotted paths that can be set in a tree with its current choices."""
    for name, field in kind.model_fields.items():
        here, below = join_path(path, name), _child(node, name)
        yield here
        inner = _class_at(field.annotation, field.metadata, below)
        if inner is not None and below is not None:
            yield from iter_known_paths(inner, below, here)


def _locate(root: type[BaseModel], details: ErrorDetails, tree: Any) -> ConfigLocation:
    """Follow pydantic's location of an error; it contains names of union members, which are skipped."""
    location = ConfigLocation("", root, [], None, root, "", None)
    node, steps = tree, details["loc"]
    for index, part in enumerate(steps):
        kind = _class_at(location.annotation, location.metadata, node)
        here = join_path(location.path, str(part))
        if kind is not None:
            field = kind.model_fields.get(str(part))
            options = options_of(location.annotation, location.metadata)
            if field is not None:
                location = ConfigLocation(here, field.annotation, field.metadata, field, kind, location.path, options)
            elif details["type"] == "extra_forbidden" and index == len(steps) - 1:
                location = ConfigLocation(here, Any, [], None, kind, location.path, options)
        elif _child(node, part) is not None or (isinstance(node, Mapping) and part in node):
            item = find_item_type(location.annotation, part if isinstance(part, int) else 0)
            location = ConfigLocation(
                here, item, [], location.field, location.owner, location.owner_path, location.options
            )
        else:
            continue
        node = _child(node, part)
    return location


def _class_at(annotation: Any, metadata: list[Any], node: Any) -> type[BaseModel] | None:
    """Return the class whose fields a node has; None for single values, and if the class is unknown."""
    options = options_of(annotation, metadata)
    if isinstance(node, BaseModel):
        return type(node)
    if options is None:
        return find_section_class(annotation)
    name = node.get("name") if isinstance(node, Mapping) else node
    try:
        return options.resolve(name) if isinstance(name, str) else None
    except ConfigError:
        return None


def _child(node: Any, part: str | int) -> Any:
    if isinstance(node, BaseModel):
        return vars(node).get(str(part))
    if isinstance(node, Mapping):
        return node.get(part)
    if isinstance(node, list | tuple) and isinstance(part, int) and part < len(node):
        return node[part]
    return None


def _explain(root: type[BaseModel], details: ErrorDetails, location: ConfigLocation, tree: Any) -> ConfigError:
    kind, context = details["type"], details.get("ctx", {})
    if kind in {"value_error", "assertion_error"}:
        return _explain_validator_error(context["error"], location)
    if kind == "extra_forbidden" and location.field is None:
        return make_unknown_key_error(root, location.path, location, iter_known_paths(root, tree), details["input"])
    meaning = f" Its meaning: {location.field.description}" if location.field and location.field.description else ""
    expected = describe_type(location.annotation, location.metadata)
    if kind == "missing":
        return ConfigError(f"{location.path} needs a value and has none. Set {location.path} to {expected}.{meaning}")
    shown = _format_value(location.path, details["input"])
    if kind in _RULES:
        bounds = {name: f"{bound:g}" if isinstance(bound, float) else bound for name, bound in context.items()}
        rule = _RULES[kind].format(**bounds)
        return ConfigError(f"{location.path} must be {rule}; {shown} was given.{meaning}")
    section = find_section_class(location.annotation)
    if location.field is not None and location.annotation is location.field.annotation and section is not None:
        return make_section_error(location.path, location.field, section, details["input"])
    is_section = isinstance(details["input"], Mapping) and location.path in root.model_fields
    if is_section and (sentences := answer_foreign_names(root, location.path, details["input"], ())):
        return UnknownKeyError(" ".join(sentences))
    remedy = ""
    if "text" in expected and isinstance(details["input"], int | float):
        remedy = f" To give it as text, quote it twice: '{location.path}=\"{shown}\"'."
    return ConfigError(f"{location.path or 'The run'} expects {expected}; {shown} was given.{remedy}{meaning}")


def make_section_error(path: str, field: FieldInfo, section: type[BaseModel], value: Any) -> ConfigError:
    """Return the error for a single value at a section: the options there, and one that takes the value."""
    plain = to_plain(value)
    takes = next((name for name in section.model_fields if plain is not None and _accepts(section, name, plain)), None)
    example = "" if takes is None else _format_override(join_path(path, takes), plain)
    return ConfigError(
        f"{path} is a section with the options {', '.join(section.model_fields)}; {_format_value(path, value)} was "
        f"given. Set these options one by one{f', such as `{example}`' if example else ''}."
        f"{f' Its meaning: {field.description}' if field.description else ''}"
    )


def _format_override(path: str, value: Any) -> str:
    shown = mask(value, find_secret_key(path))
    text = f"[{','.join(map(str, shown))}]" if isinstance(shown, list) else str(shown)
    return f"{path}={text}"


def _accepts(section: type[BaseModel], name: str, value: Any) -> bool:
    try:
        section.__pydantic_validator__.validate_python({name: value})
    except ValidationError as error:
        return all(details["loc"][:1] != (name,) for details in error.errors(include_url=False))
    return True


def _explain_validator_error(error: Exception, location: ConfigLocation) -> ConfigError:
    """Return a custom validator's sentence. A value's validator does not know the path, so the path is put in front."""
    if isinstance(error, UnknownChoiceError | PluginError | UnknownKeyError):
        return prefix_error(error, location.path)
    if isinstance(error, ConfigError):
        return error
    return ConfigError(str(error)) if location.holds_fields else prefix_error(ConfigError(str(error)), location.path)


def _format_value(path: str, value: Any) -> str:
    """Return a value for an error message: shortened, with masked secrets."""
    text = repr(mask(to_plain(value), find_secret_key(path)))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _find_one_slip(path: str, own_paths: Collection[str]) -> str:
    """Return the only option of the same section that is one letter from a long name; empty if there is none. A name
    of another program is rarely so near."""
    near = [own for own in own_paths if count_slips(path, own) == 1]
    return near[0] if len(near) == 1 and len(path.rpartition(".")[2]) >= _NAME_OF_WORDS else ""


def _find_closest_paths(path: str, candidates: Collection[str], below: Collection[str]) -> list[str]:
    """Return up to three candidates that a path is a slip of the pen for, by the whole path or by the last name.

    below: the ends of the names that are set in a section of that path; a candidate must have them all.
    """
    parent, _, last = path.rpartition(".")

    def slips(candidate: str) -> int:
        beside, _, name = candidate.rpartition(".")
        by_name = count_slips(last, name)
        # Under the same parent, the shared prefix tells nothing.
        return (
            by_name
            if parent == beside
            else min(by_name, count_slips(*(p.replace(".", "_") for p in (path, candidate))))
        )

    counts = {
        candidate: slips(candidate)
        for candidate in sorted(candidates)
        if all(f"{candidate}{end}" in candidates for end in below)
    }
    least = min(counts.values(), default=_MOST_SLIPS + 1)
    most = _MOST_SLIPS if len(last) >= _LONG_NAME else 1
    return [candidate for candidate, count in counts.items() if count == least <= most][:3]


def _join_with_or(names: list[str]) -> str:
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
