"""The options of a run's data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from etude.config import Choice, Config
from etude.config.only_with import OnlyWith
from etude.config.resume_marks import MAY_CHANGE
from etude.data.dataset import DatasetColumns, OverlongHandling
from etude.data.files import with_source
from etude.data.sampler import SAMPLERS, Sampler, ShuffledSampler


def _listed(files: Any) -> Any:
    return (files,) if isinstance(files, str) else files


class DataFiles(Config):
    """The files that a run trains on, and the files for evaluation."""

    train: tuple[str, ...] = Field(
        (),
        description="training data: files, `module:Name`, or names on the hub; several are joined in order; "
        "`{maths: tasks.parquet, code: more.parquet}` names the data source of each file's rows",
    )
    val: Annotated[tuple[str, ...], MAY_CHANGE] = Field(
        (), description="data for evaluation, named like `train`; empty evaluates nothing"
    )

    @field_validator("train", "val", mode="before")
    @classmethod
    def _list_files(cls, files: Any) -> Any:
        """Accept one file without brackets, and files by the data source of their rows."""
        if isinstance(files, Mapping):
            listed = [(source, given) for source, names in files.items() for given in _listed(names)]
            return tuple(with_source(source, file) for source, file in listed)
        return _listed(files)


class DataConfig(DataFiles):
    """The source of the tasks, and their order."""

    columns: DatasetColumns = Field(DatasetColumns(), description="columns of the files with prompts and answers")
    batch_columns: Mapping[str, str] = Field(
        {},
        description="numbers of the data that your own loss or advantage reads, each under the name that it has there: "
        "`data.batch_columns.difficulty=extra_info.level`",
    )
    max_prompt_length: int = Field(
        1024,
        ge=1,
        description="most tokens of a prompt, with those of the chat template; larger admits more rows and uses more "
        "memory",
    )
    overlong: Annotated[
        OverlongHandling,
        OnlyWith(
            "has_agents",
            lambda has_agents: not has_agents,
            "does nothing where an agent plays: the agent writes the prompts, and shortens them. Leave it out.",
        ),
    ] = Field(
        "filter",
        description="longer prompts: `filter` leaves them out, `truncate` cuts their beginning, `error` stops the run",
    )
    sampler: Annotated[Sampler, Choice(SAMPLERS)] = Field(ShuffledSampler(), description="order of the rows")

    def truncate(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the ids to send: with `overlong=truncate` at most the last `max_prompt_length`, otherwise all."""
        return ids[-self.max_prompt_length :] if self.overlong == "truncate" else ids
