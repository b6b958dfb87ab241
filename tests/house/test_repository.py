"""The files of the repository: small, without a path of one machine, and with one set of versions."""

from __future__ import annotations

import re
import subprocess
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_BYTES = 1_000_000
# Joined from pieces, so that this file passes its own test.
MACHINE_PATHS = re.compile("|".join(f"(?<![\\w./~-])/{folder}/" for folder in ("work", "root", "home", "Users")))


@cache
def tracked() -> tuple[Path, ...]:
    """Return the files that git tracks; skip the test without git (a source archive)."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        done = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return tuple(path for name in done.stdout.split("\0") if name and (path := ROOT / name).is_file())


def test_no_file_is_large() -> None:
    large = [
        f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes"
        for path in tracked()
        if path.stat().st_size > MAX_BYTES
    ]
    assert not large


def test_no_file_names_a_path_of_one_machine() -> None:
    places = []
    for path in tracked():
        if b"\0" in (data := path.read_bytes()):
            continue
        for number, line in enumerate(data.decode().splitlines(), start=1):
            if MACHINE_PATHS.search(line):
                places.append(f"{path.relative_to(ROOT)}:{number} {line.strip()}")
    assert not places


@pytest.mark.parametrize("folder", ["work", "root", "home"])
def test_a_path_of_one_machine_is_recognised(folder: str) -> None:
    assert MACHINE_PATHS.search(f"see `/{folder}/me/notes`")
    assert not MACHINE_PATHS.search(f"https://example.org/{folder}/me, ./{folder}/me and {folder}/me")


def test_the_constraints_are_exact_and_portable() -> None:
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            assert re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line), line


def test_every_requirement_is_constrained() -> None:
    """But for the kernels of recurrent layers, which need a GPU and which no test runs with."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"]]
    for name, extra in project["optional-dependencies"].items():
        requirements += extra if name != "recurrent" else []
    named = {_normal(re.split(r"[\[<>=!~ ;]", requirement)[0]) for requirement in requirements} - {"etude"}
    pinned = {_normal(line.split("==")[0]) for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert named <= pinned


def test_every_command_of_the_makefile_is_explained_and_none_is_a_file() -> None:
    text = (ROOT / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.*)$", text, flags=re.MULTILINE)
    explained = re.findall(r"^([a-z]+):.*## \S", text, flags=re.MULTILINE)
    assert set(phony.split()) == set(explained) >= {"demo", "test", "soak", "chaos", "lint", "bench", "docs"}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
