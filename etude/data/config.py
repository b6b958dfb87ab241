"""What a run is told of its data."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from etude.config import Choice, Config
from etude.data.dataset import DatasetColumns, OverlongHandling
from etude.data.sampler import SAMPLERS, Sampler, ShuffledSampler

__all__ = ["DataConfig", "DataFiles"]


class DataFiles(Config):
    """Which files a run learns from, and which it is only ever scored on."""

    train: tuple[str, ...] = Field(
        (), description="files to learn from, `module:Name`, or names on the hub; several are joined in order"
    )
    val: tuple[str, ...] = Field((), description="the same for evaluation; empty evaluates nothing")

    @field_validator("train", "val", mode="before")
    @classmethod
    def _wrap_single_value(cls, files: Any) -> Any:
        """One file may stand without brackets."""
        return (files,) if isinstance(files, str) else files


class DataConfig(DataFiles):
    """Where tasks come from, and in which order they are asked."""

    columns: DatasetColumns = Field(DatasetColumns(), description="which columns of the files mean what")
    max_prompt_length: int = Field(
        1024, ge=1, description="longest prompt in tokens, the chat template's own among them"
    )
    overlong: OverlongHandling = Field("filter", description="longer prompts: leave out, cut at the beginning, or stop")
    sampler: Annotated[Sampler, Choice(SAMPLERS)] = Field(
        ShuffledSampler(), description="in which order rows are asked"
    )

    def truncate(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the ids that are sent: with `overlong: truncate`, at most the last `max_prompt_length` of them."""
        return ids[-self.max_prompt_length :] if self.overlong == "truncate" else ids
