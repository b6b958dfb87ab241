"""Instruction following: prompts with constraints that a program can check (IFEval, Zhou et al., arXiv 2311.07911)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

import pyarrow as pa
from pydantic import Field

from etude.data.prepare.base import PromptPreparation, Row
from etude.data.prepare.raw import RawFilePreparation, require_text
from etude.errors import DataError


class InstructionPreparation(RawFilePreparation, PromptPreparation):
    """IFEval's rows. The ground truth is JSON text, because rows have different constraints.

    `instruction_id_list` names the constraints, and `kwargs` has the arguments of each, in the same order.
    """

    prompt: str = Field("{question}", description="text of the prompt; {question} is the prompt with its constraints")

    title: ClassVar[str] = "instructions"
    reward_name: ClassVar[str] = "instructions"
    published_name: ClassVar[str] = "google/IFEval"
    ability: ClassVar[str] = "instruction following"
    extra_info_fields: ClassVar[Mapping[str, pa.DataType]] = {"key": pa.string()}

    def convert_row(self, values: Mapping[str, Any], where: str) -> Row | str:
        question = require_text(values, "prompt", where)
        names, kwargs_list = values.get("instruction_id_list"), values.get("kwargs")
        if not isinstance(names, list) or not isinstance(kwargs_list, list) or not _is_valid(names, kwargs_list):
            raise DataError(
                f"{where} should name its constraints in `instruction_id_list` and have a mapping of arguments for "
                f"each in `kwargs`; it has {names!r} and {kwargs_list!r}. Give the published files."
            )
        if not question:
            return "the prompt is empty"
        if not names:
            return "it has no constraint"
        given_kwargs = [{key: value for key, value in kwargs.items() if value is not None} for kwargs in kwargs_list]
        truth = json.dumps({"instruction_id_list": names, "kwargs": given_kwargs}, ensure_ascii=False, sort_keys=True)
        return self.make_row(truth, {"key": str(values.get("key", ""))}, question=question)


def _is_valid(names: list[Any], kwargs_list: list[Any]) -> bool:
    """Return True for a list of names and a mapping for each name."""
    named = all(isinstance(name, str) for name in names)
    return named and len(names) == len(kwargs_list) and all(isinstance(kwargs, dict) for kwargs in kwargs_list)
