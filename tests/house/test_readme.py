"""The examples run, and the commands shown are commands that exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from etude.cli import parser
from tests.house.documents import ROOT, blocks, commands, documents

EXAMPLES = [(page.name, example) for page in documents() for example in blocks(page.read_text(), "python")]
SHOWN = sorted({(page.name, tuple(words)) for page in documents() for words in commands(page)})
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def test_the_readme_shows_an_example() -> None:
    assert "README.md" in {page for page, _ in EXAMPLES}


@pytest.mark.parametrize(("page", "example"), EXAMPLES, ids=[page for page, _ in EXAMPLES])
def test_an_example_runs(page: str, example: str, tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(example)
    done = subprocess.run([sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, f"An example of {page} fails:\n{done.stderr}"


@pytest.mark.parametrize(("page", "words"), SHOWN, ids=[f"{page}: {' '.join(words)}" for page, words in SHOWN])
def test_a_command_that_is_shown_exists(page: str, words: tuple[str, ...]) -> None:
    if words[0] == "make":
        asked = {word for word in words[1:] if "=" not in word}
        assert asked <= TARGETS, f"{page} shows {' '.join(words)}"
    else:
        assert understood(list(words[1:])), f"{page} shows {' '.join(words)}"


def understood(arguments: list[str]) -> bool:
    """Whether the command line takes these; `--help` and its like end the parse well."""
    try:
        parser().parse_args(arguments)
    except SystemExit as end:
        return not end.code
    return True


def test_a_command_that_does_not_exist_is_told() -> None:
    assert understood(["--help"])
    assert not understood(["no-such-command"])


def test_commands_are_found_where_they_stand(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "Run `etude config show [key=value …]` or `make test`, not `makeshift`.\n"
        "```sh\n$ etude demo algorithms \\\n    steps=3   # a comment\n.venv/bin/etude version | cat\nls\n```\n"
        "```python\netude = 1\n```\n"
    )
    assert sorted(commands(page)) == [
        ["etude", "config", "show"],
        ["etude", "demo", "algorithms", "steps=3"],
        ["etude", "version"],
        ["make", "test"],
    ]
