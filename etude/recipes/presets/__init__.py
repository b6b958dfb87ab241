"""Published recipes as files: the options of each paper, over Etude's defaults."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from etude.config.suggestions import suggest_name
from etude.errors import ConfigError, UnknownChoiceError

__all__ = ["PRESETS", "split_preset"]

PRESETS = {path.stem: path for path in sorted(Path(__file__).parent.glob("*.yaml"))}
"""The presets, by name."""


def split_preset(words: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Return the file of the preset that these words name, or None, and the other words."""
    names = [word for word in words if re.fullmatch(r"[\w-]+", word)]
    for before, name in pairwise(("", *words)):
        if name in names and re.fullmatch(r"\w+(\.\w+)+", before):
            raise ConfigError(f"`{before} {name}` are two words, and an option is one: `{before}={name}`.")
        if name in names and name not in PRESETS:
            raise UnknownChoiceError(
                f"There is no preset '{name}'.{suggest_name(name, PRESETS)} The presets are {', '.join(PRESETS)}; "
                "options are written key=value."
            )
    if len(names) > 1:
        raise ConfigError(f"A run starts from one preset, and {' and '.join(names)} were named. Keep one of them.")
    return PRESETS[names[0]] if names else None, [word for word in words if word not in names]
