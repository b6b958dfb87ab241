"""Measurements that know how they are to be reduced.

A loss sees one micro-batch, a rank sees its share of the batch, a step sees all of them, and a plot wants one
number. A `Metric` carries what it takes to get there without bias: a mean keeps its weights, a maximum stays a
maximum. Metrics are merged as they travel (over micro-batches, ranks and steps) and turned into numbers once,
when a step is logged.

Values may be anything that `float()` accepts. They are kept as they are until they are reduced, so recording a
0-d tensor that lives on an accelerator does not wait for it. Hand in detached tensors that nobody writes to
afterwards: what is kept here keeps its graph alive.

Reduction happens in double precision and does not depend on the order in which shares arrived (except for
`Last`, whose point is the order). What was never measured is absent: a `Mean` of weight zero and a `Max` or `Min`
over nothing reduce to None and do not appear in a step. NaN and infinities are never dropped.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self, SupportsFloat, TypeVar

from etude.errors import DataError

__all__ = ["Last", "Max", "Mean", "Metric", "Metrics", "Min", "Sum", "WireMetrics"]

T = TypeVar("T")

WireMetrics = dict[str, tuple[str, tuple[float, ...]]]
"""Metrics as plain data: name -> (kind, numbers). Fit for pickle, msgpack or JSON."""

RESERVED = frozenset({"step", "time", "nonfinite"})
"""Names that a log line uses for itself."""


class Metric(ABC):
    """One measurement and its way of being reduced. Frozen: merging makes a new one."""

    __slots__ = ()
    kind: ClassVar[str]

    @abstractmethod
    def merge(self, other: Self) -> Self:
        """This and `other`, a later measurement of the same thing, as one."""

    @abstractmethod
    def value(self) -> float | None:
        """The number, or None where nothing was measured. Only here are tensors read."""

    @abstractmethod
    def to_wire(self) -> tuple[float, ...]:
        """The few plain numbers from which `from_wire` makes a metric that merges and reduces as this one."""

    @classmethod
    @abstractmethod
    def from_wire(cls, numbers: Sequence[float]) -> Self:
        """The metric that `to_wire` described."""


@dataclass(frozen=True, slots=True)
class Mean(Metric):
    """A weighted mean: the sum of its totals over the sum of its weights.

    Make one with `Mean.of(value, weight)` where a mean is at hand, or with `Mean.over(total, weight)` where a sum
    and a count are: a loss that has summed over its tokens hands in both and never divides.
    """

    kind = "mean"

    shares: tuple[tuple[SupportsFloat, SupportsFloat, SupportsFloat], ...] = ()
    """(amount, times, weight) per share: amount * times is its total. A share of weight 0 counts for nothing."""

    @classmethod
    def of(cls, value: SupportsFloat, weight: SupportsFloat = 1.0) -> Self:
        """A mean of `value`, known over `weight` items."""
        return cls(((value, weight, weight),))

    @classmethod
    def over(cls, total: SupportsFloat, weight: SupportsFloat) -> Self:
        """A mean known as its `total` over `weight` items."""
        return cls(((total, 1.0, weight),))

    def merge(self, other: Self) -> Self:
        return type(self)(self.shares + other.shares)

    def value(self) -> float | None:
        numbers = self.to_wire()
        return numbers[0] / numbers[1] if numbers else None

    def to_wire(self) -> tuple[float, ...]:
        shares = [(amount, times, weight) for amount, times, share in self.shares if (weight := float(share)) != 0.0]
        weight = _exact_sum(weight for _, _, weight in shares)
        if weight == 0.0:
            return ()
        return _exact_sum(float(amount) * float(times) for amount, times, _ in shares), weight

    @classmethod
    def from_wire(cls, numbers: Sequence[float]) -> Self:
        return cls.over(*numbers) if numbers else cls()


@dataclass(frozen=True, slots=True)
class _PooledMetric(Metric):
    """Values kept side by side until one number is made of them."""

    values: tuple[SupportsFloat, ...] = ()

    @classmethod
    def of(cls, value: SupportsFloat) -> Self:
        """The measurement of one value."""
        return cls((value,))

    def merge(self, other: Self) -> Self:
        return type(self)(self.values + other.values)

    def to_wire(self) -> tuple[float, ...]:
        value = self.value()
        return () if value is None else (value,)

    @classmethod
    def from_wire(cls, numbers: Sequence[float]) -> Self:
        return cls(tuple(numbers))


class Sum(_PooledMetric):
    """A total: tokens seen, seconds spent. A sum of nothing is 0."""

    __slots__ = ()
    kind = "sum"

    def value(self) -> float:
        return _exact_sum(float(value) for value in self.values)


class Max(_PooledMetric):
    """The largest value seen; NaN if any was NaN; None if there was none."""

    __slots__ = ()
    kind = "max"

    def value(self) -> float | None:
        return max(map(float, self.values), key=_nan_last, default=None)


class Min(_PooledMetric):
    """The smallest value seen; NaN if any was NaN; None if there was none."""

    __slots__ = ()
    kind = "min"

    def value(self) -> float | None:
        return min(map(float, self.values), key=_nan_first, default=None)


@dataclass(frozen=True, slots=True)
class Last(Metric):
    """The most recent value, for what is set and not measured: a learning rate, a policy version."""

    kind = "last"

    latest: SupportsFloat

    @classmethod
    def of(cls, value: SupportsFloat) -> Self:
        """The value as it stands now."""
        return cls(value)

    def merge(self, other: Self) -> Self:
        return other

    def value(self) -> float:
        return float(self.latest)

    def to_wire(self) -> tuple[float, ...]:
        return (self.value(),)

    @classmethod
    def from_wire(cls, numbers: Sequence[float]) -> Self:
        return cls(numbers[0])


KINDS: dict[str, type[Metric]] = {"mean": Mean, "sum": Sum, "max": Max, "min": Min, "last": Last}


class Metrics(Mapping[str, Metric]):
    """An ordered mapping from names to metrics, filled where things are measured and reduced once.

    >>> metrics = Metrics({"loss": Mean.over(total=6.0, weight=4)})
    >>> metrics.add("loss", Mean.over(total=1.0, weight=1))
    >>> metrics.reduce()
    {'loss': 1.4}
    """

    def __init__(self, metrics: Mapping[str, Metric] | None = None) -> None:
        # What was added under a name since it was last asked for: merged then, and not anew with each addition.
        self._parts: dict[str, list[Metric]] = {}
        if metrics is not None:
            self.merge(metrics)

    def __getitem__(self, name: str) -> Metric:
        parts = self._parts[name]
        while len(parts) > 1:
            pairs = zip(parts[::2], parts[1::2], strict=False)
            parts[:] = [*(first.merge(later) for first, later in pairs), *parts[len(parts) // 2 * 2 :]]
        return parts[0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __repr__(self) -> str:
        return f"Metrics({dict(self)!r})"

    def add(self, name: str, metric: Metric) -> None:
        """Record one metric; a name already present is merged with what it holds."""
        if not name or name in RESERVED:
            raise DataError(
                f"A metric cannot be named {name!r}: a log line uses that word itself. Choose another name."
            )
        parts = self._parts.setdefault(name, [])
        if parts and type(parts[0]) is not type(metric):
            raise DataError(
                f"The metric {name!r} was recorded as a {parts[0].kind} and is now recorded as a {metric.kind}; "
                "the two cannot be merged. Record it as the same kind everywhere, or under two names."
            )
        parts.append(metric)

    def merge(self, other: Mapping[str, Metric]) -> None:
        """Record everything in `other`, in its order."""
        for name, metric in other.items():
            self.add(name, metric)

    def with_prefix(self, prefix: str) -> Metrics:
        """The same metrics under longer names: `metrics.with_prefix("actor/")`."""
        return Metrics({prefix + name: metric for name, metric in self.items()})

    def reduce(self) -> dict[str, float]:
        """The numbers, in the order of recording, without those that were measured over nothing."""
        values = {name: _read(name, metric.value) for name, metric in self.items()}
        return {name: value for name, value in values.items() if value is not None}

    def to_wire(self) -> WireMetrics:
        """Plain data for another process: every tensor read, every name reduced to a few numbers."""
        return {name: (metric.kind, _read(name, metric.to_wire)) for name, metric in self.items()}

    @classmethod
    def from_wire(cls, wire: Mapping[str, tuple[str, Sequence[float]]]) -> Metrics:
        """The metrics that `to_wire` described."""
        metrics = cls()
        for name, (kind, numbers) in wire.items():
            if kind not in KINDS:
                raise DataError(f"The metric {name!r} arrived as a {kind!r}, which is none of {', '.join(KINDS)}.")
            metrics.add(name, KINDS[kind].from_wire(numbers))
        return metrics


def _read(name: str, numbers: Callable[[], T]) -> T:
    """What a metric's values come to; they are read here first, so it shows here if one of them is no number."""
    try:
        return numbers()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise DataError(
            f"The metric {name!r} cannot be read as one number: {error}. Hand in a scalar, such as a sum or a mean."
        ) from error


def _exact_sum(values: Iterable[float]) -> float:
    """The sum, correctly rounded and so independent of order; overflow and NaN show as they would in a plain sum."""
    numbers = list(values)
    try:
        return math.fsum(numbers)
    except (OverflowError, ValueError):
        return sum(numbers)


def _nan_last(value: float) -> tuple[bool, float]:
    return (math.isnan(value), value)


def _nan_first(value: float) -> tuple[bool, float]:
    return (not math.isnan(value), value)
