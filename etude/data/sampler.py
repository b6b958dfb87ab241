"""In which order a run asks the rows of its data.

A sampler is a frozen choice; the `Order` that it starts is where a run stands in it. An order is exact: its state is a
JSON tree, and one that is restored goes on as if it had never stopped. All chance comes from the run's seed and what is
drawn for (an epoch, a source), through raw generator output that no version of numpy changes.
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

__all__ = ["SAMPLERS", "Curriculum", "Order", "Sampler", "Sequential", "Shuffled", "Weighted"]

Sources = Callable[[], Sequence[str]]


def _no_sources() -> Sequence[str]:
    return ()


class Sampler(Config):
    """A way of ordering rows. A curriculum of one's own derives from it and starts an `Order` of its own."""

    @abstractmethod
    def start(self, rows: int, seed: int, sources: Sources = _no_sources) -> Order:
        """The order of a run over so many rows. `sources` tells each row's data source, if it is needed."""


class Order(ABC):
    """Where a run stands in its order. Each ordinal is asked for once, in increasing order.

    One that learns from rewards overrides `saw`, and with it `again`: when a run is taken up, the tasks that were asked
    after its checkpoint are told before anything else, while what they earned may be told later than it was.
    """

    def __init__(self, rows: int, seed: int) -> None:
        self.rows, self.seed = rows, seed
        self.position = 0
        """The next ordinal."""

    def row(self, ordinal: int) -> int:
        """The row that is asked as this ordinal. Ordinals passed over have been asked, and are gone."""
        assert ordinal >= self.position, f"the order stands at {self.position}, past {ordinal}"
        while True:
            row = self.following()
            self.position += 1
            if self.position > ordinal:
                return row

    @abstractmethod
    def following(self) -> int:
        """The row of the ordinal `position`; called once for each."""

    def again(self, ordinal: int, row: int) -> None:
        """The next ordinal was asked as this row before the run was taken up: go on behind it."""
        found = self.row(ordinal)
        assert found == row, f"ordinal {ordinal} was row {row}, and this order has {found}"

    def saw(self, row: int, rewards: Sequence[float]) -> None:  # noqa: B027  (most orders do not look)
        """What the rollouts of a row's group earned."""

    def state(self) -> dict[str, Any]:
        """Where it stands, as a JSON tree."""
        return {"order": type(self).__name__, "rows": self.rows, "seed": self.seed, "position": self.position}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Stand where `state` was taken. Another order cannot be gone on with, and says so."""
        mine = {"order": type(self).__name__, "rows": self.rows, "seed": self.seed}
        changed = [name for name in mine if tree[name] != mine[name]]
        if changed:
            name = changed[0]
            remedy = {"order": "sampler", "rows": "data, and the limits on its prompts,", "seed": "seed"}[name]
            raise ConfigError(
                f"The order of the data was saved with {name} {tree[name]}, and {name} is now {mine[name]}: no "
                f"row would be where it was. Resume with the {remedy} that the run began with."
            )
        self.position = tree["position"]


def _draw(count: int, *key: int) -> NDArray[np.uint64]:
    """That many numbers, each of 64 random bits, for this key and no other."""
    return np.random.Philox(np.random.SeedSequence(key)).random_raw(count)


class _Epochs:
    """A permutation for each epoch, drawn when the epoch begins."""

    def __init__(self, rows: int, *key: int) -> None:
        self._rows, self._key = rows, key
        self._epoch = -1
        self._order = np.empty(0, np.int64)

    def __getitem__(self, place: tuple[int, int]) -> int:
        """The row at a place of an epoch."""
        epoch, index = place
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.argsort(_draw(self._rows, *self._key, epoch), kind="stable")
        return int(self._order[index])


# -- rows as they stand -----------------------------------------------------------------------------------------------


class Sequential(Sampler):
    """Rows as they stand in the files, over and over."""

    def start(self, rows: int, seed: int, sources: Sources = _no_sources) -> Order:  # noqa: ARG002
        return _SequentialOrder(rows, seed)


class _SequentialOrder(Order):
    def following(self) -> int:
        return self.position % self.rows


# -- shuffled ---------------------------------------------------------------------------------------------------------


class Shuffled(Sampler):
    """Every row once in each epoch, in a new order each time."""

    def start(self, rows: int, seed: int, sources: Sources = _no_sources) -> Order:  # noqa: ARG002
        return _ShuffledOrder(rows, seed)


class _ShuffledOrder(Order):
    @cached_property
    def _epochs(self) -> _Epochs:
        return _Epochs(self.rows, self.seed)

    def following(self) -> int:
        return self._epochs[divmod(self.position, self.rows)]


# -- weighted by data source ------------------------------------------------------------------------------------------


class Weighted(Sampler):
    """Data sources in fixed shares, each shuffled: no row of a source again before all of it was asked.

    Shares are kept at every moment and not only on average: the source that is furthest behind its share is next.
    """

    weights: dict[str, float] = Field({}, description="the share of each data source; empty is equal shares")

    @model_validator(mode="after")
    def _shares(self) -> Weighted:
        if self.weights and not (min(self.weights.values()) >= 0 < sum(self.weights.values()) < np.inf):
            raise ConfigError(f"`weights` must be from 0 on, with one above 0; they are {self.weights}.")
        return self

    def start(self, rows: int, seed: int, sources: Sources = _no_sources) -> Order:
        of_row = np.array(sources(), dtype=np.str_)
        assert len(of_row) == rows, f"{rows} rows have {len(of_row)} sources"
        there, which = np.unique(of_row, return_inverse=True)
        odd = sorted(self.weights.keys() ^ set(there.tolist())) if self.weights else []
        if odd:
            said = "has no rows" if odd[0] in self.weights else "has no weight"
            raise ConfigError(
                f"The data source `{odd[0]}` {said}: the data is of {', '.join(f'`{name}`' for name in there)}. "
                f"Give each of these a weight; 0 leaves it out."
            )
        shares = np.array([self.weights.get(name, 1.0) for name in there.tolist()])
        return _WeightedOrder(rows, seed, [np.flatnonzero(which == s) for s in range(len(there))], shares)


class _WeightedOrder(Order):
    def __init__(self, rows: int, seed: int, members: Sequence[NDArray[np.int64]], shares: NDArray[np.float64]) -> None:
        super().__init__(rows, seed)
        self._members, self._shares = members, shares / shares.sum()
        self._epochs = [_Epochs(len(mine), seed, source) for source, mine in enumerate(members)]
        self._taken = np.zeros(len(members), np.int64)

    def following(self) -> int:
        behind = np.where(self._shares > 0, self._shares * (self.position + 1) - self._taken, -np.inf)
        source = int(behind.argmax())
        mine = self._members[source]
        row = mine[self._epochs[source][divmod(int(self._taken[source]), len(mine))]]
        self._taken[source] += 1
        return int(row)

    def state(self) -> dict[str, Any]:
        return super().state() | {"taken": self._taken.tolist()}

    def restore(self, tree: Mapping[str, Any]) -> None:
        super().restore(tree)
        self._taken = np.array(tree["taken"], np.int64)


# -- a curriculum -----------------------------------------------------------------------------------------------------


class Curriculum(Sampler):
    """Mostly rows whose rollouts differed: where all earn the same, comparing them teaches nothing.

    Each row has an epoch of its own, and the row in the earliest is next, in an order that each epoch draws anew. To be
    asked takes a row to its next epoch; rewards that were all equal take it `rest` epochs further. So no row comes
    twice in an epoch, one that teaches misses none, and one that was too hard, or too easy, is tried again later.
    """

    rest: int = Field(3, ge=1, description="how many epochs a row is left out whose rollouts all earned the same")

    def start(self, rows: int, seed: int, sources: Sources = _no_sources) -> Order:  # noqa: ARG002
        return _CurriculumOrder(rows, seed, self.rest)


class _CurriculumOrder(Order):
    """Its state is a sum over what happened, and so does not depend on when it was told of it."""

    def __init__(self, rows: int, seed: int, rest: int) -> None:
        super().__init__(rows, seed)
        self._rest = rest
        self._salt = _draw(1, seed)
        self._epochs = np.zeros(rows, np.int32)
        self._places = self._place(np.arange(rows))

    def following(self) -> int:
        row = int(self._places.argmin())
        self._move(row, 1)
        return row

    def again(self, ordinal: int, row: int) -> None:
        assert ordinal == self.position, f"the order stands at {self.position}, not at {ordinal}"
        self._move(row, 1)
        self.position += 1

    def saw(self, row: int, rewards: Sequence[float]) -> None:
        """A group of one compares with nothing, and says nothing here."""
        if len(rewards) > 1 and min(rewards) == max(rewards):
            self._move(row, self._rest)

    def state(self) -> dict[str, Any]:
        packed = zlib.compress(self._epochs.astype("<i4").tobytes())
        return super().state() | {"epochs": base64.b64encode(packed).decode()}

    def restore(self, tree: Mapping[str, Any]) -> None:
        super().restore(tree)
        packed = base64.b64decode(tree["epochs"])
        self._epochs = np.frombuffer(zlib.decompress(packed), "<i4").astype(np.int32)
        self._places = self._place(np.arange(self.rows))

    def _move(self, row: int, epochs: int) -> None:
        self._epochs[row] += epochs
        self._places[row] = self._place(np.array([row]))[0]

    def _place(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Where rows stand: the epoch, and a fraction that is drawn for the row in that epoch."""
        epochs = self._epochs[rows]
        bits = _mixed(_mixed(self._salt + epochs.astype(np.uint64)) + rows.astype(np.uint64))
        return epochs + (bits >> np.uint64(11)) * 2.0**-53


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64: a bijection of 64 bits after which neighbours have nothing in common."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


SAMPLERS: dict[str, type[Sampler]] = {
    "sequential": Sequential,
    "shuffled": Shuffled,
    "weighted": Weighted,
    "curriculum": Curriculum,
}
"""By the names that choose them."""
