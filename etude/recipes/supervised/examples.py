"""Which examples each step of a supervised run learns from, as a batch, and how far that has come."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from etude.batch import Batch
from etude.data import RowOrder
from etude.data.collate import collate
from etude.data.examples import Examples
from etude.data.tokenization import Example
from etude.errors import ConfigError
from etude.records import Rollout, Sample
from etude.store import JournalMark

__all__ = ["ExampleStream", "batch_of"]


class ExampleStream:
    """The examples of a run, in its order, `size` a step, for as long as it was asked for.

    A run of so many passes ends exactly there: its last step may be smaller. Where it stands is where its order does,
    so that a run that goes on skips nothing and repeats nothing. How far passes have come is told by that place alone,
    because a run that ended before and was asked for more has made a smaller step on its way.
    """

    def __init__(
        self, examples: Examples, order: RowOrder, size: int, *, steps: int | None = None, epochs: float = 1.0
    ) -> None:
        """steps: how many there are to be; where that is not said, as many as so many passes take."""
        self._examples, self._order, self._size = examples, order, size
        self._steps, self._epochs = steps, epochs
        self._until = max(math.ceil(len(examples) * epochs), 1)

    def __len__(self) -> int:
        """How many examples there are."""
        return len(self._examples)

    @property
    def total_steps(self) -> int:
        """How many steps there are in all, of a run that is read from its beginning without a stop."""
        return math.ceil(self._until / self._size) if self._steps is None else self._steps

    def remaining_steps(self, done: int) -> int:
        """How many steps there are to go, after so many."""
        if self._steps is not None:
            return max(self._steps - done, 0)
        return max(math.ceil((self._until - self._order.position) / self._size), 0)

    @property
    def epoch(self) -> float:
        """How many passes are done."""
        return self._order.position / len(self._examples)

    def next(self) -> Batch:
        """What the next step learns from."""
        first = self._order.position
        end = first + self._size if self._steps is not None else min(first + self._size, self._until)
        return batch_of([self._examples[self._order.advance_to(ordinal)] for ordinal in range(first, end)])

    def mark(self) -> tuple[Mapping[str, Any], JournalMark]:
        """Return the position in the examples, as a JSON tree; there is no journal."""
        return self._order.state(), JournalMark(0, 0)

    def resume_from(self, step: int, state: Mapping[str, Any] | None, mark: JournalMark) -> None:  # noqa: ARG002
        """Go on from there (None is from the beginning); there is no journal to hold a mark of."""
        assert mark.position == 0, "what is learned from examples is written in no journal"
        if state is not None:
            self._order.restore(state)
        if self._steps is None and self._order.position > self._until:
            raise ConfigError(
                f"This run has gone through its examples {self.epoch:g} times, and `epochs={self._epochs:g}` asks for "
                f"less: that cannot be undone. Ask for more, or start a new run in another `directory`."
            )


def batch_of(examples: Sequence[Example]) -> Batch:
    """A batch in which each example is a group, its answers are rollouts, and the first, the preferred, earns 1."""
    rows, rollouts = list[Sample](), list[Rollout]()
    for group, example in enumerate(examples):
        for side, answer in enumerate(example):
            rollout = Rollout(len(rollouts), group, group, float(side == 0))
            rows.extend(_samples(answer, rollout.id))
            rollouts.append(rollout)
    return collate(rows, rollouts)


def _samples(answer: Sequence[Any], rollout: int) -> Iterator[Sample]:
    for row in answer:
        nothing = np.zeros(len(row.ids), np.int32)
        yield Sample(row.ids, row.action, nothing.astype(np.float32), nothing, row.turn, rollout)
