"""Files of every format give the rows that are in them, or an error says what is wrong with one."""

from __future__ import annotations

import gzip
import json
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset as Saved
from datasets import DatasetDict
from hypothesis import given
from hypothesis import strategies as st

from etude.data.files import ArrowRows, JsonRows, column_paths, lookup, read_rows, rows_from_iterable
from etude.errors import ConfigError, DataError

ROWS: list[dict[str, Any]] = [
    {"prompt": "2+2?", "reward_model": {"ground_truth": "4"}, "day": "2024-01-01"},
    {"prompt": "Größe\u2028?", "reward_model": {"ground_truth": "5"}, "day": "x"},
]


def write(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    """Write the rows in the format of the path's suffix."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    elif path.suffix == ".jsonl":
        path.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    else:
        Saved.from_list(rows).save_to_disk(str(path), num_shards=2)
    return path


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.json", "directory"])
def test_every_format_gives_the_rows_as_they_are(name: str, tmp_path: Path) -> None:
    rows = read_rows(write(tmp_path / name))
    assert [rows.row(i) for i in range(len(rows))] == ROWS
    assert rows.values("reward_model.ground_truth", 0, 2) == ["4", "5"]
    assert rows.values("prompt", 1, 2) == [ROWS[1]["prompt"]]
    assert rows.values("reward_model.style", 0, 2) == rows.values("prompt.style", 0, 2) == [None, None]
    assert rows.values("absent", 0, 2) == [None, None]


def test_json_may_have_a_row_on_each_line(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"prompt": "a"}\n{"prompt": "b", "n": 1}\n')
    rows = read_rows(path)
    assert [rows.row(i) for i in range(2)] == [{"prompt": "a"}, {"prompt": "b", "n": 1}]


@pytest.mark.parametrize("text", ['{"prompt": "a"}', '\n{\n  "prompt":\n  "a"\n}\n', '{"prompt": "a",\n"n": [\n1]}'])
def test_json_may_be_one_row(text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    rows = read_rows(path)
    assert [rows.row(i) for i in range(len(rows))] == [json.loads(text)]


def test_lines_may_be_compressed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "a"}\n\n{"prompt": "b"}\n'))
    rows = read_rows(path)
    assert [rows.row(i) for i in range(len(rows))] == [{"prompt": "a"}, {"prompt": "b"}]


def test_csv_is_text_throughout(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('prompt,answer,note\n"two\nlines",007,\nb,1.50,NA\n')
    rows = read_rows(path)
    assert rows.row(0) == {"prompt": "two\nlines", "answer": "007", "note": ""}
    assert rows.row(1) == {"prompt": "b", "answer": "1.50", "note": "NA"}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.lists(st.dictionaries(st.text(), json_values, max_size=4), min_size=1, max_size=4))
def test_rows_of_an_iterable_with_different_columns_come_back_equal(rows: list[dict[str, Any]]) -> None:
    source = rows_from_iterable(iter(rows), "rows")
    assert [source.row(i) for i in range(len(source))] == rows


def test_values_that_json_lacks_become_text_or_lists() -> None:
    row = rows_from_iterable(
        [{"a": np.int64(3), "b": np.array([1.5]), "c": date(2024, 1, 2), "d": Decimal("1.10")}], "x"
    ).row(0)
    assert row == {"a": 3, "b": [1.5], "c": "2024-01-02", "d": "1.10"}
    odd = {"when": [datetime(2024, 1, 2, 3)], "cost": {"exact": Decimal("1.10")}, "took": timedelta(seconds=90)}
    assert ArrowRows("x", pa.Table.from_pylist([odd])).row(0) == {
        "when": ["2024-01-02T03:00:00"],
        "cost": {"exact": "1.10"},
        "took": "0:01:30",
    }


def test_a_large_iterable_is_kept_in_chunks() -> None:
    rows = rows_from_iterable(({"n": n} for n in range(70_000)), "many")
    assert isinstance(rows, JsonRows) and len(rows) == 70_000
    assert [rows.row(i)["n"] for i in (0, 65_535, 65_536, 69_999)] == [0, 65_535, 65_536, 69_999]
    assert rows.values("n", 65_530, 65_540) == list(range(65_530, 65_540))


def test_a_name_with_a_dot_is_not_a_path() -> None:
    row = {"a.b": 1, "a": {"b": 2, "c": {"d": None}}}
    assert lookup(row, "a.b") == 1
    assert lookup(row, "a.c.d") is None
    assert list(column_paths(row)) == ["a.b", "a", "a.b", "a.c", "a.c.d"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"prompt": 1}\n{"prompt', r"a\.jsonl, line 2 is not JSON"),
        ("a.jsonl", '{"prompt": 1}\n\n[1]', r"a\.jsonl, line 3 holds a value of type list"),
        ("a.json", "[{]", r"a\.json is not JSON"),
        ("a.json", "[1]", r"a\.json, row 0 is of type int; each row must be a mapping"),
        ("a.json", '{\n"a": 1', r"a\.json is not JSON"),
        ("a.json", '{"a": 1}\n{"a"', r"a\.json, line 2 is not JSON"),
        ("a.jsonl.gz", '{"a": 1}', r"a\.jsonl\.gz cannot be read as \.jsonl\.gz: Not a gzipped file"),
        ("a.csv", "", r"a\.csv cannot be read as \.csv"),
        ("a.csv", "a,b\n1\n", r"a\.csv cannot be read as \.csv"),
        ("a.parquet", "no", r"a\.parquet cannot be read as \.parquet"),
    ],
)
def test_the_place_of_an_error_in_a_file_is_reported(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        read_rows(tmp_path / name)


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_rows(tmp_path / "absent.jsonl")
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(
        ConfigError, match=r"`\.txt` cannot be read\. Give a file that ends in \.parquet, \.jsonl, \.jsonl\.gz"
    ):
        read_rows(tmp_path / "a.txt")
    with pytest.raises(ConfigError, match=r"without a `state\.json`"):
        read_rows(tmp_path)


def test_of_several_splits_one_must_be_named(tmp_path: Path) -> None:
    split = Saved.from_list(ROWS)
    DatasetDict({"train": split, "test": split}).save_to_disk(str(tmp_path / "all"))
    with pytest.raises(ConfigError, match=r"several splits.*`.*/all/train`, `.*/all/test`"):
        read_rows(tmp_path / "all")
    assert len(read_rows(tmp_path / "all" / "test")) == 2


def test_a_directory_with_a_missing_shard_is_not_read(tmp_path: Path) -> None:
    path = write(tmp_path / "saved")
    (path / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(DataError, match=r"`data-00001-of-00002\.arrow` is missing"):
        read_rows(path)


def test_bytes_and_objects_are_refused_in_a_task(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([{"prompt": "a", "image": {"bytes": b"png"}}]), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="row 0 has bytes in the column `image`"):
        read_rows(tmp_path / "a.parquet").row(0)
    with pytest.raises(DataError, match="given, row 1 cannot be written as JSON: it holds a value of type set"):
        rows_from_iterable([{"prompt": "a"}, {"prompt": "a", "tags": {"x"}}], "given")
