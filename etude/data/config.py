"""What a run is told of its data."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from etude.config import Choice, Config
from etude.data.dataset import Columns, Overlong
from etude.data.sampler import SAMPLERS, Sampler, Shuffled

__all__ = ["Data", "Files"]


class Files(Config):
    """Which files a run learns from, and which it is only ever scored on."""

    train: tuple[str, ...] = Field(
        (), description="files to learn from, `module:Name`, or names on the hub; several are joined in order"
    )
    val: tuple[str, ...] = Field((), description="the same for evaluation; empty evaluates nothing")

    @field_validator("train", "val", mode="before")
    @classmethod
    def _one_is_a_list(cls, files: Any) -> Any:
        """One file may stand without brackets."""
        return (files,) if isinstance(files, str) else files


class Data(Files):
    """Where tasks come from, and in which order they are asked."""

    columns: Columns = Field(Columns(), description="which columns of the files mean what")
    max_prompt: int = Field(1024, ge=1, description="longest prompt in tokens, the chat template's own among them")
    overlong: Overlong = Field("filter", description="longer prompts: leave out, cut at the beginning, or stop")
    sampler: Annotated[Sampler, Choice(SAMPLERS)] = Field(Shuffled(), description="in which order rows are asked")

    def cut(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """A prompt's ids as they are asked: where `overlong` is `truncate`, at most the last `max_prompt` of them."""
        return ids[-self.max_prompt :] if self.overlong == "truncate" else ids
