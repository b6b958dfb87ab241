"""`etude data`: the report of a preparation, and tasks as a model sees them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from etude.chat import Tokenizer
from etude.cli import main
from tests.chat.made import CHATML, byte_level, save
from tests.data.prepare.made import GSM8K, lines
from tests.view.pictures import data_url, png

Captured = pytest.CaptureFixture[str]
BROKEN = {"question": "1?", "answer": "one"}
PAIR = {"prompt": "A joke?", "chosen": "Knock, knock.", "rejected": "No."}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with raw files, in which commands run."""
    monkeypatch.chdir(tmp_path)
    lines(tmp_path / "raw" / "train.jsonl", [*GSM8K, BROKEN])
    lines(tmp_path / "raw" / "test.jsonl", [{"question": "1+1?", "answer": "#### 2"}])
    lines(tmp_path / "pairs.jsonl", [PAIR])
    return tmp_path


def printed(capsys: Captured, *words: str) -> list[str]:
    """Return the lines that a command prints."""
    capsys.readouterr()
    assert main(words) == 0
    return capsys.readouterr().out.splitlines()


def refused(capsys: Captured, *words: str) -> str:
    """Return the error of a command."""
    assert main(words) == 2
    return capsys.readouterr().err


def test_a_preparation_reports_its_files_and_rows(capsys: Captured) -> None:
    output = printed(capsys, "data", "prepare", "raw=raw", "gsm8k", "--json")
    assert output[0].split() == ["3", "rows", "for", "training", "data/gsm8k/train.parquet"]
    assert output[1].split()[-1] == "data/gsm8k/test.parquet"
    why = "the answer does not end in #### and a number"
    assert output[2] == f"1 left out: {why} (first: raw/train.jsonl, row 3)"
    assert f"user: {GSM8K[0]['question']} Let's think" in output[5] and output[6] == "right answer: 5"
    files = {"train": "data/gsm8k/train.parquet", "test": "data/gsm8k/test.parquet"}
    following = "etude train grpo model.path=MODEL data.train=[{train}] data.val=[{test}] reward=gsm8k".format(**files)
    assert output[8] == f"next:  {following}"
    assert json.loads(output[9]) == {
        "files": files,
        "rows": {"train": 3, "test": 1},
        "skipped": {why: 1},
        "next": following,
    }


def test_a_preparation_shows_its_options(capsys: Captured, here: Path) -> None:
    output = printed(capsys, "data", "prepare", "countdown", "--options", "train=5")
    assert any(line.startswith("train: 5 ") and line.endswith("(default: 10000)") for line in output)
    assert any(line.startswith("numbers: [3, 4] ") for line in output)
    assert not (here / "data").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "Name a data set to prepare, and only one; none was named. For example: `etude data prepare gsm8k raw="),
        (["gsm8k", "math"], "and only one; gsm8k and math was named"),
        (["gsm9k"], "There is no data set 'gsm9k' to prepare. Did you mean gsm8k?"),
        (["gsm8k", "raws=x"], "raws is not an option. Did you mean raw?"),
        (["countdown", "held_out=0.1"], "held_out is not an option."),
        (["countdown", "train=many"], "train expects a whole number; 'many' was given."),
    ],
)
def test_an_impossible_preparation_is_refused(words: list[str], message: str, capsys: Captured) -> None:
    assert message in refused(capsys, "data", "prepare", *words)


def test_tasks_are_shown(capsys: Captured) -> None:
    printed(capsys, "data", "prepare", "gsm8k", "raw=raw", "prompt='{question}'")
    output = printed(capsys, "data", "show", "data/gsm8k/train.parquet", "-n", "1", "--row", "1")
    assert output == [
        "data/gsm8k/train.parquet, row 1, openai/gsm8k",
        f"user: {GSM8K[1]['question']}",
        "right answer: 1500",
        "",
        "3 rows",
    ]
    output = printed(capsys, "data", "show", "pairs.jsonl")
    assert output[1:4] == ["A joke?", "chosen: Knock, knock.", "rejected: No."]
    output = printed(capsys, "data", "show", "raw/test.jsonl", "columns.prompt=question")
    assert output[1:3] == ["1+1?", "right answer: #### 2"]


def test_tasks_are_shown_as_a_model_gets_them(capsys: Captured, here: Path) -> None:
    model = save(here / "model", byte_level(CHATML), CHATML, ["<|im_end|>"])
    printed(capsys, "data", "prepare", "gsm8k", "raw=raw", "prompt='{question}'")
    output = printed(capsys, "data", "show", "data/gsm8k/train.parquet", "--model", "model", "-n", "1")
    assert output[1:4] == ["<|im_start|>user", f"{GSM8K[0]['question']}<|im_end|>", "<|im_start|>assistant"]
    rendered = f"<|im_start|>user\n{GSM8K[0]['question']}<|im_end|>\n<|im_start|>assistant\n"
    assert output[0].endswith(f", {len(Tokenizer.load(model).encode(rendered))} tokens")
    longest = max(
        len(Tokenizer.load(model).encode(rendered.replace(GSM8K[0]["question"], row["question"]))) for row in GSM8K
    )
    assert output[-1] == f"3 rows; the longest prompt has {longest} tokens"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["raw/test.jsonl"], "raw/test.jsonl, row 0 has no column `prompt`; it has question, answer."),
        (["pairs.jsonl", "--row", "1"], "pairs.jsonl has rows 0 to 0, and 3 from row 1 on were requested."),
        (["pairs.jsonl", "-n", "0"], "and 0 from row 0 on were requested. Request 1 or more"),
        (["absent.jsonl"], "there is no such file"),
        ([], "Name a file of tasks, and only one; none was named."),
    ],
)
def test_tasks_that_cannot_be_shown_are_refused(words: list[str], message: str, capsys: Captured) -> None:
    assert message in refused(capsys, "data", "show", *words)


def test_a_picture_of_a_task_is_shown_by_its_size(tmp_path: Path, capsys: Captured) -> None:
    row = {"prompt": "<image> How many?", "images": [data_url(png(64, 48))], "ground_truth": "3"}
    lines(tmp_path / "pictures.jsonl", [row])
    assert printed(capsys, "data", "show", "pictures.jsonl")[1] == "user: [picture 64x48]  How many?"
