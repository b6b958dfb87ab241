"""GSM8K: grade-school mathematics problems (Cobbe et al., arXiv 2110.14168), from its Parquet or JSONL files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import pyarrow as pa
from pydantic import Field

from etude.data.prepare.base import PromptPreparation, Row
from etude.data.prepare.raw import RawFilePreparation, require_text

NUMBER = re.compile(r"-?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")


class Gsm8kPreparation(RawFilePreparation, PromptPreparation):
    """GSM8K's rows. A solution ends in `#### 42`, and that number, without separators, is the ground truth."""

    prompt: str = Field(
        '{question} Let\'s think step by step and output the final answer after "####".',
        description="text of the prompt; {question} is the problem",
    )

    title: ClassVar[str] = "gsm8k"
    reward_name: ClassVar[str] = "gsm8k"
    published_name: ClassVar[str] = "openai/gsm8k"
    extra_info_fields: ClassVar[Mapping[str, pa.DataType]] = {"question": pa.string(), "answer": pa.string()}

    def convert_row(self, values: Mapping[str, Any], where: str) -> Row | str:
        question, solution = require_text(values, "question", where), require_text(values, "answer", where)
        if not question:
            return "the question is empty"
        _, mark, truth = solution.rpartition("####")
        truth = truth.strip().replace(",", "").removeprefix("$")
        if not mark or not NUMBER.fullmatch(truth):
            return "the answer does not end in #### and a number"
        return self.make_row(truth, {"question": question, "answer": solution}, question=question)
