"""The parts of the integration tests: they cover all, are about equal, and take turns by commits."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.durations import Record
from tests.parts import OnePart, Part, part_of_commit

SECONDS = {"vllm": 540.0, "examples": 346.0, "kills": 228.0, **{f"test_{number}.py": 20.0 for number in range(60)}}


def test_the_parts_cover_all_units_once_and_are_about_equal() -> None:
    parts = [Part(number, 4).select(SECONDS) for number in range(1, 5)]
    assert sum(len(part) for part in parts) == len(SECONDS) and set().union(*parts) == SECONDS.keys()
    totals = [sum(SECONDS[unit] for unit in part) for part in parts]
    assert max(totals) - min(totals) <= 20.0


@pytest.mark.parametrize("text", ["", "2", "0/4", "5/4", "a/b", "2/4/6", "-1/4"])
def test_what_is_no_part_is_refused(text: str) -> None:
    with pytest.raises(pytest.UsageError, match=r"PART=.* is no part of the tests\. .* PART=2/4"):
        Part.parse(text)
    assert str(Part.parse("2/4")) == "2/4"


TESTS = """
import pytest

@pytest.mark.parametrize("number", range(3))
def test_file(number): pass

@pytest.mark.xdist_group("shared")
def test_of_a_group(): pass

def test_left_out(): pass
"""


@pytest.mark.slow
def test_a_part_runs_whole_files_and_groups_of_the_selected_tests(tmp_path: Path) -> None:
    for name in "abcd":
        (tmp_path / f"test_part_{name}.py").write_text(TESTS)
    seen = [Ran(), Ran()]
    plain = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-p",
        "no:cov",
        f"--rootdir={tmp_path}",
        "--import-mode=importlib",
    ]
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = xdist_group\n")
    for number, ran in enumerate(seen, start=1):
        pytest.main([*plain, "-k", "not left_out", str(tmp_path)], plugins=[OnePart(Part(number, 2), Record()), ran])
    one, two = (ran.tests for ran in seen)
    assert len(one) + len(two) == len({*one, *two}) == 4 * 4 and one and two
    units = [{"shared" if "group" in test else test.partition("::")[0] for test in tests} for tests in (one, two)]
    assert not units[0] & units[1] and len(units[0] | units[1]) == 5


def test_as_many_commits_as_parts_have_all_parts_in_turn(tmp_path: Path) -> None:
    assert part_of_commit(4, tmp_path) == Part(1, 4), "a folder without git"
    parts = []
    for _ in range(5):
        commit(tmp_path)
        parts.append(part_of_commit(4, tmp_path).number)
    assert parts == [2, 3, 4, 1, 2]


def test_a_shallow_clone_has_a_part_by_its_commit(tmp_path: Path) -> None:
    """It knows one commit, so the count would choose the same part each time."""
    origin, clone = tmp_path / "origin", tmp_path / "clone"
    commit(origin)
    commit(origin)
    git(tmp_path, "clone", "--quiet", "--depth", "1", origin.as_uri(), str(clone))
    assert part_of_commit(4, clone).number == int(git(clone, "rev-parse", "HEAD"), 16) % 4 + 1


def commit(folder: Path) -> None:
    """Add an empty commit to a repository, and make it first if there is none."""
    git(folder.parent, "init", "--quiet", str(folder))
    number = len(list(folder.iterdir()))
    (folder / str(number)).touch()
    git(folder, "add", ".")
    git(folder, "-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "--quiet", "-m", "a")


def git(folder: Path, *words: str) -> str:
    """Run git in a folder, and return its output."""
    return subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True, text=True).stdout


class Ran:
    """The plug-in that notes which tests ran."""

    def __init__(self) -> None:
        self.tests: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.tests.append(report.nodeid)
