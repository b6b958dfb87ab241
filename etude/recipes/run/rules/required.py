"""The options that every run must have."""

from __future__ import annotations

from collections.abc import Iterator

from etude.errors import ConfigError
from etude.recipes.recipe import Recipe
from etude.recipes.run.config import Run

NO_MODEL = "A run needs a model: give a Hugging Face model directory with `model.path=…`."


def find_missing_options(run: Recipe) -> Iterator[ConfigError]:
    """Yield a problem for each option that a run must have, and lacks."""
    if run.model.path is None:
        yield ConfigError(NO_MODEL)
    if not run.data.train:
        rows = "tasks" if isinstance(run, Run) else "examples"
        yield ConfigError(f"A run needs {rows}: give files with `data.train=[{rows}.parquet]`.")
