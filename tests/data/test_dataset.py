"""Rows become tasks: verl's and TRL's columns as they are, renamed columns, and prompts that are too long."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from etude.data import DataConfig, Dataset, DatasetColumns
from etude.data.prompts import check_prompt
from etude.errors import ConfigError, DataError

VERL: dict[str, Any] = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "2+2?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"split": "train", "index": 0},
}


def letters(prompt: str | Sequence[Mapping[str, Any]]) -> NDArray[np.int32]:
    """Return one id for each letter, and one for each message."""
    if isinstance(prompt, str):
        return np.arange(len(prompt), dtype=np.int32)
    return np.arange(sum(1 + len(message["content"]) for message in prompt), dtype=np.int32)


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_verls_columns_are_read(form: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{form}"
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist([VERL]), path)
    else:
        path.write_text(json.dumps(VERL))
    task = Dataset.load(path).task(0, 7)
    assert (task.ordinal, task.source) == (7, "openai/gsm8k")
    assert task.fields == VERL | {"ground_truth": "4", "row": 0}


@pytest.mark.parametrize("answer", ["answer", "solution", "ground_truth"])
def test_trls_columns_are_read(answer: str) -> None:
    row = {"prompt": "2+2?", answer: "4", "level": 3}
    task = Dataset.load([row]).task(0, 0)
    assert task.fields == row | {"ground_truth": "4", "extra_info": {}, "row": 0}
    assert task.source == ""


def test_a_prompt_alone_is_enough() -> None:
    assert Dataset.load([{"prompt": "a"}]).task(0, 0).fields["ground_truth"] is None


def test_columns_are_named_also_by_path() -> None:
    row = {"in": {"question": "a"}, "out": {"is": [1, 2]}, "from": "b", "prompt": "other"}
    data = Dataset.load([row], DatasetColumns(prompt="in.question", answer="out.is", source="from"))
    task = data.task(0, 0)
    assert (task.fields["prompt"], task.fields["ground_truth"], task.source) == ("a", [1, 2], "b")
    assert task.fields["in"] == row["in"]


def test_several_files_are_one_after_the_other(tmp_path: Path) -> None:
    pq.write_table(
        pa.Table.from_pylist([{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}]), tmp_path / "a.parquet"
    )
    (tmp_path / "b.jsonl").write_text('{"prompt": [{"role": "user", "content": "c"}], "solution": "3"}')
    sources: list[str | Path] = [str(tmp_path / "a.parquet"), tmp_path / "b.jsonl", "tests.data.tasks_for_tests:ROWS"]
    data = Dataset.load(sources)
    assert [data.task(row, 0).fields["ground_truth"] for row in range(len(data))] == [1, 2, "3", "1", "2"]
    assert [data.task(row, 0).fields["row"] for row in range(len(data))] == [0, 1, 2, 3, 4]
    assert data.location(2) == f"{tmp_path / 'b.jsonl'}, row 0"


def test_data_may_come_from_a_function() -> None:
    data = Dataset.load("tests.data.tasks_for_tests:made")
    assert len(data) == 5
    assert data.task(4, 0).fields["prompt"] == "4+4?"


def test_nulls_of_a_table_are_missing_keys_of_a_message(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "tool", "content": "b", "tool_call_id": "1"}]
    pq.write_table(pa.Table.from_pylist([{"prompt": messages}]), tmp_path / "a.parquet")
    assert Dataset.load(tmp_path / "a.parquet").task(0, 0).fields["prompt"] == messages


@pytest.mark.parametrize(
    ("rows", "columns", "message"),
    [
        ([{"q": 1, "meta": {"a": 2}}], DatasetColumns(), r"row 0 has no column `prompt`; it has q, meta, meta\.a\."),
        (
            [{"prompt": "a"}],
            DatasetColumns(answer="reply"),
            r"no column `reply`; it has prompt\. Name the column .*`data.columns`",
        ),
        ([{"prompt": "a"}], DatasetColumns(source="of"), "no column `of`"),
        ([{"prompt": ""}], DatasetColumns(), "row 0 has '' for a prompt; it must be text, or a list of messages"),
        ([{"prompt": None}], DatasetColumns(), "row 0 has None for a prompt"),
        ([{"prompt": 7}], DatasetColumns(), "row 0 has a value of type int for a prompt"),
        ([{"prompt": ["a"]}], DatasetColumns(), "row 0 has 'a' for message 0 of its prompt"),
        ([{"prompt": [{"content": "a"}]}], DatasetColumns(), "a mapping with a `role`"),
        (["a"], DatasetColumns(), "no such file"),
        ([{"prompt": "a"}, "b"], DatasetColumns(), "row 1 is of type str; each row must be a mapping"),
        ([], DatasetColumns(), "No data was named"),
        (iter(()), DatasetColumns(), "has no rows"),
    ],
)
def test_missing_columns_and_files_are_reported(rows: Any, columns: DatasetColumns, message: str) -> None:
    with pytest.raises((DataError, ConfigError), match=message):
        Dataset.load(rows, columns)


def test_an_empty_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(DataError, match=r"a\.jsonl has no rows"):
        Dataset.load(tmp_path / "a.jsonl")


def test_a_name_without_data_is_reported() -> None:
    with pytest.raises(ConfigError, match="is of type int; it must be an iterable"):
        Dataset.load("tests.data.tasks_for_tests:NUMBER")
    with pytest.raises(ConfigError, match=r"has no mode\. Did you mean made"):
        Dataset.load("tests.data.tasks_for_tests:mode")


def lengthy() -> Dataset:
    """Write prompts of 1 to 6 letters, of two sources in turn."""
    return Dataset.load([{"prompt": "x" * n, "data_source": "ab"[n % 2]} for n in range(1, 7)])


def test_longer_prompts_are_left_out_and_counted() -> None:
    data, counts = lengthy().filter_overlong(letters, 4, "filter")
    assert counts.reduce() == {"prompts": 6, "overlong_prompts": 2, "longest_prompt": 6}
    assert [data.task(row, 0).fields["prompt"] for row in range(len(data))] == ["x", "xx", "xxx", "xxxx"]
    assert data.sources() == ["b", "a", "b", "a"]
    again, counts = data.filter_overlong(lambda prompt: letters(prompt)[::-1], 2, "filter")
    assert len(again) == 2 and counts.reduce()["prompts"] == 4


def test_rows_after_a_gap_keep_their_places_in_the_file() -> None:
    data = Dataset.load([{"prompt": "xxx"}, {"prompt": "x"}, {"prompt": "xxx"}, {"prompt": "y"}])
    filtered, _ = data.filter_overlong(letters, 1, "filter")
    assert [filtered.task(row, 0).fields["row"] for row in range(2)] == [0, 1]
    assert filtered.location(1) == "The data given, row 3"
    assert filtered.sources() == ["", ""]


def test_longer_prompts_are_cut_at_the_beginning() -> None:
    data, counts = lengthy().filter_overlong(letters, 4, "truncate")
    assert len(data) == 6 and counts.reduce()["overlong_prompts"] == 2
    cutting = DataConfig(max_prompt_length=4, overlong="truncate")
    assert cutting.truncate(np.arange(6, dtype=np.int32)).tolist() == [2, 3, 4, 5]
    assert cutting.truncate(np.arange(3, dtype=np.int32)).tolist() == [0, 1, 2]
    assert DataConfig(max_prompt_length=4).truncate(np.arange(6, dtype=np.int32)).tolist() == list(range(6))


def test_a_longer_prompt_is_an_error_that_names_its_row() -> None:
    with pytest.raises(DataError, match="row 4 has a prompt of 5 tokens; 4 are allowed"):
        lengthy().filter_overlong(letters, 4, "error")
    assert len(lengthy().filter_overlong(letters, 6, "error")[0]) == 6


def test_a_dataset_without_usable_rows_is_an_error() -> None:
    data = Dataset.load([{"prompt": "xxxx"}, {"prompt": "xxx"}])
    with pytest.raises(DataError, match=r"Every one of the 2 prompts .* the shortest has 3"):
        data.filter_overlong(letters, 2, "filter")


def test_messages_are_measured_as_messages() -> None:
    data = Dataset.load([{"prompt": [{"role": "system", "content": "ab"}, {"role": "user", "content": "c"}]}])
    assert data.filter_overlong(letters, 9, "filter")[1].reduce()["longest_prompt"] == 5


def test_a_prompt_that_breaks_a_later_row_is_named_when_measured() -> None:
    with pytest.raises(DataError, match="row 1 has None for a prompt"):
        Dataset.load([{"prompt": "a"}, {"question": "b"}]).filter_overlong(letters, 9, "filter")


def test_a_large_table_is_not_made_into_objects(tmp_path: Path) -> None:
    """Rows are made on demand; the bounds are ten times the need of a slow core."""
    count = 300_000
    table = pa.table({"prompt": [f"What is {n}+{n}?" for n in range(count)], "answer": range(count)})
    pq.write_table(table, tmp_path / "a.parquet")
    start = time.process_time()
    data = Dataset.load(tmp_path / "a.parquet")
    assert time.process_time() - start < 1
    start = time.process_time()
    assert [data.task(row, 0).fields["answer"] for row in range(0, count, 1000)] == list(range(0, count, 1000))
    assert time.process_time() - start < 1


def test_a_message_needs_content_or_a_call() -> None:
    with pytest.raises(DataError, match="row 0 has a message without `content` at place 1 of its prompt: it has role"):
        check_prompt([{"role": "system", "content": "Be brief."}, {"role": "user"}], "a.jsonl, row 0")
    calls = [{"function": {"name": "add", "arguments": "{}"}}]
    assert check_prompt([{"role": "assistant", "content": None, "tool_calls": calls}], "row 0")
    assert check_prompt([{"role": "user", "content": ""}], "row 0"), "an empty message is one"
    parts = [{"type": "text", "text": "a", "image_url": None}]
    without_nulls = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    assert check_prompt([{"role": "user", "content": parts, "name": None}], "row 0") == without_nulls
