"""The parts of a composition: Hydra nodes made from the classes' defaults, and overrides.

Every choice becomes a Hydra group at its dotted path (`kl.controller` is the group `kl/controller`). The group has one
node for each option that this composition may need: the default, or those that the overrides name. A node has the
option's name and its defaults, changed by the part of the user's file for that option.

So if the command line switches to another option, the file's settings of the old option are dropped. A plug-in is
imported here, before Hydra sees it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from etude.config.choice import NONE, ChoiceOptions, options_of
from etude.config.override import ParsedOverride
from etude.config.tree import (
    REQUIRED,
    escape_interpolations,
    find_section_class,
    iter_possible_fields,
    join_path,
    read_default,
    to_plain,
)
from etude.config.validation_errors import (
    ConfigLocation,
    make_section_error,
    make_unknown_key_error,
    merge_errors,
    prefix_error,
)
from etude.errors import ConfigError

ROOT = "run"
"""The name of the root node in Hydra."""

_ABSENT: Any = object()


class CompositionPlan:
    """The input of one composition: as a tree, and as Hydra's nodes and overrides."""

    nodes: dict[tuple[str, str], dict[str, Any]]
    """Hydra's nodes by group and name; the root's group is empty."""
    overrides: list[str]
    """The overrides for Hydra. A plain key is forced (`++`), so that Etude's own check reports an unknown key."""

    def __init__(
        self,
        root: type[BaseModel],
        parsed_overrides: Iterable[ParsedOverride],
        file_values: Mapping[str, Any],
        file: str = "",
    ) -> None:
        self.nodes = {}
        self._root = root
        self._file = file
        self._parsed_overrides = {override.path: override for override in parsed_overrides}
        self._problems: list[ConfigError] = []
        self._groups: dict[str, str] = {}
        body, defaults = self._build_section(root, None, "", "", file_values, None)
        self._add_node("", ROOT, body, defaults)
        if self._problems:
            raise merge_errors(self._problems)
        self._by_path = {self._find_path(override): override for override in self._parsed_overrides.values()}
        self.overrides = [self._groups.get(path, f"++{path}={o.text}") for path, o in self._by_path.items()]

    def build_tree(self) -> dict[str, Any]:
        """Return the tree before overrides: the root's node, with the first node of each choice in its place."""
        return self._expand_node("", ROOT)

    def iter_values(self) -> Iterator[tuple[str, Any]]:
        """Iterate over the paths and values of overrides; those that name a choice are in the tree already."""
        for path, override in self._by_path.items():
            if path not in self._groups:
                yield path, override.values[0]

    def _expand_node(self, group: str, name: str) -> dict[str, Any]:
        node = self.nodes[group, name]
        tree = {key: value for key, value in node.items() if key != "defaults"}
        for entry in node["defaults"][1:]:
            ((child, chosen),) = entry.items()
            *parents, leaf = child.split("/")
            parent = tree
            for part in parents:
                parent[part] = parent = dict(parent[part])
            parent[leaf] = self._expand_node(f"{group}/{child}".lstrip("/"), chosen)
        return tree

    def _find_path(self, override: ParsedOverride) -> str:
        """Return the path that an override sets; `loss.name=…` is the same as `loss=…`."""
        for path in (override.path, override.path.removesuffix(".name")):
            if path in self._groups:
                return path
        # A choice in a mapping is no group. If overrides set its options too, its name is set beside them.
        has_options = any(path.startswith(f"{override.path}.") for path in self._parsed_overrides)
        names_choice = has_options and override.values and all(isinstance(value, str) for value in override.values)
        return join_path(override.path, "name") if names_choice else override.path

    def _build_section(
        self,
        kind: type[BaseModel],
        value: BaseModel | None,
        path: str,
        group_path: str,
        file_values: Mapping[str, Any],
        options: ChoiceOptions | None,
    ) -> tuple[dict[str, Any], list[Any]]:
        """Build the body and the defaults list of an object. Its fields come from the file, `value` or the class.

        The defaults list names groups relative to `group_path`, the group of the surrounding node.
        """
        self._refuse_unknown(kind, path, file_values, options)
        body: dict[str, Any] = {}
        defaults: list[Any] = []
        for name, field in kind.model_fields.items():
            assert name != "defaults", f"{kind.__qualname__} has a field `defaults`, which is a reserved word of Hydra"
            here, set_to = join_path(path, name), file_values.get(name, _ABSENT)
            default = getattr(value, name) if value is not None else read_default(field)
            choice, inner = options_of(field.annotation, field.metadata), find_section_class(field.annotation)
            if choice is not None:
                group = here.removeprefix(f"{group_path}.").replace(".", "/")
                defaults.append({group: self._add_choice(choice, default, here, set_to)})
            elif inner is not None and (override := self._single_value(here)):
                self._problems.append(make_section_error(here, field, inner, override.values[0]))
            elif inner is not None and (isinstance(set_to, Mapping) or (set_to is _ABSENT and default is not None)):
                start = default if isinstance(default, BaseModel) else None
                fields = {} if set_to is _ABSENT else set_to
                body[name], below = self._build_section(inner, start, here, group_path, fields, None)
                defaults += below
            elif isinstance(default if set_to is _ABSENT else set_to, Mapping) and self._is_given_a_list(here):
                continue  # for validation to explain
            elif isinstance(set_to, Mapping):
                lower = {} if self._is_replaced(here) else set_to
                body[name] = {
                    key: item for key, item in lower.items() if join_path(here, str(key)) not in self._parsed_overrides
                }
            elif set_to is not _ABSENT:
                body[name] = set_to
            elif default is not REQUIRED:
                body[name] = (
                    {}
                    if self._is_replaced(here)
                    else escape_interpolations(to_plain(default, field.annotation, field.metadata))
                )
        return body, defaults

    def _add_choice(self, options: ChoiceOptions, default: Any, path: str, set_to: Any) -> str:
        """Store the nodes that a choice may need, and return the name of the first one."""
        group = path.replace(".", "/")
        fields = dict(set_to) if isinstance(set_to, Mapping) else {}
        chosen = fields.pop("name", _ABSENT) if isinstance(set_to, Mapping) else set_to
        fallback = f"default-{len(self.nodes)}"
        try:
            start = None
            if chosen is not _ABSENT:
                default_name = options.validate_name(chosen)
            elif default is not REQUIRED:
                default_name, start = options.name_of(default), default
            else:
                default_name = ""
            names = self._requested_names(options, path)
            for name in names:
                node = self._build_option(options, name, None, path, fields if name == default_name else {})
                self._add_node(group, name, *node)
            if names:
                if fields and default_name not in names and (unused := options.resolve(default_name)):
                    self._refuse_unknown(unused, path, fields, options)
                self._groups[path] = f"{group}={','.join(names)}"
                return names[0]
            node = self._build_option(options, default_name, start, path, fields) if default_name else (fields, [])
            self._add_node(group, fallback, *node)
        except ConfigError as error:
            self._problems.append(prefix_error(error, path))
        return fallback

    def _requested_names(self, options: ChoiceOptions, path: str) -> list[str]:
        """Return the options that overrides name for a choice: `loss=gspo`, `loss.name=gspo`, or a sweep."""
        named = [o for o in self._parsed_overrides.values() if o.path in {path, join_path(path, "name")}]
        if not named:
            return []
        if not named[-1].values:
            raise ConfigError(
                f"{named[-1].text} does not name the choices one by one. The choices are {options.listing}."
            )
        return [options.validate_name(value) for value in named[-1].values]

    def _build_option(
        self, options: ChoiceOptions, name: str, start: BaseModel | None, path: str, fields: Mapping[str, Any]
    ) -> tuple[dict[str, Any], list[Any]]:
        """Build the body and the defaults list of one option of a choice."""
        kind = options.resolve(name) if start is None else type(start)
        if kind is None:
            return {"name": NONE, **fields}, []
        body, defaults = self._build_section(kind, start, path, path, fields, options)
        return {"name": name, **body}, defaults

    def _add_node(self, group: str, name: str, body: dict[str, Any], defaults: list[Any]) -> None:
        node = {"defaults": ["_self_", *defaults], **body}
        if self.nodes.setdefault((group, name), node) != node:
            path = group.replace("/", ".")
            raise ConfigError(
                f"'{name}' has different meanings under the swept choices above it. Sweep over {path} separately."
            )

    def _refuse_unknown(
        self, kind: type[BaseModel], path: str, file_values: Mapping[str, Any], options: ChoiceOptions | None
    ) -> None:
        """Record an error for each key of the user's file that the class does not have."""
        location = ConfigLocation(path, kind, [], None, kind, path, options)
        for key in (str(key) for key in file_values if key not in kind.model_fields):
            candidates = [known for known, _ in iter_possible_fields(self._root) if "*" not in known]
            error = make_unknown_key_error(self._root, join_path(path, key), location, candidates, file_values[key])
            self._problems.append(type(error)(f"{error} It is set in {self._file}."))

    def _single_value(self, path: str) -> ParsedOverride | None:
        """Return an override that gives a section a list, or a single value beside overrides of its options."""
        override = self._parsed_overrides.get(path)
        value = None if override is None else next(iter(override.values), None)
        has_options = any(other.startswith(f"{path}.") for other in self._parsed_overrides)
        return override if isinstance(value, list) or (has_options and isinstance(value, str | int | float)) else None

    def _is_given_a_list(self, path: str) -> bool:
        """Return True if an override sets a list, which Hydra would not merge with a mapping."""
        return path in self._parsed_overrides and any(
            isinstance(value, list) for value in self._parsed_overrides[path].values
        )

    def _is_replaced(self, path: str) -> bool:
        """Return True if an override sets a whole mapping; Hydra would merge it with the default."""
        return path in self._parsed_overrides and any(
            isinstance(value, dict) for value in self._parsed_overrides[path].values
        )
