"""What a person meets first: public names that are there, and doors that open without loading the heavy libraries."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import etude
from tests.components import COMPONENTS, require
from tests.house.source import Module, read_package

MODULES = read_package(Path(etude.__file__).parent)
HEAVY = {"torch", "ray", "transformers"}


def loaded_after(code: str) -> set[str]:
    """The heavy libraries that a fresh interpreter has loaded once it has run `code`."""
    report = f"\nimport sys\nprint(*sorted({HEAVY!r} & sys.modules.keys()), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code + report], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


def test_the_public_names_are_sorted_and_there() -> None:
    assert etude.__all__ == sorted(set(etude.__all__))
    for name in etude.__all__:
        assert hasattr(etude, name), name
    assert set(etude.__all__) <= set(dir(etude))


@pytest.mark.parametrize("module", MODULES.values(), ids=lambda module: module.name)
def test_a_module_has_the_names_it_says_it_has(module: Module) -> None:
    for component, package in COMPONENTS.items():
        if any(found.target.split(".")[0] == package and not found.late for found in module.imports):
            require(component)
    loaded = import_module(module.name)
    if "__all__" in vars(loaded):
        assert len(set(loaded.__all__)) == len(loaded.__all__)
        missing = [name for name in loaded.__all__ if not hasattr(loaded, name)]
        assert not missing, f"{module.path} lists names it does not have: {missing}"


@pytest.mark.parametrize(
    "code",
    [
        "import etude",
        "import etude\ndir(etude)",
        "import etude.cli",
        "import etude.cli\ntry: etude.cli.main(['--help'])\nexcept SystemExit: pass",
    ],
)
def test_the_front_door_opens_lightly(code: str) -> None:
    assert loaded_after(code) == set()


def test_what_is_loaded_is_seen() -> None:
    assert loaded_after("import torch") >= {"torch"}


def test_the_command_is_installed() -> None:
    (command,) = entry_points(group="console_scripts", name="etude")
    assert command.value == "etude.cli:main"
