"""The contract of every preparation: the same bytes, disjoint splits, no row dropped in silence, no file
overwritten."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import Dataset as Saved
from datasets import DatasetDict
from hypothesis import given
from hypothesis import strategies as st

from etude.cli import build_parser
from etude.commands import PREPARATIONS
from etude.config import load_plugin
from etude.config.compose import compose
from etude.data.prepare.base import sample_keys
from etude.data.prepare.raw import find_raw_files
from etude.errors import ConfigError, DataError
from etude.recipes.run.config import Run
from tests.data.prepare.made import GSM8K, lines, rows, run, table, tasks

MANY = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(40)]


SETS = (
    "gsm8k raw=raw held_out=0.3 limit=10",
    "countdown train=30 test=5",
    "arithmetic train=30 test=5",
)
WRITE = """
import sys
from etude.cli import main
for words in sys.argv[2:]:
    assert main(["data", "prepare", *words.split(), f"directory={sys.argv[1]}/{words.split()[0]}"]) == 0
"""


@pytest.mark.integration
def test_the_same_command_writes_the_same_bytes(tmp_path: Path) -> None:
    """The processes have different hash seeds; another seed draws other rows."""
    lines(tmp_path / "raw" / "train.jsonl", MANY)
    result = {}
    for name, seed, hashing in (("a", "", "1"), ("b", "", "2"), ("c", " seed=1", "1")):
        command = [sys.executable, "-c", WRITE, name, *(words + seed for words in SETS)]
        done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONHASHSEED": hashing}, capture_output=True)
        assert done.returncode == 0, done.stderr
        place = tmp_path / name
        result[name] = {str(file.relative_to(place)): file.read_bytes() for file in place.rglob("*.parquet")}
    assert result["a"] == result["b"] and result["a"].keys() == result["c"].keys() and len(result["a"]) == 6
    assert all(result["a"][name] != result["c"][name] for name in result["a"])


@pytest.mark.parametrize(("name", "digest"), [("countdown", "0c465ef9"), ("arithmetic", "38f0823e")])
def test_generated_data_never_changes(name: str, digest: str, tmp_path: Path) -> None:
    """This also holds for other versions of Python: people who publish a result name a seed."""
    done = run(name, tmp_path, "train=50", "test=10")
    problems = [[row["reward_model"], row["extra_info"]] for split in done.files for row in rows(done, split)]
    assert hashlib.sha256(json.dumps(problems).encode()).hexdigest()[:8] == digest


def test_rows_have_verls_columns(tmp_path: Path) -> None:
    done = run("gsm8k", tmp_path / "out", f"raw='{lines(tmp_path / 'train.jsonl', GSM8K)}'")
    assert rows(done)[1] == {
        "data_source": "openai/gsm8k",
        "prompt": [
            {
                "role": "user",
                "content": GSM8K[1]["question"]
                + ' Let\'s think step by step and output the final answer after "####".',
            }
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1500"},
        "extra_info": {"split": "train", "index": 1, **GSM8K[1]},
    }
    first = tasks(done)[0]
    assert (first.source, first.fields["ground_truth"]) == ("openai/gsm8k", "5")
    assert first.fields["prompt"] == done.example["prompt"]


def test_the_prompt_is_an_option(tmp_path: Path) -> None:
    raw = f"raw='{lines(tmp_path / 'train.jsonl', GSM8K)}'"
    option = "prompt='Q: {question}\\nA:'"
    plain = rows(run("gsm8k", tmp_path / "a", raw, option, "form=text", "source=mine"))[0]
    assert plain["prompt"] == f"Q: {GSM8K[0]['question']}\\nA:" and plain["data_source"] == "mine"
    messages = rows(run("gsm8k", tmp_path / "b", raw, option, "system='Be brief.'"))[0]["prompt"]
    assert [message["role"] for message in messages] == ["system", "user"] and messages[0]["content"] == "Be brief."


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["prompt='Think.'"], r"`prompt` is 'Think\.', without \{question\}.* Write it in the place of the problem"),
        (["system=a", "form=text"], "`system` is a message before the prompt, and `form=text` makes no messages"),
        ([], r"`raw` names none\. Download them first, `hf download openai/gsm8k"),
        (["raw=absent"], r"`raw` names absent, and there is no such file or folder \(in "),
        (["raw=empty"], r"`raw` names empty, and nothing in it can be read\. Give files that end in \.parquet"),
        (["raw=raw", "held_out=0.1"], r"leaves 3 rows to train on and 0 to score on"),
        (
            ["raw=[raw,val.jsonl]", "held_out=0.5"],
            r"the raw files have 1 validation rows already\. Leave `held_out` out",
        ),
        (["raw=raw", "directory=raw/train.jsonl/x"], r"raw/train\.jsonl is a file\. Give another `directory`"),
        (["raw=raw", "limit=0"], "limit must be at least 1"),
    ],
)
def test_impossible_preparations_are_refused(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty" / ".cache").mkdir(parents=True)
    (tmp_path / "empty" / "README.md").write_text("Nothing.")
    lines(tmp_path / "empty" / ".cache" / "train.jsonl", GSM8K)
    lines(tmp_path / "raw" / "train.jsonl", GSM8K)
    lines(tmp_path / "val.jsonl", [{"question": "1?", "answer": "#### 1"}])
    with pytest.raises(ConfigError, match=message):
        run("gsm8k", Path("out"), *options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            {"question": "1?"},
            r"train\.jsonl, row 1 should have text in the column `answer`, and it has no such column; ",
        ),
        (
            {"question": 7, "answer": ""},
            r"row 1 should have text in the column `question`, and it has a value of type int in it",
        ),
        (
            {"question": None, "answer": ""},
            r"in the column `question`, and it has none; its columns are question, answer",
        ),
    ],
)
def test_a_row_of_another_format_is_reported(bad: dict[str, object], message: str, tmp_path: Path) -> None:
    raw = lines(tmp_path / "train.jsonl", [GSM8K[0], bad])
    with pytest.raises(DataError, match=message):
        run("gsm8k", tmp_path / "out", f"raw='{raw}'")
    assert not (tmp_path / "out").exists()


def test_rows_left_out_are_counted_by_reason(tmp_path: Path) -> None:
    train = [*GSM8K, {"question": "1?", "answer": "one"}, GSM8K[0], {"question": " ", "answer": "#### 1"}, GSM8K[1]]
    train += [{"question": "2?", "answer": "#### two"}, {"question": "4?", "answer": "#### 4"}]
    lines(tmp_path / "raw" / "train.jsonl", train)
    lines(tmp_path / "raw" / "test.jsonl", [GSM8K[2]])
    done = run("gsm8k", tmp_path / "out", f"raw='{tmp_path / 'raw'}'")
    assert done.skipped.reasons == {
        "its question is among the test rows too": (1, f"{tmp_path}/raw/train.jsonl, row 2"),
        "the answer does not end in #### and a number": (2, f"{tmp_path}/raw/train.jsonl, row 3"),
        "the same row came before": (2, f"{tmp_path}/raw/train.jsonl, row 4"),
        "the question is empty": (1, f"{tmp_path}/raw/train.jsonl, row 5"),
    }
    assert [row["extra_info"]["index"] for row in rows(done)] == [0, 1, 8]
    assert done.counts == {"train": 3, "test": 1}
    with pytest.raises(DataError, match=r"Nothing in .* makes a row of gsm8k\. 1 left out: the answer does not end in"):
        run("gsm8k", tmp_path / "none", f"raw='{lines(tmp_path / 'bad.jsonl', train[3:4])}'")


def test_some_rows_are_held_out(tmp_path: Path) -> None:
    """A share of the questions is held out. A larger share adds questions to a smaller one."""
    raw = f"raw='{lines(tmp_path / 'train.jsonl', MANY)}'"
    held = {}
    for share in (0.25, 0.5):
        done = run("gsm8k", tmp_path / str(share), raw, f"held_out={share}")
        assert done.counts == {"train": 40 - 40 * share, "val": 40 * share}
        both = [row for split in done.files for row in rows(done, split)]
        assert sorted(row["extra_info"]["index"] for row in both) == list(range(40))
        assert {row["extra_info"]["split"] for row in rows(done, "val")} == {"val"}
        held[share] = {row["extra_info"]["question"] for row in rows(done, "val")}
    assert held[0.25] < held[0.5]


def test_a_limit_is_drawn_and_keeps_the_order(tmp_path: Path) -> None:
    done = run("gsm8k", tmp_path / "out", f"raw='{lines(tmp_path / 'train.jsonl', MANY)}'", "limit=8")
    places = [row["extra_info"]["index"] for row in rows(done)]
    assert len(places) == 8 and places == sorted(places) and places != list(range(8))


def test_existing_files_are_not_overwritten(tmp_path: Path) -> None:
    raw, out = lines(tmp_path / "train.jsonl", MANY), tmp_path / "out"
    done = run("gsm8k", out, f"raw='{raw}'")
    before = done.files["train"].read_bytes()
    assert run("gsm8k", out, f"raw='{raw}'").counts == done.counts
    with pytest.raises(ConfigError, match=r"train\.parquet is there already, with other rows in it\. Give another"):
        run("gsm8k", out, f"raw='{raw}'", "held_out=0.5")
    assert [file.name for file in out.iterdir()] == ["train.parquet"]
    assert done.files["train"].read_bytes() == before


def test_splits_follow_the_names_of_files(tmp_path: Path) -> None:
    names = {
        "data/train-00000-of-00002.parquet": "train",
        "data/train-00001-of-00002.parquet": "train",
        "data/test_prefs-00000.parquet": "test",
        "test/algebra/2.json": "test",
        "test/algebra/10.json": "test",
        "dev.jsonl": "val",
        "validation.jsonl.gz": "val",
        "train/test_takers.json": "test",  # the nearest folder that names a split
        "contest.csv": "train",
    }
    for name in [*names, "dataset_infos.json", "README.md", ".hidden/train.jsonl", "a/.train.jsonl"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    result = [(str(path.relative_to(tmp_path)), split) for split, path in find_raw_files([tmp_path])]
    assert dict(result) == names
    order = [name for name, _ in result]
    assert order.index("test/algebra/2.json") < order.index("test/algebra/10.json")
    assert [split for split, _ in find_raw_files([tmp_path / "test"])] == ["test", "test"]


def test_directories_of_datasets_are_read(tmp_path: Path) -> None:
    splits = {"train": Saved.from_list(GSM8K[:2]), "test": Saved.from_list(GSM8K[2:])}
    DatasetDict(splits).save_to_disk(str(tmp_path / "saved"))
    done = run("gsm8k", tmp_path / "out", f"raw='{tmp_path / 'saved'}'")
    assert done.counts == {"train": 2, "test": 1}


def test_the_suggested_next_command_is_valid(tmp_path: Path) -> None:
    """The path may need quotes, for the shell and for the option."""
    raw = table(tmp_path / "raw" / "train.parquet", MANY)
    for directory in (tmp_path / "plain", tmp_path / "it's, [a] place"):
        quoted = str(directory).replace("'", "\\'")
        done = run("gsm8k", tmp_path, f"raw='{raw}'", "held_out=0.5", f"directory='{quoted}'")
        arguments = build_parser().parse_args(shlex.split(done.command)[1:])
        composed = compose(Run, arguments.overrides[1:])
        assert composed.data.train == (str(directory / "train.parquet"),)
        assert composed.data.val == (str(directory / "val.parquet"),)


def test_every_preparation_has_its_name_on_the_command_line() -> None:
    assert [load_plugin(kind, None).title for kind in PREPARATIONS.values()] == list(PREPARATIONS)


@given(st.lists(st.text(max_size=3), unique=True, max_size=20), st.integers(0, 25), st.text(max_size=3))
def test_drawn_rows_depend_only_on_the_seed(keys: list[str], count: int, purpose: str) -> None:
    result = sample_keys(keys, count, purpose)
    assert len(result) == min(count, len(keys)) and result <= set(keys)
    assert result == sample_keys(keys[::-1], count, purpose)
    assert result - {"another"} <= sample_keys([*keys, "another"], count + 1, purpose)
