"""The laws of metrics: how they merge, what they reduce to, and that serialization keeps them."""

from __future__ import annotations

import itertools
import json
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import DataError
from etude.observe.metrics import KINDS, Last, Max, Mean, Metric, Metrics, Min, Sum

values = st.floats(allow_nan=True, allow_infinity=True, width=32)
finite = st.floats(-1e6, 1e6)
weights = st.one_of(st.just(0.0), st.floats(0.001, 1e6))


def metrics_of(kind: str) -> st.SearchStrategy[Metric]:
    if kind == "mean":
        return st.one_of(st.builds(Mean.of, values, weights), st.builds(Mean.over, values, weights), st.just(Mean()))
    one = st.builds(KINDS[kind].of, values)  # type: ignore[attr-defined]
    return one if kind == "last" else st.one_of(one, st.just(KINDS[kind]()))


def same(left: float | None, right: float | None) -> bool:
    return left == right or (left is not None and right is not None and math.isnan(left) and math.isnan(right))


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_merging_is_associative(kind: str, data: st.DataObject) -> None:
    a, b, c = (data.draw(metrics_of(kind)) for _ in range(3))
    assert same(a.merge(b).merge(c).value(), a.merge(b.merge(c)).value())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "last"])
@given(data=st.data())
def test_merging_is_commutative(kind: str, data: st.DataObject) -> None:
    a, b = data.draw(metrics_of(kind)), data.draw(metrics_of(kind))
    assert same(a.merge(b).value(), b.merge(a).value())


def test_last_keeps_the_later() -> None:
    assert Last.of(1.0).merge(Last.of(2.0)).value() == 2.0


@given(rows=st.lists(st.tuples(finite, weights), min_size=1, max_size=30), cuts=st.lists(st.integers(0, 30)))
def test_a_mean_over_micro_batches_is_the_mean_over_the_whole(rows: list[tuple[float, float]], cuts: list[int]) -> None:
    edges = sorted({0, len(rows), *(min(cut, len(rows)) for cut in cuts)})
    merged = Mean()
    for start, stop in itertools.pairwise(edges):
        part = rows[start:stop]
        merged = merged.merge(Mean.over(sum(v * w for v, w in part), sum(w for _, w in part)))
    total = sum(w for _, w in rows)
    mean = merged.value()
    if total == 0:
        assert mean is None
    else:
        assert mean == pytest.approx(sum(v * w for v, w in rows) / total, rel=1e-9, abs=1e-6)


@given(rows=st.lists(st.tuples(finite, weights), max_size=30))
def test_a_mean_is_the_weighted_mean_of_numpy(rows: list[tuple[float, float]]) -> None:
    merged = Mean()
    for value, weight in rows:
        merged = merged.merge(Mean.of(value, weight))
    mean = merged.value()
    if sum(weight for _, weight in rows) == 0:
        assert mean is None
    else:
        expected = np.average([value for value, _ in rows], weights=[weight for _, weight in rows])
        assert mean == pytest.approx(expected, rel=1e-9, abs=1e-6)


@given(amounts=st.permutations([1e16, 1.0, -1e16, 0.1, 3.0, 1e-9]))
def test_the_order_of_shares_does_not_change_a_bit(amounts: list[float]) -> None:
    total, mean = Sum(), Mean()
    for amount in amounts:
        total = total.merge(Sum.of(amount))
        mean = mean.merge(Mean.over(amount, 1))
    assert total.value() == math.fsum(amounts)
    assert mean.value() == math.fsum(amounts) / 6


@pytest.mark.parametrize("value", [1.0, math.nan, math.inf])
def test_a_share_of_weight_zero_counts_for_nothing(value: float) -> None:
    assert Mean.of(value, 0).value() is None
    assert Mean.over(value, 0).value() is None
    assert Mean.of(2.0, 3).merge(Mean.of(value, 0)).value() == 2.0


def test_a_metric_that_was_never_measured_is_absent() -> None:
    metrics = Metrics({"mean": Mean.of(1.0, 0), "max": Max(), "min": Min(), "sum": Sum()})
    assert metrics.reduce() == {"sum": 0.0}


@pytest.mark.parametrize("order", [(1.0, math.nan, 2.0), (math.nan, 1.0, 2.0), (1.0, 2.0, math.nan)])
@pytest.mark.parametrize("kind", [Max, Min, Sum])
def test_a_nan_is_never_dropped(kind: type[Max] | type[Min] | type[Sum], order: tuple[float, ...]) -> None:
    assert math.isnan(kind(order).value() or 0.0)
    assert math.isnan(Mean.of(math.nan).merge(Mean.of(1.0)).value() or 0.0)


def test_infinities_and_overflow_show() -> None:
    assert Sum((math.inf, 1.0)).value() == math.inf
    assert math.isnan(Sum((math.inf, -math.inf)).value())
    assert Sum((1e308, 1e308)).value() == math.inf
    assert Max((1.0, math.inf)).value() == math.inf
    assert Min((1.0, -math.inf)).value() == -math.inf


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_serialization_changes_neither_the_number_nor_the_merge(kind: str, data: st.DataObject) -> None:
    a, b = data.draw(metrics_of(kind)), data.draw(metrics_of(kind))
    wire = json.loads(json.dumps(Metrics({"x": a}).to_wire()))
    arrived = Metrics.from_wire(wire)["x"]
    assert type(arrived) is type(a)
    assert same(arrived.value(), a.value())
    merged, direct = arrived.merge(b).value(), a.merge(b).value()
    assert same(merged, direct) or merged == pytest.approx(direct, rel=1e-9, nan_ok=True)


def test_serialized_metrics_are_plain_numbers_even_from_tensors() -> None:
    wire = Metrics({"loss": Mean.over(torch.tensor(6.0), torch.tensor(4)), "lr": Last.of(np.float32(0.5))}).to_wire()
    assert wire == {"loss": ("mean", (6.0, 4.0)), "lr": ("last", (0.5,))}
    assert all(type(number) is float for _, numbers in wire.values() for number in numbers)
    assert pickle.loads(pickle.dumps(wire)) == wire


def test_an_unknown_serialized_kind_is_named() -> None:
    with pytest.raises(DataError, match=r"'loss' arrived as a 'median', which is none of mean, sum, max, min, last"):
        Metrics.from_wire({"loss": ("median", (1.0,))})


class Watched:
    """A number that records when it is read."""

    def __init__(self, value: float) -> None:
        self.value, self.reads = value, 0

    def __float__(self) -> float:
        self.reads += 1
        return self.value


@pytest.mark.parametrize(
    ("make", "expected"), [(Mean.of, 1.5), (Sum.of, 3.0), (Max.of, 2.0), (Min.of, 1.0), (Last.of, 2.0)]
)
def test_a_value_is_not_read_before_it_is_reduced(make: Callable[[Watched], Metric], expected: float) -> None:
    first, second = Watched(1.0), Watched(2.0)
    metrics = Metrics({"x": make(first)})
    metrics.add("x", make(second))
    longer = metrics.with_prefix("actor/")
    assert first.reads == second.reads == 0
    assert longer.reduce() == {"actor/x": expected}
    assert second.reads > 0


def test_low_precision_values_are_weighed_in_double_precision() -> None:
    value = torch.tensor(0.1, dtype=torch.bfloat16)
    assert Mean.of(value, 3).value() == pytest.approx(float(value), rel=1e-15)


def test_two_kinds_under_one_name_are_refused_by_name() -> None:
    metrics = Metrics({"actor/loss": Mean.of(1.0)})
    with pytest.raises(DataError, match="'actor/loss' was recorded as a mean and is now recorded as a sum"):
        metrics.add("actor/loss", Sum.of(1.0))
    assert metrics.reduce() == {"actor/loss": 1.0}


@pytest.mark.parametrize("name", ["", "step", "time", "nonfinite"])
def test_names_that_a_log_line_uses_are_refused(name: str) -> None:
    with pytest.raises(DataError, match="cannot be named"):
        Metrics({name: Sum.of(1.0)})


@pytest.mark.parametrize("value", [torch.ones(2), np.ones(3), "many", None, 10**400], ids=lambda value: type(value))
@pytest.mark.parametrize("kind", KINDS)
def test_a_value_that_is_not_one_number_is_refused_by_name(kind: str, value: object) -> None:
    metrics = Metrics({"fine": Sum.of(1.0), "actor/loss": KINDS[kind].of(value)})  # type: ignore[attr-defined]
    for read in (metrics.reduce, metrics.to_wire):
        with pytest.raises(
            DataError, match=r"The metric 'actor/loss' cannot be read as one number: .*Hand in a scalar"
        ):
            read()


@dataclass(frozen=True)
class Counting(Sum):
    """A sum that counts the copies made by merging."""

    copied: ClassVar[list[int]] = []

    def merge(self, other: Self) -> Self:
        merged = type(self)(self.values + other.values)
        self.copied.append(len(merged.values))
        return merged


@pytest.mark.parametrize("count", [1, 2, 3, 1000, 1024])
def test_adding_much_under_one_name_copies_little(count: int) -> None:
    Counting.copied.clear()
    metrics = Metrics()
    for value in range(count):
        metrics.add("tokens", Counting.of(value))
    held = metrics["tokens"]
    assert isinstance(held, Counting) and held.values == tuple(range(count))
    assert sum(Counting.copied) <= count * math.ceil(math.log2(count))
    metrics.add("tokens", Counting.of(1))
    assert held.values == tuple(range(count)) and metrics.reduce() == {"tokens": sum(range(count)) + 1}


def test_metrics_keep_their_order_and_merge_by_name() -> None:
    metrics = Metrics({"b": Sum.of(1), "a": Sum.of(2)})
    metrics.merge({"c": Max.of(5), "b": Sum.of(10)})
    assert list(metrics.reduce().items()) == [("b", 11.0), ("a", 2.0), ("c", 5.0)]
    assert list(metrics.with_prefix("p/")) == ["p/b", "p/a", "p/c"]
    assert len(metrics) == 3
    assert "Sum" in repr(metrics)
