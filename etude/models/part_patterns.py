"""Patterns by which options name parts of a model: any stretch of a dotted name, with `*` for anything."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from etude.errors import ConfigError

_MAX_LISTED = 12


def matches_part(part: str, name: str) -> bool:
    """Return true if `part` matches the name of a weight, or of a module that contains it.

    `layers.0`, `mlp` and `layers.*.mlp` all match `model.layers.0.mlp.up_proj`.
    """
    return fnmatchcase(f".{name}.", f"*.{part}.*")


def refuse_unmatched(option: str, parts: Sequence[str], names: Iterable[str]) -> None:
    """Refuse the first part that the model does not have, and list the names that it has, all layers as one."""
    weight_names = list(names)
    for part in parts:
        if not any(matches_part(part, name) for name in weight_names):
            patterns = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in weight_names))
            rest = f" … {len(patterns)} in all" if len(patterns) > _MAX_LISTED else ""
            listed = ", ".join(patterns[:_MAX_LISTED]) + rest
            raise ConfigError(
                f"`{option}` names `{part}`, and this model has no such part. It has {listed}. Give any stretch of "
                f"these names, with `*` for anything."
            )
