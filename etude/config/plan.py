"""What a run is composed of: nodes made from the classes' defaults, and overrides; a sweep hands both to Hydra.

Every choice becomes a Hydra group at its dotted path (`kl.controller` is the group `kl/controller`), with one node for
each option that this composition may need: the default, or those the overrides name. A node holds the option's name and
its defaults, changed by the user's file where the file speaks of that option. So a choice that the command line
switches away from takes its part of the file with it, and a plug-in is imported here, before Hydra sees it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from etude.config.check import Place, placed, told_together, unknown_key
from etude.config.choice import NONE, Options, options_of
from etude.config.override import Asked
from etude.config.tree import REQUIRED, default_of, escaped, fields_within, join, model_of, plain
from etude.errors import ConfigError

__all__ = ["ROOT", "Plan"]

ROOT = "run"
"""The name under which Hydra finds the root node."""

_ABSENT: Any = object()


class Plan:
    """One composition made ready: as a tree, and in Hydra's terms."""

    nodes: dict[tuple[str, str], dict[str, Any]]
    """Hydra's nodes, by group and name; the root's group is empty."""
    overrides: list[str]
    """The overrides in Hydra's terms. A plain key is forced, so that a key nobody has is told by our check."""

    def __init__(self, root: type[BaseModel], asked: Iterable[Asked], given: Mapping[str, Any], file: str = "") -> None:
        self.nodes = {}
        self._root, self._file = root, file
        self._asked = {each.path: each for each in asked}
        self._problems: list[ConfigError] = []
        self._groups: dict[str, str] = {}
        body, defaults = self._section(root, None, "", "", given, None)
        self._store("", ROOT, body, defaults)
        if self._problems:
            raise told_together(self._problems)
        self.overrides = list(dict(map(self._in_hydras_terms, self._asked.values())).values())

    def tree(self) -> dict[str, Any]:
        """The tree before overrides: the root's node, with the node that each choice begins with in its place."""
        return self._whole("", ROOT)

    def values(self) -> Iterator[tuple[str, Any]]:
        """The overrides that set a value, each with its path; those that name a choice are in the tree already."""
        for path, asked in {self._place(asked): asked for asked in self._asked.values()}.items():
            if path not in self._groups:
                yield path, asked.values[0]

    def _whole(self, group: str, name: str) -> dict[str, Any]:
        node = self.nodes[group, name]
        whole = {key: value for key, value in node.items() if key != "defaults"}
        for entry in node["defaults"][1:]:
            ((inner, chosen),) = entry.items()
            *above, last = inner.split("/")
            at = whole
            for part in above:
                at[part] = at = dict(at[part])
            at[last] = self._whole(f"{group}/{inner}".lstrip("/"), chosen)
        return whole

    def _in_hydras_terms(self, asked: Asked) -> tuple[str, str]:
        """An override's path and its text."""
        path = self._place(asked)
        return path, self._groups.get(path, f"++{path}={asked.text}")

    def _place(self, asked: Asked) -> str:
        """The path that an override sets; `loss.name=…` is another way to write `loss=…`."""
        for path in (asked.path, asked.path.removesuffix(".name")):
            if path in self._groups:
                return path
        # A choice in a mapping is no group. Where options of it are asked for too, its name is set beside them.
        within = any(path.startswith(f"{asked.path}.") for path in self._asked)
        named = within and asked.values and all(isinstance(value, str) for value in asked.values)
        return join(asked.path, "name") if named else asked.path

    def _section(
        self,
        kind: type[BaseModel],
        value: BaseModel | None,
        path: str,
        group_path: str,
        given: Mapping[str, Any],
        options: Options | None,
    ) -> tuple[dict[str, Any], list[Any]]:
        """The body and the defaults list of an object: its fields as `value` or its class has them, or the file.

        The defaults list names groups relative to `group_path`, where the node that it stands in has its group.
        """
        self._refuse_unknown(kind, path, given, options)
        body: dict[str, Any] = {}
        defaults: list[Any] = []
        for name, field in kind.model_fields.items():
            assert name != "defaults", f"{kind.__qualname__} has a field called defaults, which is Hydra's word"
            here, set_to = join(path, name), given.get(name, _ABSENT)
            default = getattr(value, name) if value is not None else default_of(field)
            choice, inner = options_of(field.annotation, field.metadata), model_of(field.annotation)
            if choice is not None:
                group = here.removeprefix(f"{group_path}.").replace(".", "/")
                defaults.append({group: self._choose(choice, default, here, set_to)})
            elif inner is not None and (isinstance(set_to, Mapping) or (set_to is _ABSENT and default is not None)):
                start = default if isinstance(default, BaseModel) else None
                fields = {} if set_to is _ABSENT else set_to
                body[name], below = self._section(inner, start, here, group_path, fields, None)
                defaults += below
            elif isinstance(set_to, Mapping):
                kept = {} if self._replaced(here) else set_to
                body[name] = {key: held for key, held in kept.items() if join(here, str(key)) not in self._asked}
            elif set_to is not _ABSENT:
                body[name] = set_to
            elif default is not REQUIRED:
                body[name] = {} if self._replaced(here) else escaped(plain(default, field.annotation, field.metadata))
        return body, defaults

    def _choose(self, options: Options, default: Any, path: str, set_to: Any) -> str:
        """Store the nodes that a choice may need; returns the name of the one that stands when nothing overrides it."""
        group = path.replace(".", "/")
        fields = dict(set_to) if isinstance(set_to, Mapping) else {}
        chosen = fields.pop("name", _ABSENT) if isinstance(set_to, Mapping) else set_to
        fallback = f"default-{len(self.nodes)}"
        try:
            start = None
            if chosen is not _ABSENT:
                usual = options.named(chosen)
            elif default is not REQUIRED:
                usual, start = options.name_of(default), default
            else:
                usual = ""
            names = self._names(options, path)
            for name in names:
                node = self._option(options, name, None, path, fields if name == usual else {})
                self._store(group, name, *node)
            if names:
                if fields and usual not in names and (unused := options.resolve(usual)):
                    self._refuse_unknown(unused, path, fields, options)
                self._groups[path] = f"{group}={','.join(names)}"
                return names[0]
            node = self._option(options, usual, start, path, fields) if usual else (fields, [])
            self._store(group, fallback, *node)
        except ConfigError as error:
            self._problems.append(placed(error, path))
        return fallback

    def _names(self, options: Options, path: str) -> list[str]:
        """The options that overrides name for a choice, by `loss=gspo`, `loss.name=gspo` or a sweep over several."""
        asked = [each for each in self._asked.values() if each.path in {path, join(path, "name")}]
        if not asked:
            return []
        if not asked[-1].values:
            raise ConfigError(
                f"{asked[-1].text} does not name the choices one by one. The choices are {options.listed}."
            )
        return [options.named(value) for value in asked[-1].values]

    def _option(
        self, options: Options, name: str, start: BaseModel | None, path: str, fields: Mapping[str, Any]
    ) -> tuple[dict[str, Any], list[Any]]:
        """The body and defaults list of one option of a choice."""
        kind = options.resolve(name) if start is None else type(start)
        if kind is None:
            return {"name": NONE, **fields}, []
        body, defaults = self._section(kind, start, path, path, fields, options)
        return {"name": name, **body}, defaults

    def _store(self, group: str, name: str, body: dict[str, Any], defaults: list[Any]) -> None:
        node = {"defaults": ["_self_", *defaults], **body}
        if self.nodes.setdefault((group, name), node) != node:
            path = group.replace("/", ".")
            raise ConfigError(
                f"'{name}' means different things under the choices above it. Sweep over {path} apart from them."
            )

    def _refuse_unknown(
        self, kind: type[BaseModel], path: str, given: Mapping[str, Any], options: Options | None
    ) -> None:
        """Note the keys of the user's file that the class does not have."""
        place = Place(path, kind, [], None, kind, path, options)
        for key in (str(key) for key in given if key not in kind.model_fields):
            candidates = [known for known, _ in fields_within(self._root) if "*" not in known]
            error = unknown_key(self._root, join(path, key), place, candidates, given[key])
            self._problems.append(type(error)(f"{error} It is set in {self._file}."))

    def _replaced(self, path: str) -> bool:
        """Whether an override gives a whole mapping for a path; Hydra would merge it with the default."""
        return path in self._asked and any(isinstance(value, dict) for value in self._asked[path].values)
