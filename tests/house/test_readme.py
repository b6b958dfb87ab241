"""The examples run, the shown commands exist, and quoted output is real output."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from etude.cli import build_parser, expand_shorthand
from etude.errors import EtudeError
from etude.recipes.presets import PRESETS
from tests.commands import composed
from tests.house.documents import ROOT, blocks, commands, documents
from tests.sweeps import sweep

EXAMPLES = [(page.name, example) for page in documents() for example in blocks(page.read_text(), "python")]
SHOWN = sorted({(page.name, tuple(words)) for page in documents() for words in commands(page)})
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))

IN_TURN = """
import os, runpy, sys
from pathlib import Path

import torch, transformers

codes = []
for folder in map(Path, sys.argv[1:]):
    if (child := os.fork()) == 0:
        os.chdir(folder)
        for stream in (1, 2):
            os.dup2(os.open("said", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        sys.argv, sys.path[0] = ["example.py"], str(folder)
        runpy.run_path("example.py", run_name="__main__")
        sys.exit()
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
Path(folder.parent, "codes").write_text("\\n".join(map(str, codes)))
"""


def test_the_readme_shows_an_example() -> None:
    assert "README.md" in {page for page, _ in EXAMPLES}


@pytest.mark.integration
@pytest.mark.smoke
def test_the_examples_of_the_readme_run(tmp_path: Path) -> None:
    run_examples([shown for shown in EXAMPLES if shown[0] == "README.md"], tmp_path)


@pytest.mark.integration
def test_the_examples_of_the_other_pages_run(tmp_path: Path) -> None:
    run_examples([shown for shown in EXAMPLES if shown[0] != "README.md"], tmp_path)


def run_examples(shown: list[tuple[str, str]], directory: Path) -> None:
    """Run each example in its own process and folder, forked from one process that has loaded the large libraries."""
    folders = [directory / f"{place}-{page}" for place, (page, _) in enumerate(shown)]
    for folder, (_, example) in zip(folders, shown, strict=True):
        folder.mkdir()
        (folder / "example.py").write_text(example)
    done = subprocess.run([sys.executable, "-c", IN_TURN, *map(str, folders)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    codes = [int(line) for line in (directory / "codes").read_text().splitlines()]
    failed = {folder.name: folder / "said" for folder, code in zip(folders, codes, strict=True) if code}
    messages = [f"An example of {name} fails:\n{log.read_text()}" for name, log in failed.items()]
    assert not messages, "\n".join(messages)


@sweep(("page", "words"), SHOWN)
def test_a_command_that_is_shown_exists(page: str, words: tuple[str, ...]) -> None:
    if words[0] == "make":
        words_given = {word for word in words[1:] if "=" not in word}
        assert words_given <= TARGETS, f"{page} shows {' '.join(words)}"
    else:
        assert understood(*words[1:]), f"{page} shows {' '.join(words)}"


@cache
def understood(*words: str) -> bool:
    """Return whether the command line parses these words, `--help` included, and knows the options they set.

    A sentence may name a command without its arguments.
    """
    try:
        arguments = build_parser().parse_args(expand_shorthand(words))
    except SystemExit as end:
        return not end.code or (all(map(str.isalpha, words)) and understood(*words, "--help"))
    names = [word for word in vars(arguments).get("overrides", ()) if "=" not in word]
    if words[0] in ("train", "config") and not set(names) <= {*PRESETS, *vars(arguments).get("roots", ())}:
        return False
    if vars(arguments).get("config") is not None or vars(arguments).get("multirun"):
        return True
    try:
        composed(arguments, words)
    except EtudeError:
        return False
    return True


def sentences(package: Path) -> list[str]:
    """Return every string in the code, with an ellipsis in place of each value."""
    texts = []
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return texts


def test_quoted_output_in_the_documents_is_real() -> None:
    quoted = {
        quote for page in documents() for quote in re.findall(r"^\| “([^”]+)” \|", page.read_text(), re.MULTILINE)
    }
    assert len(quoted) > 5
    texts = sentences(ROOT / "etude")
    assert not [quote for quote in quoted if not any(quote in sentence for sentence in texts)]


def test_a_missing_command_is_reported() -> None:
    assert understood("--help") and understood("demo")
    assert understood("train", "grpo", "reward=gsm8k", "steps=3")
    assert not understood("no-such-command")
    assert not understood("train", "no-such-preset")
    assert not understood("train", "grpo", "stepps=3")
    assert understood("sft", "batch_size=3") and understood("config", "show", "dpo", "loss.beta=0.2")
    assert not understood("sft", "reward=gsm8k") and not understood("dpo", "data.train_on=last")
    assert understood("data", "prepare", "math", "levels=[1]")
    assert not understood("data", "prepare", "gsm8k", "levels=[1]")


def test_commands_are_found_in_blocks_and_inline_code(tmp_path: Path) -> None:
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
