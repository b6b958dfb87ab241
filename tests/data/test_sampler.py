"""Samplers go through the data without skipping or repeating, and a restored one continues as if never stopped."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.data import DataConfig, RowOrder, Sampler
from etude.data.sampler import SAMPLERS, CurriculumSampler, SequentialSampler, ShuffledSampler, Sources, WeightedSampler
from etude.errors import ConfigError


class Backwards(Sampler):
    """A plug-in: the last row first."""

    def start(self, rows: int, seed: int, sources: Sources = tuple) -> RowOrder:
        return _BackwardsOrder(rows, seed)


class _BackwardsOrder(RowOrder):
    def next_row(self) -> int:
        return -1 - self.position % self.rows + self.rows


every = st.sampled_from([*(kind() for kind in SAMPLERS.values()), CurriculumSampler(cooldown=1), Backwards()])
sizes = st.integers(1, 12)
seeds = st.integers(0, 2**63 - 1)


def started(sampler: Sampler, rows: int, seed: int) -> RowOrder:
    """Return a sampler over rows of three sources."""
    return sampler.start(rows, seed, lambda: [("a", "b", "c")[row % 3] for row in range(rows)])


def drawn_rows(order: RowOrder, first: int, count: int, rng: np.random.Generator) -> list[int]:
    """Draw rows one by one; each answer has rewards that are mixed or all equal at random."""
    rows_drawn = []
    for ordinal in range(first, first + count):
        rows_drawn.append(order.advance_to(ordinal))
        order.record_rewards(rows_drawn[-1], rng.integers(0, 2, 2).tolist())
    return rows_drawn


@given(every, sizes, seeds, st.integers(0, 40))
def test_a_restored_order_has_the_same_future(sampler: Sampler, rows: int, seed: int, before: int) -> None:
    order = started(sampler, rows, seed)
    drawn_rows(order, 0, before, np.random.default_rng(0))
    tree = json.loads(json.dumps(order.state()))
    again = started(sampler, rows, seed)
    again.restore(tree)
    assert again.state() == tree
    assert drawn_rows(again, before, 40, np.random.default_rng(1)) == drawn_rows(
        order, before, 40, np.random.default_rng(1)
    )
    assert again.state() == order.state()


@given(every, sizes, seeds, st.integers(0, 20), st.integers(1, 20))
def test_an_order_continues_after_a_replayed_journal(
    sampler: Sampler, rows: int, seed: int, saved: int, replayed: int
) -> None:
    """A resumed run replays the rows that it used after the checkpoint, before their rewards are known."""
    order = started(sampler, rows, seed)
    drawn_rows(order, 0, saved, np.random.default_rng(0))
    tree = order.state()
    journal = drawn_rows(order, saved, replayed, np.random.default_rng(1))
    again = started(sampler, rows, seed)
    again.restore(tree)
    for ordinal, row in enumerate(journal, saved):
        again.replay(ordinal, row)
    rng = np.random.default_rng(1)
    for row in journal:
        again.record_rewards(row, rng.integers(0, 2, 2).tolist())
    assert again.state() == order.state()


@given(st.sampled_from([SequentialSampler(), ShuffledSampler(), Backwards()]), sizes, seeds)
def test_every_epoch_has_every_row_once(sampler: Sampler, rows: int, seed: int) -> None:
    order = started(sampler, rows, seed)
    for epoch in range(3):
        rows_drawn = [order.advance_to(epoch * rows + n) for n in range(rows)]
        assert sorted(rows_drawn) == list(range(rows))


@given(every, sizes, seeds, st.integers(0, 30))
def test_skipped_ordinals_do_not_change_later_rows(sampler: Sampler, rows: int, seed: int, ordinal: int) -> None:
    one, other = started(sampler, rows, seed), started(sampler, rows, seed)
    assert [one.advance_to(n) for n in range(ordinal + 1)][-1] == other.advance_to(ordinal)


def test_sequential_is_the_order_of_the_file() -> None:
    order = SequentialSampler().start(3, 0)
    assert [order.advance_to(n) for n in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_shuffles_depend_on_the_seed_and_the_epoch_alone() -> None:
    def epochs(seed: int) -> list[list[int]]:
        order = ShuffledSampler().start(50, seed)
        return [[order.advance_to(epoch * 50 + n) for n in range(50)] for epoch in range(2)]

    assert epochs(1) == epochs(1)
    assert len({tuple(epoch) for seed in (1, 2) for epoch in epochs(seed)}) == 4


def test_a_shuffle_is_the_same_on_every_machine_and_version() -> None:
    """A resumed run must find the order it left: these are the rows of seed 7, written down."""
    order = ShuffledSampler().start(8, 7)
    assert [order.advance_to(n) for n in range(16)] == [4, 3, 6, 2, 1, 0, 5, 7, 7, 6, 1, 4, 3, 2, 5, 0]
    curriculum = CurriculumSampler().start(8, 7)
    assert [curriculum.advance_to(n) for n in range(16)] == [1, 2, 3, 0, 6, 7, 4, 5, 1, 0, 2, 6, 4, 5, 7, 3]


def test_shuffled_positions_are_uniform() -> None:
    """The position of row 0 of 5, over 2000 epochs: the bound is five standard errors."""
    order = ShuffledSampler().start(5, 0)
    places = Counter(n % 5 for n in range(10_000) if order.advance_to(n) == 0)
    assert all(abs(count - 400) < 5 * (2000 * 0.2 * 0.8) ** 0.5 for count in places.values())


# -- weighted ---------------------------------------------------------------------------------------------------------

SOURCES = ["a"] * 3 + ["b"] * 10 + ["c"] * 2


@given(st.lists(st.integers(0, 5), min_size=3, max_size=3).filter(any), seeds)
def test_shares_are_kept_at_every_moment(weights: list[int], seed: int) -> None:
    order = WeightedSampler(weights=dict(zip("abc", map(float, weights), strict=True))).start(15, seed, lambda: SOURCES)
    seen: Counter[str] = Counter()
    for n in range(60):
        seen[SOURCES[order.advance_to(n)]] += 1
        for source, weight in zip("abc", weights, strict=True):
            assert abs(seen[source] - (n + 1) * weight / sum(weights)) < 2


@given(seeds)
def test_no_row_of_a_source_comes_again_before_all_of_it(seed: int) -> None:
    order = WeightedSampler().start(15, seed, lambda: SOURCES)
    rows_drawn = [order.advance_to(n) for n in range(90)]
    for source in "abc":
        mine = [row for row in rows_drawn if SOURCES[row] == source]
        size = SOURCES.count(source)
        for start in range(0, len(mine) - size + 1, size):
            assert len(set(mine[start : start + size])) == size


def test_a_weight_without_a_source_is_reported() -> None:
    with pytest.raises(ConfigError, match="source `c` has no weight: the sources in the data are `a`, `b`, `c`"):
        WeightedSampler(weights={"a": 1, "b": 2}).start(15, 0, lambda: SOURCES)
    with pytest.raises(ConfigError, match="source `d` has no rows"):
        WeightedSampler(weights={"a": 1, "b": 2, "c": 1, "d": 1}).start(15, 0, lambda: SOURCES)
    with pytest.raises(ConfigError, match="0 or more, with one above 0"):
        WeightedSampler(weights={"a": 0.0})


# -- the curriculum ---------------------------------------------------------------------------------------------------


def rewarded(row: int) -> Sequence[float]:
    """Record rewards: rows from 20 on have equal rewards."""
    return (1.0, 0.0) if row < 20 else (1.0, 1.0)


@given(seeds)
def test_rows_with_equal_rewards_come_less_often_and_none_twice_in_an_epoch(seed: int) -> None:
    order = CurriculumSampler(cooldown=3).start(40, seed)
    rows_drawn = []
    for ordinal in range(40 + 3 * 20 + 40):  # an epoch of all, three without the rows of equal rewards, one of all
        rows_drawn.append(order.advance_to(ordinal))
        order.record_rewards(rows_drawn[-1], rewarded(rows_drawn[-1]))
    teaching, everything = set(range(20)), set(range(40))
    epochs = [rows_drawn[:40], rows_drawn[40:60], rows_drawn[60:80], rows_drawn[80:100], rows_drawn[100:]]
    for epoch, rows in zip(epochs, [everything, *[teaching] * 3, everything], strict=True):
        assert len(epoch) == len(rows) and set(epoch) == rows


def test_each_epoch_of_a_curriculum_has_an_order_of_its_own() -> None:
    order = CurriculumSampler().start(50, 0)
    epochs = [tuple(order.advance_to(epoch * 50 + n) for n in range(50)) for epoch in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({*epochs, tuple(CurriculumSampler().start(50, 1).advance_to(n) for n in range(50))}) == 4


def test_the_first_rows_of_a_curriculum_are_uniform() -> None:
    """The first of 4 rows, over 2000 seeds: the bound is five standard errors."""
    first = Counter(CurriculumSampler().start(4, seed).advance_to(0) for seed in range(2000))
    assert all(abs(first[row] - 500) < 5 * (2000 * 0.25 * 0.75) ** 0.5 for row in range(4))


def test_a_group_of_one_does_not_count_as_equal_rewards() -> None:
    order = CurriculumSampler().start(4, 3)
    for n in range(4):
        row = order.advance_to(n)
        order.record_rewards(row, (0.0,) if row < 2 else (0.0, 0.0))
    assert {order.advance_to(n) for n in range(4, 6)} == {0, 1}


def test_rewards_that_differ_by_rounding_count_as_equal_rewards() -> None:
    order = CurriculumSampler().start(4, 3)
    for n in range(4):
        row = order.advance_to(n)
        order.record_rewards(row, (0.1, 0.3) if row < 2 else (0.3, 0.1 + 0.2))
    assert {order.advance_to(n) for n in range(4, 6)} == {0, 1}


def test_a_state_over_many_rows_is_small() -> None:
    order = CurriculumSampler().start(1_000_000, 0)
    for n in range(1000):
        order.record_rewards(order.advance_to(n), (1.0, 1.0))
    assert len(json.dumps(order.state())) < 200_000


# -- restoring and choosing -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampler", "rows", "seed", "message"),
    [
        (ShuffledSampler(), 9, 5, "saved with rows 10, and rows is now 9: .* Resume with the data"),
        (ShuffledSampler(), 10, 6, "saved with seed 5, and seed is now 6"),
        (SequentialSampler(), 10, 5, "now _SequentialOrder: .* Resume with the sampler"),
        (CurriculumSampler(), 10, 5, "with order _ShuffledOrder, and order is now _CurriculumOrder"),
    ],
)
def test_the_state_of_another_order_is_refused(sampler: Sampler, rows: int, seed: int, message: str) -> None:
    tree: dict[str, Any] = ShuffledSampler().start(10, 5).state()
    with pytest.raises(ConfigError, match=message):
        sampler.start(rows, seed).restore(tree)


def test_samplers_are_chosen_by_name_or_as_a_plug_in() -> None:
    assert [type(DataConfig(sampler=name).sampler) for name in SAMPLERS] == list(SAMPLERS.values())  # type: ignore[arg-type]
    chosen = DataConfig.model_validate({"sampler": f"{__name__}:Backwards"}).sampler
    order = chosen.start(3, 0)
    assert [order.advance_to(n) for n in range(4)] == [2, 1, 0, 2]
