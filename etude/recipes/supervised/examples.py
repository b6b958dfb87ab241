"""The examples of each step of a supervised run, as a batch, and the position in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from etude.batch import Batch, StoredBytes
from etude.data import RowOrder
from etude.data.examples import Examples
from etude.data.tokenization import Example
from etude.errors import ConfigError
from etude.records import Rollout, Sample
from etude.store import JournalMark

PutBytes: TypeAlias = Callable[[bytes], bytes | StoredBytes]


class ExampleStream:
    """Yields the examples of a run in its order, `size` per step, until the end of the run.

    A run of some epochs ends exactly there, so its last step may be smaller. Its position is that of its order, so a
    resumed run skips and repeats nothing. Progress in epochs follows from that position alone, because a run that was
    extended may have made a smaller step before.
    """

    def __init__(
        self, examples: Examples, order: RowOrder, size: int, *, steps: int | None = None, epochs: float = 1.0
    ) -> None:
        """steps: the number of steps; with None, as many as `epochs` take."""
        self._examples = examples
        self._order = order
        self._size = size
        self._steps = steps
        self._epochs = epochs
        self._until = max(math.ceil(len(examples) * epochs), 1)

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self._examples)

    @property
    def total_steps(self) -> int:
        """The number of steps of a run that goes from beginning to end without a stop."""
        return math.ceil(self._until / self._size) if self._steps is None else self._steps

    def remaining_steps(self, done: int) -> int:
        """Return the number of steps left, after `done` steps."""
        if self._steps is not None:
            return max(self._steps - done, 0)
        return max(math.ceil((self._until - self._order.position) / self._size), 0)

    @property
    def epoch(self) -> float:
        """The number of passes that are done."""
        return self._order.position / len(self._examples)

    def next(self, put: PutBytes | None = None) -> Batch:
        """Return the batch of the next step. put: as for `read_batch`."""
        first = self._order.position
        end = first + self._size if self._steps is not None else min(first + self._size, self._until)
        return read_batch(self._examples, [self._order.advance_to(ordinal) for ordinal in range(first, end)], put)

    def mark(self) -> tuple[Mapping[str, Any], JournalMark]:
        """Return the position in the examples, as a JSON tree; there is no journal."""
        return self._order.state(), JournalMark(0, 0)

    def resume_from(self, step: int, state: Mapping[str, Any] | None, mark: JournalMark) -> None:  # noqa: ARG002
        """Resume at a state (None: at the beginning). There is no journal, so its mark must be empty."""
        assert mark.position == 0, "supervised runs have no journal"
        if state is not None:
            self._order.restore(state)
        if self._steps is None and self._order.position > self._until:
            raise ConfigError(
                f"This run has gone through its examples {self.epoch:g} times, and `epochs={self._epochs:g}` asks for "
                "less: that cannot be undone. Ask for more, or start a new run in another `directory`."
            )


def read_batch(examples: Examples, chosen: Sequence[int], put: PutBytes | None = None) -> Batch:
    """Return the batch of some examples, with their images.

    put: stores the bytes of an image where the ranks can read them, and returns a handle. With None they are not read
    yet: a pass reads those of its images that are not in the cache of pixels.
    """
    sources = examples.sources()
    images: dict[str, bytes | StoredBytes] = {}
    for index in chosen:
        for digest, image in examples.images(index).items():
            if digest not in images:
                images[digest] = image if put is None else put(image.read())
    return batch_of([examples[index] for index in chosen], [sources[index] for index in chosen], images)


def batch_of(
    examples: Sequence[Example],
    sources: Sequence[str] | None = None,
    images: Mapping[str, bytes | StoredBytes] | None = None,
) -> Batch:
    """Build a batch: each example is a group, its answers are rollouts, and the first answer, the preferred one, has
    reward 1. sources: the data source of each example. images: the bytes of their images, or handles, by digest."""
    rows, rollouts = list[Sample](), list[Rollout]()
    for group, example in enumerate(examples):
        for side, answer in enumerate(example):
            source = "" if sources is None else sources[group]
            rollout = Rollout(len(rollouts), group, group, float(side == 0), source=source)
            rows.extend(_samples(answer, rollout.id))
            rollouts.append(rollout)
    return Batch.from_records(rows, rollouts, images=images)


def _samples(answer: Sequence[Any], rollout: int) -> Iterator[Sample]:
    for row in answer:
        nothing = np.zeros(len(row.ids), np.int32)
        yield Sample(row.ids, row.action, nothing.astype(np.float32), nothing, row.turn, rollout, images=row.images)
