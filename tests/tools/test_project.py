"""`etude init` writes files that work: each kind's own test trains a tiny model on its data with its code."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from etude.cli import REFUSED, main
from etude.commands import PROJECT_KINDS
from etude.tools.project.new_project import DOWNLOAD

CODE = {"answer": "reward.py", "tools": "env.py", "game": "env.py", "agent": "agent.py", "pictures": "reward.py"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", PROJECT_KINDS)
def test_the_files_of_a_kind_pass_their_own_test(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "mine", "--kind", kind]) == 0
    written = capsys.readouterr().out
    directory = tmp_path / "mine"
    names = {"README.md", "data.jsonl", "run.yaml", "test_run.py", CODE[kind]}
    assert {file.name for file in directory.iterdir()} == names and all(name in written for name in names)
    assert len((directory / "data.jsonl").read_text().splitlines()) == 20
    assert len(re.findall(r"^  (?:cd|python|hf|etude) ", written, re.MULTILINE)) == 4
    readme = (directory / "README.md").read_text()
    brought = "etude demo vision directory=shapes" if kind == "pictures" else DOWNLOAD
    assert brought in written and brought in readme and ("make_tiny_model('tiny')" in readme) == (kind != "pictures")
    runpy.run_path(str(directory / "test_run.py"), run_name="__main__")
    assert not list(directory.glob("run*/")), "the test leaves nothing behind"


def test_a_directory_with_files_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    assert main(["init", str(tmp_path)]) == REFUSED
    assert "has files. Name another." in capsys.readouterr().err
    assert main(["init", str(tmp_path / "mine.txt")]) == REFUSED
    assert "mine.txt is a file. Name another." in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]
