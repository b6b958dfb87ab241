"""The columns that the algorithm of a run reads: where each comes from, and those that the data brings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from etude.batch import OWN_NAMES
from etude.config.together import told_together
from etude.errors import ConfigError
from etude.recipes.run.roles import ENVIRONMENT_COLUMNS, MODEL_COLUMNS, ROLLOUT_COLUMNS

NAME = re.compile(r"[A-Za-z]\w*")
MADE_FIELDS = frozenset({"prompt", "ground_truth", "extra_info", "row"})
"""The fields that Etude itself gives a task: they may hide a column of the data with the same name."""


@told_together
def check_columns_provided(required: frozenset[str], batch_columns: Mapping[str, str]) -> Iterator[ConfigError]:
    """Refuse an algorithm that reads (`required`) a column which nothing provides."""
    provided = ROLLOUT_COLUMNS | MODEL_COLUMNS | ENVIRONMENT_COLUMNS | batch_columns.keys()
    for name in sorted(required - provided):
        if name in OWN_NAMES:
            yield ConfigError(
                f"This algorithm needs the column `{name}`, which nothing in a run computes. Choose another advantage, "
                "loss or KL: `etude config show` lists them."
            )
        else:
            yield ConfigError(
                f"This algorithm needs the column `{name}`, which nothing in a run computes. If the data has it, carry "
                f"it into the batch: `data.batch_columns.{name}=COLUMN`, where `COLUMN` is its name in the data. "
                "Otherwise choose another advantage, loss or KL."
            )


@told_together
def check_batch_columns(batch_columns: Mapping[str, str], required: frozenset[str]) -> Iterator[ConfigError]:
    """Refuse columns of the data whose name the batch cannot carry, and those that nothing reads.

    required: the columns that the algorithm reads.
    """
    for name, path in batch_columns.items():
        option = f"`data.batch_columns.{name}={path}`"
        if name in OWN_NAMES:
            yield ConfigError(
                f"{option} names a column of the batch `{name}`, and the batch has its own. Choose another name, "
                f"such as `data.batch_columns.task_{name}={path}`, and have the loss or the advantage read that."
            )
        elif not NAME.fullmatch(name):
            yield ConfigError(
                f"{option}: the name of a column of the batch begins with a letter, and has letters, digits and `_` "
                "alone. Choose such a name."
            )
        elif name not in required:
            yield ConfigError(
                f"{option} carries a column that neither the loss nor the advantage reads. Have `required_columns` of "
                "yours return its name too, or leave the option out."
            )
        if path in MADE_FIELDS:
            yield ConfigError(
                f"{option} reads the field `{path}`, which Etude gives each task itself. Give the data a column of "
                "another name, or name a column within it, such as `extra_info.level`."
            )
