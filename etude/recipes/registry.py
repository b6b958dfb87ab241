"""The recipes, by their commands."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import yaml

from etude.config.compose import compose
from etude.errors import ConfigError, RunError
from etude.recipes.recipe import Recipe
from etude.recipes.run.config import Run
from etude.recipes.run.directory import read_recipe_name
from etude.recipes.supervised.config import SupervisedRun
from etude.recipes.supervised.runs import DistillRun, DPORun, RewardModelRun, SFTRun

R = TypeVar("R", bound=Recipe)

SUPERVISED: dict[str, type[SupervisedRun]] = {
    "sft": SFTRun,
    "dpo": DPORun,
    "reward-model": RewardModelRun,
    "distill": DistillRun,
}
"""The recipes that train on examples."""
RECIPES: dict[str, type[Recipe]] = {"train": Run, **SUPERVISED}
"""All recipes."""


def compose_run(kind: type[R], overrides: Sequence[str], file: Path | None = None, preset: Path | None = None) -> R:
    """Compose the run of a command line. A file of another command is refused as a whole, and not key by key."""
    if file is not None and file.is_file():
        expected, written = kind.model_fields["recipe"].default, _recipe_in(file)
        if written not in (None, expected):
            raise ConfigError(
                f"{file} holds options of `etude {written}`, and this is `etude {expected}`: give it there."
            )
    return compose(kind, overrides, file=file, preset=preset).with_preset(preset)


def read_recipe_class(directory: Path) -> type[Recipe]:
    """Return the recipe class of the run in a directory."""
    name = read_recipe_name(directory)
    if name not in RECIPES:
        raise RunError(
            f"{directory} holds a run of `etude {name}`, which this version does not have. It has {', '.join(RECIPES)}."
        )
    return RECIPES[name]


def _recipe_in(file: Path) -> object:
    """Return the recipe that a file names. Other errors in the file are reported when it is composed."""
    try:
        options = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return None
    return options.get("recipe") if isinstance(options, dict) else None
