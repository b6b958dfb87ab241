"""The options of a run beside their defaults, and the preset that they match. Plug-ins of a user are never imported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import yaml

from etude.config.compose import compose
from etude.config.tree import join_path, to_tree
from etude.errors import EtudeError
from etude.recipes.presets import PRESETS
from etude.recipes.registry import RECIPES
from etude.view.replies import Table


def compare_options(options: Mapping[str, Any], preset: str = "") -> Table:
    """Return each option with its value and its default, and whether the preset sets that value.

    An option of a choice has the default of that choice, and the choice itself that of the recipe.
    """
    values = dict(_leaves(options))
    recipe = str(options.get("recipe", "train"))
    named = {path: value for path, value in _defaults(recipe, ()).items() if path.endswith(".name")}
    defaults = _defaults(recipe, _choices(options)) | named
    from_preset = dict(_preset_leaves(preset)) if preset in PRESETS else {}
    return Table(
        {
            "option": list(values),
            "value": list(values.values()),
            "default": [defaults.get(path) for path in values],
            "is_default": [path in defaults and _equal(defaults[path], values[path]) for path in values],
            "from_preset": [path in from_preset and _equal(from_preset[path], values[path]) for path in values],
        }
    )


def find_preset(options: Mapping[str, Any]) -> str:
    """Return the preset whose options the run all has; of several, the one with the most. Empty if there is none."""
    values = dict(_leaves(options))
    matching = {
        name: len(leaves)
        for name in PRESETS
        if (leaves := _preset_leaves(name)) and all(_equal(values.get(path), value) for path, value in leaves)
    }
    return max(matching, key=lambda name: matching[name], default="")


def _choices(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the overrides that make the same choices, without those of a plug-in."""
    named = ((path.removesuffix(".name"), value) for path, value in _leaves(options) if path.endswith(".name"))
    return tuple(f"{path}={name}" for path, name in named if isinstance(name, str) and name.isidentifier())


@cache
def _defaults(recipe: str, choices: tuple[str, ...]) -> dict[str, Any]:
    """Return the default of each option, with these choices."""
    kind = RECIPES.get(recipe)
    if kind is None:
        return {}
    for overrides in (choices, ()):
        try:
            return dict(_leaves(to_tree(compose(kind, list(overrides)))))
        except EtudeError:  # a choice that needs another option, or that this version does not have
            continue
    return {}


@cache
def _preset_leaves(name: str) -> tuple[tuple[str, Any], ...]:
    """Return the options of a preset, without those that refer to another option."""
    tree = yaml.safe_load(PRESETS[name].read_text(encoding="utf-8")) or {}
    return tuple((path, value) for path, value in _leaves(tree) if "${" not in str(value))


def _leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        here = join_path(path, str(name))
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, here)
        else:
            yield here, value


def _equal(left: Any, right: Any) -> bool:
    """Compare two values of a tree; a file has lists where an object has tuples."""
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return [*left] == [*right]
    return bool(left == right)
