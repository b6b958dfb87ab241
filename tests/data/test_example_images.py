"""Examples with images: their tokens, the places of their images, and their bytes, which are read when needed."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from etude.data.demonstrations import DemonstrationDataConfig
from etude.data.examples import Examples, SupervisedDataConfig
from etude.data.preferences import PreferenceDataConfig
from etude.errors import DataError
from etude.images import ImageSpan, cut_spans, image_digest
from etude.recipes.supervised.examples import read_batch
from tests.chat.conversations import by
from tests.chat.test_images import chat_of
from tests.vision_rows import png

RED = png((0, 50, 40))
BLUE = png((1, 30, 90))
FAMILY = "qwen3_vl"
PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
ASK = [by("user", "<image> How many?"), by("assistant", "two"), by("user", "And <image>?"), by("assistant", "six")]


def url(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def shown(content: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(content)}}


def words(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def load(directory: Path, row: dict[str, Any], data: SupervisedDataConfig | None = None) -> Examples:
    """Return the examples of a file with this row."""
    (directory / "rows.jsonl").write_text(json.dumps(row) + "\n")
    files = [str(directory / "rows.jsonl")]
    return (data or DemonstrationDataConfig()).load_examples("data.train", files, chat_of(FAMILY), 4096, max_images=2)


FORMS: dict[str, dict[str, Any]] = {
    "column": {"messages": ASK, "images": [url(RED), url(BLUE)]},
    "parts": {
        "messages": [
            {"role": "user", "content": [shown(RED), words(" How many?")]},
            ASK[1],
            {"role": "user", "content": [words("And "), shown(BLUE), words("?")]},
            ASK[3],
        ]
    },
    "paths": {"prompt": ASK[:1], "completion": ASK[1:], "images": ["red.png", "blue.png"]},
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_a_conversation_has_its_images(form: str, tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(RED)
    (tmp_path / "blue.png").write_bytes(BLUE)
    examples = load(tmp_path, FORMS[form])
    ((row,),) = examples[0]
    chat = chat_of(FAMILY)
    count = [
        sum(span.stop - span.start for span in row.images if span.digest == image_digest(each)) for each in (RED, BLUE)
    ]
    assert all(count) and int((row.ids == chat.tokenizer.token_to_id("<|image_pad|>")).sum()) == sum(count)
    pads = [PLACE.replace("<|image_pad|>", "<|image_pad|>" * number) for number in count]
    text = (
        f"<|im_start|>user\n{pads[0]} How many?<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>\n"
        f"<|im_start|>user\nAnd {pads[1]}?<|im_end|>\n<|im_start|>assistant\nsix<|im_end|>"
    )
    assert chat.tokenizer.decode(row.ids, keep_special_tokens=True) == text
    assert chat.tokenizer.decode(row.ids[row.action], keep_special_tokens=True) == "two<|im_end|>six<|im_end|>"
    batch = read_batch(examples, [0])
    assert {image.digest: image.read() for image in batch.images} == {image_digest(each): each for each in (RED, BLUE)}


def test_both_answers_of_a_pair_follow_the_images_of_the_prompt(tmp_path: Path) -> None:
    row = {"prompt": "How many? <image>", "chosen": "two", "rejected": "six", "image": url(RED)}
    (chosen,), (rejected,) = load(tmp_path, row, PreferenceDataConfig())[0]
    assert chosen.images == rejected.images and len(chosen.images) == 1
    assert np.array_equal(chosen.ids[~chosen.action], rejected.ids[~rejected.action])


def test_an_image_is_never_cut() -> None:
    spans = (ImageSpan("a", 2, 5), ImageSpan("a", 6, 9, 3), ImageSpan("b", 10, 12))
    assert cut_spans(spans, 12) == (12, spans)
    assert cut_spans(spans, 11) == (10, spans[:2]) == cut_spans(spans, 10)
    assert cut_spans(spans, 9) == (9, spans[:2])
    assert cut_spans(spans, 8) == (2, ()) == cut_spans(spans, 3)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "two", "image": url(RED)}, "rows.jsonl, row 0 has images in `image`, and `text` has no places for"),
        ({"messages": ASK, "images": [url(RED)]}, "row 0 has 2 places for images in its prompt, and the number"),
        ({"messages": ASK + ASK, "images": [url(RED)] * 4}, "row 0 has 4 images, and `vision.max_images` is 2"),
    ],
)
def test_images_that_cannot_be_learned_from_are_refused(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        load(tmp_path, row)


def test_a_file_that_has_changed_is_noticed_when_its_image_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(RED)
    examples = load(tmp_path, {"messages": ASK[:1] + ASK[1:2], "images": ["a.png"]})
    (tmp_path / "a.png").write_bytes(BLUE)
    (image,) = examples.images(0).values()
    with pytest.raises(DataError, match=r"Row 0 of data.train no longer has the image .*, which it had when the run"):
        image.read()
