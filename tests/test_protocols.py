"""A worker's method declares how its calls are spread over ranks, and stays the same method."""

from __future__ import annotations

import pytest

from etude.protocols import DispatchMode, Gather, Split, dispatch_mode, get_dispatch_mode


class Worker:
    @dispatch_mode(Split.GROUPS, Gather.METRICS)
    def update(self, x: int) -> int:
        return x + 1

    @dispatch_mode()
    def version(self) -> int:
        return 3

    def helper(self) -> None:
        """A method that a crew may not call."""


def test_a_declared_method_is_still_itself() -> None:
    assert Worker().update(1) == 2 and Worker.update.__name__ == "update"


def test_what_was_declared_is_found_by_the_method() -> None:
    assert get_dispatch_mode(Worker.update) == DispatchMode(Split.GROUPS, Gather.METRICS)
    assert get_dispatch_mode(Worker().version) == DispatchMode(Split.SAME, Gather.FIRST)


def test_an_undeclared_method_is_a_mistake_in_the_program() -> None:
    with pytest.raises(AssertionError, match=r"Worker\.helper has no dispatch mode"):
        get_dispatch_mode(Worker.helper)
