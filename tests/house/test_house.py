"""The house rules hold for all of Etude."""

from __future__ import annotations

from pathlib import Path

import pytest

import etude
from etude.lazy import pause_gc
from tests.house import packing, prose, table
from tests.house.rules import RULES, Modules
from tests.house.source import read_package

PACKAGE = Path(etude.__file__).parent


@pytest.fixture(scope="module")
def modules() -> Modules:
    with pause_gc():  # the collector would walk half a million nodes again and again
        return read_package(PACKAGE)


@pytest.mark.parametrize("rule", (*RULES, *packing.RULES, *prose.RULES), ids=lambda rule: rule.__name__)
def test_the_house_keeps_the_rule(rule: object, modules: Modules) -> None:
    assert callable(rule)
    broken = list(rule(modules))
    assert not broken, "\n".join([str(rule.__doc__), *broken])


def test_no_docstring_help_line_or_error_opens_with_a_question_word() -> None:
    """The rule `openings` again, without the parsed package: quick enough for `make check`."""
    broken = list(prose.quick_openings(PACKAGE))
    assert not broken, "\n".join(broken)


def test_the_whole_package_is_read(modules: Modules) -> None:
    assert {module.path for module in modules.values()} == {
        path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")
    }


def test_imports_go_down_only() -> None:
    """A room may import lower floors, and on its own floor only rooms that the table names, without a cycle."""
    for name, room in table.ROOMS.items():
        for other in room.rooms:
            assert table.ROOMS[other].floor <= room.floor, f"{name} on floor {room.floor} may import {other} above it"
            assert name not in table.ROOMS[other].rooms, f"{name} and {other} may import each other"


def test_every_place_the_table_names_is_in_a_room() -> None:
    named = [*table.MAX_CODE_LINES_OF, *table.NEVER_LOADED, *table.NEVER_NAMED, *table.ENVIRONMENT_IN, *table.PRINT_IN]
    named += [path for paths in [*table.LIBRARIES.values(), *table.ROOM_ONLY_IN.values()] for path in paths]
    for path in [*named, *table.LATE_IMPORTS_IN, *table.NO_RANKS_IN]:
        assert path.split("/")[0] in table.ROOMS, path
