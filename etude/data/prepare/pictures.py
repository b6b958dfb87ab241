"""Questions about pictures: tables like CLEVR's counting tasks, GeoQA and Geometry3K, from Parquet or JSONL files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import pyarrow as pa
from pydantic import Field

from etude.data.prepare.base import PromptPreparation, Row
from etude.data.prepare.raw import RawFilePreparation, require_text
from etude.images import image_digest
from etude.images.addresses import DATA_URL, from_data_url

PLACE = "<image>"
"""The place of a picture in a prompt."""
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
IMAGES_TYPE = pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))


class PicturesPreparation(RawFilePreparation, PromptPreparation):
    """Rows with pictures. The ground truth is the text within `<answer>` of a solution, or the whole answer."""

    prompt: str = Field(
        "{question} Think step by step and output the final answer within \\boxed{}.",
        description="text of the prompt; {question} is the problem, after the places of its pictures",
    )

    title: ClassVar[str] = "pictures"
    reward_name: ClassVar[str] = "math"
    published_name: ClassVar[str] = "leonardPKU/clevr_cogen_a_train"
    extra_info_fields: ClassVar[Mapping[str, pa.DataType]] = {"question": pa.string(), "answer": pa.string()}

    def columns(self) -> dict[str, pa.DataType]:
        return {**super().columns(), "images": IMAGES_TYPE}

    def question_key(self, row: Row) -> str:
        pictures = [image_digest(image["bytes"]) for image in row["images"]]
        return f"{super().question_key(row)} {' '.join(pictures)}"

    def convert_row(self, values: Mapping[str, Any], where: str) -> Row | str:
        question = require_text(values, "question" if "question" in values else "problem", where)
        solution = require_text(values, "solution" if "solution" in values else "answer", where)
        column = values.get("images") or values.get("image") or []
        pictures = [_read_picture(picture) for picture in (column if isinstance(column, list) else [column])]
        contents = [picture for picture in pictures if picture is not None]
        if not contents or len(contents) < len(pictures):
            return "a picture is missing: the file has no bytes of it"
        places = question.count(PLACE)
        if places not in (0, len(contents)):
            return f"the number of `{PLACE}` in the question is not that of its pictures"
        found = ANSWER.search(solution)
        truth = (found[1] if found else solution).strip()
        if not question or not truth:
            return "the question or the answer is empty"
        shown = question if places else PLACE * len(contents) + question
        row = self.make_row(truth, {"question": question, "answer": solution}, question=shown)
        return row | {"images": [{"bytes": content, "path": None} for content in contents]}


def _read_picture(picture: Any) -> bytes | None:
    """Return the bytes of a picture as a row has it: a data URL, or a struct with one; None for any other value."""
    url = picture.get("bytes") if isinstance(picture, Mapping) else picture
    return from_data_url(url) if isinstance(url, str) and url.startswith(DATA_URL) else None
