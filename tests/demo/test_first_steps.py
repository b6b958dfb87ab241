"""The first steps of a new user: `etude demo`, and the commands that the README shows for its run directory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from etude.cli import main
from etude.recipes.run.directory import read_metrics
from tests.house.documents import ROOT, commands

pytestmark = [pytest.mark.integration, pytest.mark.smoke]

WAITS = {"chat", "serve", "view"}
"""These wait for a user; tests/tools/test_chat.py, tests/tools/test_serve.py and tests/view run them."""


@pytest.fixture(scope="module")
def demonstrated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The directory of a demonstration of few steps, and its output."""
    folder = tmp_path_factory.mktemp("demo")
    short = ["steps=2", "collect.tasks=4", "evaluate.limit=50"]
    command = [sys.executable, "-m", "etude", "demo", *short]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    (run,) = (folder / "runs").iterdir()
    return run, done.stdout


def test_the_demonstration_takes_its_first_steps(demonstrated: tuple[Path, str]) -> None:
    run, printed = demonstrated
    assert [step["step"] for step in read_metrics(run)] == [1, 2]
    for sentence in ("held-out accuracy, sampled at temperature 1", "held-out accuracy, greedy", run.name):
        assert sentence in printed, printed


def test_the_first_commands_of_the_readme_run(
    demonstrated: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = demonstrated
    monkeypatch.chdir(tmp_path)
    shown = [words for words in commands(ROOT / "README.md") if "RUN" in words and "FILE" not in words]
    assert {words[1] for words in shown} >= {*WAITS, "generate", "answers", "eval", "plot", "train", "export"}
    for words in shown:
        if words[1] not in WAITS:
            given = [re.sub(r"^steps=\d+$", "steps=3", word).replace("RUN", str(run)) for word in words[1:]]
            assert main(given) == 0, words
    assert [step["step"] for step in read_metrics(run)] == [1, 2, 3]
    assert (run / "plot.png").is_file() and (tmp_path / "my-model" / "model.safetensors").is_file()
