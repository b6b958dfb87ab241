"""GSM8K: problems of grade-school mathematics (Cobbe et al., arXiv 2110.14168), from its Parquet or JSONL files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import pyarrow as pa
from pydantic import Field

from etude.data.prepare.base import Asking, Row
from etude.data.prepare.raw import FromFiles, text_of

__all__ = ["Gsm8kTasks"]

NUMBER = re.compile(r"-?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")


class Gsm8kTasks(FromFiles, Asking):
    """Its solutions end in `#### 42`: that number, without separators, is the ground truth."""

    prompt: str = Field(
        '{question} Let\'s think step by step and output the final answer after "####".',
        description="what is asked; {question} is the problem",
    )

    title: ClassVar[str] = "gsm8k"
    published: ClassVar[str] = "openai/gsm8k"
    extra: ClassVar[Mapping[str, pa.DataType]] = {"question": pa.string(), "answer": pa.string()}

    @property
    def reward(self) -> str:
        return "gsm8k"

    def row(self, values: Mapping[str, Any], where: str) -> Row | str:
        question, solution = text_of(values, "question", where), text_of(values, "answer", where)
        if not question:
            return "the question is empty"
        _, mark, truth = solution.rpartition("####")
        truth = truth.strip().replace(",", "").removeprefix("$")
        if not mark or not NUMBER.fullmatch(truth):
            return "the answer does not end in #### and a number"
        return self.task(truth, {"question": question, "answer": solution}, question=question)
