"""The Makefile and `.ci/run`: which environment they use, the error for a missing Python, and the verdicts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def make(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    # The environment of a user, also if make started these tests.
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", *words], cwd=folder, env=env, capture_output=True, text=True, timeout=60)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder whose environment is ready, as far as make can see."""
    folder = tmp_path / "a clone"
    (folder / ".venv").mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    for name, text in ((".made-with", f"{folder} python3"), (".core-installed", ""), (".dev-installed", "")):
        (folder / ".venv" / name).write_text(text)
    return folder


def test_a_missing_python_is_reported(clone: Path) -> None:
    done = make(clone, "PYTHON=nope", "demo")
    assert done.returncode and "there is no nope here. Install it, or name another: make PYTHON=" in done.stderr


def test_an_environment_that_is_ready_is_used(clone: Path) -> None:
    assert make(clone, "-n", "PYTHON=python3", "demo").stdout.strip() == ".venv/bin/python -m etude demo"


def test_one_part_of_the_integration_tests_is_run_if_it_is_named(clone: Path) -> None:
    assert make(clone, "-n", "PYTHON=python3", "PART=2/4", "integration").stdout.strip().endswith("--part 2/4")
    assert "--part" not in make(clone, "-n", "PYTHON=python3", "integration").stdout


def test_the_documents_need_their_own_tools_alone_and_the_site_is_made_before_the_checks(clone: Path) -> None:
    (clone / ".venv/.dev-installed").unlink()
    commands = make(clone, "-n", "PYTHON=python3", "docs").stdout
    assert "--editable '.[agents,docs]'" in commands and ".[dev" not in commands
    assert commands.index("mkdocs build --strict") < commands.index("-m pytest")
    (clone / ".venv/.dev-installed").touch()
    assert "--editable" not in make(clone, "-n", "PYTHON=python3", "docs").stdout, "the tools for testing have them"


def test_a_moved_clone_and_another_python_rebuild_the_environment(clone: Path) -> None:
    assert "python3.99 -m venv --clear .venv" in make(clone, "-n", "PYTHON=python3.99", "test").stdout
    moved = clone.rename(clone.parent / "elsewhere")
    commands = make(moved, "-n", "PYTHON=python3", "demo").stdout
    assert "python3 -m venv --clear .venv" in commands and "--editable '.[agents]'" in commands


def test_ci_stops_if_it_cannot_enter_the_repository() -> None:
    assert "|| { echo" in next(
        line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("cd ")
    )


MAKE = """#!/bin/sh
echo "$1" >> "$CALLED"
case "$1" in
  test) echo "FAILED tests/test_a.py"; echo "====== 1 failed, 7 passed in 12.34s ======"; echo "coverage  all of it" ;;
  smoke) echo "====== 3 passed in 345.67s (0:05:45) ======" ;;
  integration) echo "$2"; echo "====== 9 passed in 456.78s (0:07:36) ======" ;;
  environments) echo "environments: vllm is in a folder, after 9 s." ;;
esac
case " $FAILING " in *" $1 "*) exit 2 ;; esac
"""


VERDICTS = ("lint", "test", "smoke", "integration")


@pytest.mark.parametrize("failing", ["", *VERDICTS, "environments"])
def test_ci_runs_all_and_reports_failures_and_durations(failing: str, tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").write_text('#!/bin/sh\n[ "$*" = "-m tests.parts 4" ] && echo 3/4\n')
    (tmp_path / ".venv/bin/python").chmod(0o755)
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    (tmp_path / "make").write_text(MAKE)
    (tmp_path / "make").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "CALLED": str(tmp_path / "called"), "FAILING": failing}
    done = subprocess.run([tmp_path / ".ci" / "run"], env=env, capture_output=True, text=True, timeout=60)
    assert sorted((tmp_path / "called").read_text().split()) == sorted([*VERDICTS, "environments", "venv"])
    assert (done.returncode != 0) == (failing in VERDICTS)
    words = {step: "FAILED (exit 2)" if step == failing else "passed" for step in VERDICTS}
    *_, environments, test, smoke, integration, minutes, verdict = done.stdout.splitlines()
    assert environments == "ci: environments: vllm is in a folder, after 9 s."
    assert test == "ci: make test         ====== 1 failed, 7 passed in 12.34s ======"
    assert smoke == "ci: make smoke        ====== 3 passed in 345.67s (0:05:45) ======"
    assert integration == "ci: integration 3/4   ====== 9 passed in 456.78s (0:07:36) ======"
    assert "PART=3/4" in done.stdout.splitlines()
    steps = "venv|lint|test|waiting|smoke|integration"
    assert re.fullmatch(rf"ci: minutes: (?:({steps}) \d+:\d\d, ){{6}}whole \d+:\d\d", minutes)
    assert verdict == "ci: " + ", ".join(f"{name} {word}" for name, word in words.items())
    assert ("could not be made (exit 2)" in done.stdout) == (failing == "environments")
