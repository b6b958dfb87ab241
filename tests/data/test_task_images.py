"""Images of data files become addresses in tasks, with their bytes beside them; errors name the row."""

from __future__ import annotations

import json
import re
import tracemalloc
from base64 import b64encode
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from etude.chat import ChatConfig, Tokenizer, find_images, message_from_dict
from etude.data import Dataset
from etude.data.task_images import TaskImages
from etude.errors import DataError
from etude.images import ImageRef, image_digest
from etude.images.addresses import image_address
from etude.launch import tasks_as_files
from etude.records import Task
from tests.vlms import make_vlm


def png(colour: str, width: int = 3) -> bytes:
    stream = BytesIO()
    Image.new("RGB", (width, 2), colour).save(stream, "PNG")
    return stream.getvalue()


def shown(content: bytes, width: int = 3) -> dict[str, Any]:
    """Return the part of a task's prompt that shows an image."""
    return {"type": "image_url", "image_url": {"url": address(content, width)}}


def address(content: bytes, width: int = 3) -> str:
    return image_address(ImageRef(image_digest(content), width, 2))


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


RED, BLUE = png("red"), png("blue", 5)
DATA_URL = "data:image/png;base64," + b64encode(RED).decode()
BOTH = {image_digest(RED): RED, image_digest(BLUE): BLUE}
USER: dict[str, Any] = {"role": "user", "content": "What is <image> beside <image>?"}
PLACED: dict[str, Any] = {
    "role": "user",
    "content": [text("What is "), shown(RED), text(" beside "), shown(BLUE, 5), text("?")],
}


def saved(path: Path, row: Mapping[str, Any]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text(json.dumps(row))
    else:
        pq.write_table(pa.Table.from_pylist([row]), path)
    return path


def first_task(data: Any, **options: Any) -> Task:
    return Dataset.load(data, **options).task(0, 0)


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"prompt": "<image>How many?", "images": ["a.png", 5]}, "has 5 among its images, which is no image"),
        ({"prompt": "<image>How many?", "images": []}, "has 1 places for images .* the number of its images is 0"),
    ],
)
def test_an_image_column_that_would_be_left_out_is_refused(row: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png("red"))
    with pytest.raises(DataError, match=sentence):
        TaskImages("Row 3", tmp_path).place(row["prompt"], row["images"])


def test_a_path_without_a_place_comes_before_the_first_text(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png("red"))
    messages, addresses = TaskImages("Row 3", tmp_path).place(
        [{"role": "user", "content": "How many?"}], ["a.png", None]
    )
    kinds = [part["type"] for part in messages[0]["content"]]
    assert kinds == ["image_url", "text"] and len(addresses) == 1
    caption = TaskImages("Row 3", tmp_path).place("How many?", "A photo of a cat")
    assert caption == ("How many?", "A photo of a cat")


def test_verls_places_get_the_images_of_the_column(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures/blue.png").write_bytes(BLUE)
    images: list[Any] = [{"bytes": RED, "path": "red.png"}, {"bytes": None, "path": "pictures/blue.png"}]
    task = first_task(saved(tmp_path / "a.parquet", {"prompt": [USER], "images": images}))
    assert task["prompt"] == [PLACED] and task.images == BOTH
    refs = [ImageRef(image_digest(RED), 3, 2), ImageRef(image_digest(BLUE), 5, 2)]
    assert find_images([message_from_dict(PLACED)]) == refs
    assert task["images"] == [address(RED), address(BLUE, 5)]
    lines = saved(tmp_path / "a.jsonl", {"prompt": [USER], "images": [DATA_URL, "pictures/blue.png"]})
    assert first_task(lines).fields == task.fields and first_task(lines).images == BOTH


def test_a_text_prompt_with_images_becomes_a_message() -> None:
    pillow = [Image.open(BytesIO(RED)), BLUE]
    task = first_task([{"prompt": USER["content"], "images": pillow}])
    assert [part["type"] for part in task["prompt"][0]["content"]] == [part["type"] for part in PLACED["content"]]
    assert image_digest(BLUE) in task.images and len(task.images) == 2
    assert first_task([{"prompt": "<image>?", "size": 3}])["prompt"] == "<image>?"


def test_images_without_places_come_before_the_text_of_the_user() -> None:
    """As TRL shows them."""
    messages = [{"role": "system", "content": "Look."}, {"role": "user", "content": "What?"}]
    task = first_task([{"prompt": messages, "image": {"bytes": RED, "path": None}}])
    assert task["prompt"] == [messages[0], {"role": "user", "content": [shown(RED), text("What?")]}]
    assert task["image"] == address(RED)


def test_parts_of_messages_are_images(tmp_path: Path) -> None:
    (tmp_path / "blue.png").write_bytes(BLUE)
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": DATA_URL, "detail": "low"}},
        {"type": "image", "image": {"bytes": None, "path": "blue.png"}, "text": None},
        {"type": "image"},
        text("?"),
    ]
    row = {"prompt": [{"role": "user", "content": parts}], "images": [DATA_URL]}
    task = first_task(saved(tmp_path / "a.jsonl", row))
    assert task["prompt"][0]["content"] == [shown(RED), shown(BLUE, 5), shown(RED), text("?")]


def test_other_columns_keep_their_texts_and_have_addresses_for_images() -> None:
    row = {"prompt": "2+2?", "image": "python:3.11", "extra_info": {"picture": DATA_URL, "path": "a.png"}}
    task = first_task([row], requires_prompt=False)
    assert task["image"] == "python:3.11" and task["prompt"] == "2+2?"
    assert task["extra_info"] == {"picture": address(RED), "path": "a.png"} and list(task.images.values()) == [RED]


@pytest.mark.parametrize(
    ("images", "says"),
    [
        (["../red.png"], "names the image `../red.png`, which is outside of"),
        (["link/red.png"], "names the image `link/red.png`, which is outside of"),
        (["/etc/passwd"], "names the image `/etc/passwd`, which is outside of"),
        (["none.png"], "names the image `none.png`, which cannot be read: No such file or directory. Put it there."),
        ([f"{'iVBOR' * 99}.png"], f"image `{'iVBOR' * 12}…`, which cannot be read: File name too long. Give its path"),
        (["https://a.example/red.png"], "and no data are fetched from addresses"),
        ([{"bytes": None, "path": None}], "an image without bytes and without a path"),
        (["text.png"], "The image `text.png` is no image but text: 'no image'. Send a whole PNG, JPEG, WebP or GIF."),
        (["data:image/png;base64,!"], "An image is a data URL whose data are not base64"),
        ([DATA_URL, DATA_URL], "has 1 places for images in its prompt, and the number of its images is 2"),
    ],
)
def test_an_error_names_the_row(images: list[Any], says: str, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "link").symlink_to(tmp_path)
    (data / "text.png").write_text("no image")
    (tmp_path / "red.png").write_bytes(RED)
    path = saved(data / "a.jsonl", {"prompt": [{"role": "user", "content": "<image>"}], "images": images})
    with pytest.raises(DataError, match=f"^{re.escape(str(path))}, row 0.*{says}"):
        Dataset.load(path)


def test_images_of_all_rows_are_checked_for_agents_also_where_the_first_row_has_none(tmp_path: Path) -> None:
    rows = [{"question": "Which?"}, {"prompt": [{"role": "user", "content": "<image>"}], "images": ["gone.png"]}]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = Dataset.load(str(tmp_path / "tasks.jsonl"), requires_prompt=False)
    with pytest.raises(DataError, match=r"row 1 names the image `gone\.png`, which cannot be read"):
        data.check_images()


def test_rows_without_a_file_name_no_paths() -> None:
    with pytest.raises(DataError, match=r"row 0 names the image `red\.png` by a path, and these data are no file"):
        Dataset.load([{"prompt": "<image>", "images": ["red.png"]}])


def test_the_length_of_a_prompt_counts_its_images() -> None:
    def parts(prompt: Any) -> Any:
        return np.zeros(len(prompt[0]["content"]), np.int32)

    rows = [
        {"prompt": "<image>", "images": [RED] * n} if n == 1 else {"prompt": "<image>" * n, "images": [RED] * n}
        for n in (1, 3)
    ]
    fitting, counts = Dataset.load(rows).filter_overlong(parts, 2, "filter")
    assert len(fitting) == 1 and counts.reduce()["longest_prompt"] == 3
    with pytest.raises(DataError, match="row 1 has a prompt with images that is too long, and images cannot be cut"):
        Dataset.load(rows).filter_overlong(parts, 2, "truncate")


def test_tasks_of_a_program_are_written_with_their_images(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": "<image>", "images": [Image.open(BytesIO(RED)), BLUE]}]
    (file,), text_of_file = tasks_as_files(rows, tmp_path / "tasks.jsonl")
    assert text_of_file is not None
    Path(file).write_text(text_of_file.replace("<image>", "<image><image>"))
    (pillow, given) = first_task(file)["images"]
    assert pillow.endswith(";3x2") and given == address(BLUE, 5)
    with pytest.raises(DataError, match=r"^Task 1 cannot be written as JSON: it holds a value of type bytes"):
        tasks_as_files([*rows, {"prompt": b"no image"}], tmp_path / "tasks.jsonl")


def test_an_image_that_the_model_does_not_take_names_its_row() -> None:
    directory = make_vlm("qwen3_vl")
    chat = ChatConfig().build_renderer(Tokenizer.load(directory), directory)
    file = BytesIO()
    Image.new("RGB", (1000, 2)).save(file, "PNG")
    rows = [{"prompt": [{"role": "user", "content": "<image>?"}], "images": [{"bytes": file.getvalue()}]}]
    with pytest.raises(DataError, match=r"row 0: An image of 1000 × 2 pixels is too long and thin"):
        Dataset.load(rows).filter_overlong(chat.prompt_ids, 100, "filter")


def test_prompts_are_measured_with_few_images_in_memory(tmp_path: Path) -> None:
    rows, size = 64, 200_000
    images = [[{"bytes": RED + bytes(size), "path": None}]] * rows
    pq.write_table(pa.table({"prompt": ["<image>"] * rows, "images": images}), tmp_path / "tasks.parquet")
    data = Dataset.load([tmp_path / "tasks.parquet"])
    tracemalloc.start()
    try:
        data.filter_overlong(lambda _: np.zeros(1, np.int32), 1, "filter")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < rows * size
