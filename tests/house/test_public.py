"""The public interface: its names exist, and importing it loads no heavy library."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import etude
from tests.components import COMPONENTS, required_components

HEAVY = {"torch", "ray", "transformers"}
ELSEWHERE = {"gymnasium", "textarena", "triton", "verifiers"}
"""The packages that this environment never has."""


def loaded_after(code: str) -> set[str]:
    """Return the heavy libraries that a fresh interpreter has loaded after it has run `code`."""
    report = f"\nimport sys\nprint(*sorted({HEAVY!r} & sys.modules.keys()), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code + report], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


def test_the_public_names_are_sorted_and_exist() -> None:
    assert etude.__all__ == sorted(set(etude.__all__))
    for name in etude.__all__:
        assert hasattr(etude, name), name
    assert set(etude.__all__) <= set(dir(etude))


def test_a_module_has_its_declared_names() -> None:
    """Each of them; names that need a missing component are left out, unless the component was promised."""
    folder = Path(etude.__file__).parent
    wrong: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("*.py")):
        name = ".".join(path.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__init__")
        try:
            loaded = import_module(name)
        except ModuleNotFoundError as error:
            if error.name in ELSEWHERE:
                continue
            absent = [component for component, package in COMPONENTS.items() if error.name == package]
            if not absent or required_components() & set(absent):
                raise
            continue
        if "__all__" in vars(loaded):
            assert len(set(loaded.__all__)) == len(loaded.__all__), name
            missing = [attribute for attribute in loaded.__all__ if not hasattr(loaded, attribute)]
            wrong |= {name: missing} if missing else {}
    assert not wrong, f"Modules list names that they do not have: {wrong}"


@pytest.mark.parametrize(
    "code",
    [
        "import etude",
        "import etude\ndir(etude)",
        "import etude.cli",
        "import etude.cli\ntry: etude.cli.main(['--help'])\nexcept SystemExit: pass",
    ],
)
def test_importing_etude_loads_no_heavy_library(code: str) -> None:
    assert loaded_after(code) == set()


def test_a_loaded_heavy_library_is_found() -> None:
    assert loaded_after("import sys\nsys.modules['torch'] = sys") == {"torch"}


def test_the_command_is_installed() -> None:
    (command,) = entry_points(group="console_scripts", name="etude")
    assert command.value == "etude.cli:main"
