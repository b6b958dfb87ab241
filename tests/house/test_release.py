"""The files of a release agree: the version and its date, the Pythons, and the commands that the workflows run."""

from __future__ import annotations

import json
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

import etude
from tests.house.documents import ROOT, blocks, documents

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOWS = ROOT / ".github/workflows"
CLASSIFIER = "Programming Language :: Python :: 3."


@cache
def read(path: Path) -> Any:
    """Return the content of a YAML file. YAML takes the key `on` for `true`."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def commands(workflow: str) -> list[str]:
    """Return what the steps of a workflow run."""
    jobs = read(WORKFLOWS / workflow)["jobs"].values()
    return [step["run"] for job in jobs for step in job.get("steps", ()) if "run" in step]


def test_the_newest_version_of_the_changelog_is_the_packages_with_its_date_as_in_the_citation() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    version, date = re.findall(r"^## (\S+) \((\d{4}-\d\d-\d\d)\)$", changelog, flags=re.MULTILINE)[0]
    citation = read(ROOT / "CITATION.cff")
    assert (version, date) == (str(citation["version"]), str(citation["date-released"]))
    assert etude.__version__ == version
    assert citation["license"] == PROJECT["license"] and citation["keywords"] == PROJECT["keywords"]


def test_the_workflow_checks_every_python_that_the_package_names() -> None:
    minors = [name.removeprefix(CLASSIFIER) for name in PROJECT["classifiers"] if name.startswith(CLASSIFIER)]
    named = [f"3.{minor}" for minor in minors]
    assert read(WORKFLOWS / "check.yml")["jobs"]["pythons"]["strategy"]["matrix"]["python"] == named
    assert PROJECT["requires-python"] == f">={named[0]}"


def test_the_workflows_run_commands_that_exist() -> None:
    assert ".ci/run" in commands("check.yml")
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text(encoding="utf-8"))
    every = [*commands("check.yml"), *commands("release.yml"), container["postCreateCommand"]]
    made = set(re.findall(r"\bmake (\w+)", "\n".join(every)))
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert {"check", "venv"} <= made <= set(targets)


def test_a_release_is_checked_before_it_is_built_and_built_before_it_is_published() -> None:
    jobs = read(WORKFLOWS / "release.yml")["jobs"]
    assert jobs["check"]["uses"] == "./.github/workflows/check.yml"
    assert (jobs["build"]["needs"], jobs["publish"]["needs"]) == ("check", "build")
    variables = {name for step in jobs["build"]["steps"] for name in step.get("env", ())}
    assert variables and all(name in (ROOT / "hatch_build.py").read_text(encoding="utf-8") for name in variables)
    tokens = {name: job.get("permissions", {}).get("id-token") for name, job in jobs.items()}
    assert tokens == {"check": None, "build": None, "publish": "write"}, "only the last job may publish"


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda path: path.name)
def test_a_file_of_the_repositorys_host_can_be_read(path: Path) -> None:
    assert isinstance(read(path), dict)


def test_the_readme_begins_with_the_package_and_the_demonstrations() -> None:
    first = blocks((ROOT / "README.md").read_text(encoding="utf-8"), "sh")[0]
    assert re.findall(r"^(?:pip install|etude) \S+", first, flags=re.MULTILINE) == [
        "pip install etude",
        "etude demo",
        "pip install 'etude[agents]'",
        "etude demo",
    ]


def test_every_extra_that_is_named_exists() -> None:
    code = (ROOT / "etude").rglob("*.py")
    text = "".join(path.read_text(encoding="utf-8") for path in (*documents(), *code))
    named = set(re.findall(r"pip install '?etude\[(\w+)\]", text))
    assert {"agents", "lora", "ray", "trackers"} <= named <= set(PROJECT["optional-dependencies"])


def test_the_folders_of_dependabot_exist() -> None:
    for update in read(ROOT / ".github/dependabot.yml")["updates"]:
        assert (ROOT / update["directory"].lstrip("/")).is_dir()
