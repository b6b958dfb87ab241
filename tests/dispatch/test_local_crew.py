"""The local crew calls declared methods directly, and refuses undeclared ones."""

from __future__ import annotations

import pytest

from etude.dispatch import LocalCrew
from etude.protocols import Gather, Split, dispatch_mode


class Counter:
    """A worker that counts."""

    def __init__(self) -> None:
        self.count = 0

    @dispatch_mode(Split.ROLLOUTS, Gather.METRICS)
    def add(self, amount: int, *, twice: bool = False) -> int:
        """Add to the count."""
        self.count += amount * (2 if twice else 1)
        return self.count

    @dispatch_mode(gather=Gather.ALL)
    def everyone(self) -> list[int]:
        """Return one entry a rank."""
        return self.count  # type: ignore[return-value]

    def secret(self) -> int:
        """An undeclared method."""
        return self.count


def test_a_declared_method_is_called_on_the_worker() -> None:
    worker = Counter()
    crew = LocalCrew(worker)
    assert crew.call(Counter.add, 2) == 2
    assert crew.call(Counter.add, 3, twice=True) == 8 == worker.count


def test_answers_of_all_ranks_come_as_a_list() -> None:
    assert LocalCrew(Counter()).call(Counter.everyone) == [0]


def test_an_undeclared_method_is_refused_in_one_process_too() -> None:
    with pytest.raises(AssertionError, match="has no dispatch mode"):
        LocalCrew(Counter()).call(Counter.secret)


def test_a_closed_crew_takes_no_calls() -> None:
    crew = LocalCrew(Counter())
    crew.close()
    with pytest.raises(AssertionError, match="closed"):
        crew.call(Counter.add, 1)
