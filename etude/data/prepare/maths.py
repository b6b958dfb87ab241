"""MATH: competition problems (Hendrycks et al., arXiv 2103.03874), from one JSON file each, Parquet or JSONL."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import pyarrow as pa
from pydantic import Field

from etude.data.prepare.base import PromptPreparation, Row
from etude.data.prepare.raw import RawFilePreparation, require_text

BOXED = re.compile(r"\\(?:boxed|fbox)(?:\s*(?=\{)|\s+)")


class MathPreparation(RawFilePreparation, PromptPreparation):
    """MATH's rows. The ground truth is the last `\\boxed{…}` of a solution; in MATH-500 it is a separate column."""

    prompt: str = Field(
        "{question} Let's think step by step and output the final answer within \\boxed{}.",
        description="text of the prompt; {question} is the problem",
    )
    levels: tuple[int, ...] = Field((), description="levels of the problems to use, from 1 to 5; empty is all")

    title: ClassVar[str] = "math"
    reward_name: ClassVar[str] = "math"
    published_name: ClassVar[str] = "DigitalLearningGmbH/MATH-lighteval"
    extra_info_fields: ClassVar[Mapping[str, pa.DataType]] = {
        "question": pa.string(),
        "answer": pa.string(),
        "level": pa.int64(),
        "type": pa.string(),
    }

    def convert_row(self, values: Mapping[str, Any], where: str) -> Row | str:
        question, solution = require_text(values, "problem", where), require_text(values, "solution", where)
        if not question:
            return "the problem is empty"
        level = re.search(r"[1-5]$", str(values.get("level", "")))
        if self.levels and (level is None or int(level[0]) not in self.levels):
            return f"its level is none of {', '.join(map(str, self.levels))}"
        truth = (
            require_text(values, "answer", where) if values.get("answer") is not None else extract_last_boxed(solution)
        )
        if not truth:
            return "the solution has no \\boxed answer"
        kind = values.get("type") or values.get("subject")
        extra_info = {"question": question, "answer": solution, "level": int(level[0]) if level else None, "type": kind}
        return self.make_row(truth, extra_info, question=question)


def extract_last_boxed(text: str) -> str:
    """Return the content of the last `\\boxed{…}`, with balanced braces, or of `\\boxed 2`; empty if there is none."""
    for match in reversed(list(BOXED.finditer(text))):
        rest = text[match.end() :].lstrip()
        if not rest.startswith("{"):
            return re.split(r"[\s$]", rest, maxsplit=1)[0].strip(".,")
        depth = 0
        for position, letter in enumerate(rest):
            escaped = rest[position - 1 : position] == "\\"
            depth += (letter == "{" and not escaped) - (letter == "}" and not escaped)
            if depth == 0:
                return rest[1:position].strip()
    return ""
