"""The order in which a run uses the rows of its data.

A sampler is a frozen config; the `RowOrder` that it starts holds the run's position. An order resumes exactly: its
state is a JSON tree, and a restored order continues as if it had never stopped. Each random draw depends only on the
run's seed and on its purpose (an epoch, a source). It uses raw generator output, which no version of numpy changes.
"""

from __future__ import annotations

import base64
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from etude.config import Config
from etude.errors import ConfigError
from etude.records import has_zero_variance

Sources = Callable[[], Sequence[str]]


def _no_sources() -> Sequence[str]:
    return ()


class Sampler(Config):
    """The config of an order. A user's curriculum is a subclass, which starts its own `RowOrder`."""

    @abstractmethod
    def start(self, rows: int, seed: int, sources: Sources = _no_sources) -> RowOrder:
        """Start the order of a run over `rows` rows. `sources` returns each row's data source, if it is needed."""

    def leaves_out(self, source: str) -> bool:  # noqa: ARG002
        """Return true if it never takes a row of a data source."""
        return False


class RowOrder(ABC):
    """The position of a run in its order. Each ordinal is requested once, in increasing order.

    An order that uses rewards overrides `record_rewards`, and with it `replay`. When a run resumes, it first replays
    the tasks that were issued after the checkpoint. Their rewards may arrive later than in the original run.
    """

    def __init__(self, rows: int, seed: int) -> None:
        self.rows = rows
        self.seed = seed
        self.position = 0
        """The next ordinal."""

    def advance_to(self, ordinal: int) -> int:
        """Return the row of an ordinal. Skipped ordinals count as used."""
        assert ordinal >= self.position, f"the order is at {self.position}, past {ordinal}"
        while True:
            row = self.next_row()
            self.position += 1
            if self.position > ordinal:
                return row

    @abstractmethod
    def next_row(self) -> int:
        """Return the row of the ordinal `position`. It is called once for each."""

    def replay(self, ordinal: int, row: int) -> None:
        """Advance past an ordinal that was issued with this row before the run resumed."""
        replayed = self.advance_to(ordinal)
        assert replayed == row, f"ordinal {ordinal} was row {row}, and this order has {replayed}"

    def record_rewards(self, row: int, rewards: Sequence[float]) -> None:  # noqa: B027  (most orders ignore rewards)
        """Record the rewards of a row's group."""

    def state(self) -> dict[str, Any]:
        """Return the position as a JSON tree."""
        return {"order": type(self).__name__, "rows": self.rows, "seed": self.seed, "position": self.position}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Restore a position of `state`. Raises `ConfigError` for the state of another order."""
        own = {"order": type(self).__name__, "rows": self.rows, "seed": self.seed}
        changed = [name for name in own if tree[name] != own[name]]
        if changed:
            name = changed[0]
            remedy = {"order": "sampler", "rows": "data, and the limits on its prompts,", "seed": "seed"}[name]
            raise ConfigError(
                f"The order of the data was saved with {name} {tree[name]}, and {name} is now {own[name]}: the rows "
                f"would have another order. Resume with the {remedy} that the run began with."
            )
        self.position = tree["position"]


def _random_bits(count: int, *key: int) -> NDArray[np.uint64]:
    """Return `count` numbers of 64 random bits, which depend on this key alone."""
    return np.random.Philox(np.random.SeedSequence(key)).random_raw(count)


class _EpochPermutations:
    """The permutation of each epoch, drawn when the epoch starts."""

    def __init__(self, rows: int, *key: int) -> None:
        self._rows = rows
        self._key = key
        self._epoch = -1
        self._order = np.empty(0, np.int64)

    def __getitem__(self, position: tuple[int, int]) -> int:
        """Return the row at a position (epoch, index)."""
        epoch, index = position
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.argsort(_random_bits(self._rows, *self._key, epoch), kind="stable")
        return int(self._order[index])


# -- sequential -------------------------------------------------------------------------------------------------------


class SequentialSampler(Sampler):
    """Rows in the order of the files, repeated from the start after the last row."""

    def start(self, rows: int, seed: int, sources: Sources = _no_sources) -> RowOrder:  # noqa: ARG002
        return _SequentialOrder(rows, seed)


class _SequentialOrder(RowOrder):
    def next_row(self) -> int:
        return self.position % self.rows


# -- shuffled ---------------------------------------------------------------------------------------------------------


class ShuffledSampler(Sampler):
    """Every row once in each epoch, in a new random order each time."""

    def start(self, rows: int, seed: int, sources: Sources = _no_sources) -> RowOrder:  # noqa: ARG002
        return _ShuffledOrder(rows, seed)


class _ShuffledOrder(RowOrder):
    @cached_property
    def _epochs(self) -> _EpochPermutations:
        return _EpochPermutations(self.rows, self.seed)

    def next_row(self) -> int:
        return self._epochs[divmod(self.position, self.rows)]


# -- weighted by data source ------------------------------------------------------------------------------------------


class WeightedSampler(Sampler):
    """Data sources in fixed shares, each shuffled: a source's rows repeat only after all of them were used.

    Shares hold at every moment and not only on average: the source furthest behind its share is next.
    """

    weights: dict[str, float] = Field(
        {}, description="relative share of each data source; larger gives more rows; empty is equal shares"
    )

    @model_validator(mode="after")
    def _check_weights(self) -> WeightedSampler:
        if self.weights and not (min(self.weights.values()) >= 0 < sum(self.weights.values()) < np.inf):
            raise ConfigError(f"`weights` must be 0 or more, with one above 0; they are {self.weights}.")
        return self

    def leaves_out(self, source: str) -> bool:
        return self.weights.get(source) == 0

    def start(self, rows: int, seed: int, sources: Sources = _no_sources) -> RowOrder:
        row_sources = np.array(sources(), dtype=np.str_)
        assert len(row_sources) == rows, f"{rows} rows have {len(row_sources)} sources"
        names, source_of_row = np.unique(row_sources, return_inverse=True)
        unmatched = sorted(self.weights.keys() ^ set(names.tolist())) if self.weights else []
        if unmatched:
            problem = "has no rows" if unmatched[0] in self.weights else "has no weight"
            raise ConfigError(
                f"The data source `{unmatched[0]}` {problem}: the sources in the data are "
                f"{', '.join(f'`{name}`' for name in names)}. Give each of these a weight; 0 leaves it out."
            )
        shares = np.array([self.weights.get(name, 1.0) for name in names.tolist()])
        return _WeightedOrder(rows, seed, [np.flatnonzero(source_of_row == s) for s in range(len(names))], shares)


class _WeightedOrder(RowOrder):
    def __init__(
        self, rows: int, seed: int, rows_by_source: Sequence[NDArray[np.int64]], shares: NDArray[np.float64]
    ) -> None:
        super().__init__(rows, seed)
        self._rows_by_source = rows_by_source
        self._shares = shares / shares.sum()
        self._epochs = [
            _EpochPermutations(len(source_rows), seed, source) for source, source_rows in enumerate(rows_by_source)
        ]
        self._taken = np.zeros(len(rows_by_source), np.int64)

    def next_row(self) -> int:
        deficit = np.where(self._shares > 0, self._shares * (self.position + 1) - self._taken, -np.inf)
        source = int(deficit.argmax())
        source_rows = self._rows_by_source[source]
        row = source_rows[self._epochs[source][divmod(int(self._taken[source]), len(source_rows))]]
        self._taken[source] += 1
        return int(row)

    def state(self) -> dict[str, Any]:
        return super().state() | {"taken": self._taken.tolist()}

    def restore(self, tree: Mapping[str, Any]) -> None:
        super().restore(tree)
        self._taken = np.array(tree["taken"], np.int64)


# -- a curriculum -----------------------------------------------------------------------------------------------------


class CurriculumSampler(Sampler):
    """Rows whose rollouts got different rewards come more often: a group with equal rewards has no advantage.

    Each row has a separate epoch. The row with the earliest epoch is next, in an order that is drawn for each epoch.
    A use moves a row to its next epoch; equal rewards of its group move it `cooldown` epochs further. So no row comes
    twice in an epoch, and a row with unequal rewards misses none. A row that was too hard or too easy returns later.
    """

    cooldown: int = Field(
        3, ge=1, description="epochs that a row is skipped after equal rewards; larger avoids useless rows for longer"
    )

    def start(self, rows: int, seed: int, sources: Sources = _no_sources) -> RowOrder:  # noqa: ARG002
        return _CurriculumOrder(rows, seed, self.cooldown)


class _CurriculumOrder(RowOrder):
    """The order of a curriculum. Its state is a sum over events, so late rewards give the same state."""

    def __init__(self, rows: int, seed: int, cooldown: int) -> None:
        super().__init__(rows, seed)
        self._cooldown = cooldown
        self._salt = _random_bits(1, seed)
        self._epochs = np.zeros(rows, np.int32)
        self._keys = self._sort_keys(np.arange(rows))

    def next_row(self) -> int:
        row = int(self._keys.argmin())
        self._advance_row(row, 1)
        return row

    def replay(self, ordinal: int, row: int) -> None:
        assert ordinal == self.position, f"the order is at {self.position}, not at {ordinal}"
        self._advance_row(row, 1)
        self.position += 1

    def record_rewards(self, row: int, rewards: Sequence[float]) -> None:
        """Skip a row for `cooldown` epochs if its group's rewards are equal. A group of one changes nothing."""
        if len(rewards) > 1 and has_zero_variance(min(rewards), max(rewards)):
            self._advance_row(row, self._cooldown)

    def state(self) -> dict[str, Any]:
        packed = zlib.compress(self._epochs.astype("<i4").tobytes())
        return super().state() | {"epochs": base64.b64encode(packed).decode()}

    def restore(self, tree: Mapping[str, Any]) -> None:
        super().restore(tree)
        packed = base64.b64decode(tree["epochs"])
        self._epochs = np.frombuffer(zlib.decompress(packed), "<i4").astype(np.int32)
        self._keys = self._sort_keys(np.arange(self.rows))

    def _advance_row(self, row: int, epochs: int) -> None:
        self._epochs[row] += epochs
        self._keys[row] = self._sort_keys(np.array([row]))[0]

    def _sort_keys(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the sort keys of rows: the epoch, plus a fraction that is drawn for the row in that epoch."""
        epochs = self._epochs[rows]
        bits = _splitmix64(_splitmix64(self._salt + epochs.astype(np.uint64)) + rows.astype(np.uint64))
        return epochs + (bits >> np.uint64(11)) * 2.0**-53


def _splitmix64(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply SplitMix64, a bijection of 64 bits whose results look random also for neighboring inputs."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


SAMPLERS: dict[str, type[Sampler]] = {
    "sequential": SequentialSampler,
    "shuffled": ShuffledSampler,
    "weighted": WeightedSampler,
    "curriculum": CurriculumSampler,
}
"""The samplers by name."""
