"""Metrics that carry their own reduction.

A loss sees one micro-batch, a rank its share of the batch, and a step all shares; a plot needs one number. A `Metric`
keeps the data for an unbiased reduction: a mean keeps its weights, a maximum stays a maximum. Metrics are merged over
micro-batches, ranks and steps, and become numbers once, when a step is logged.

A value may be anything that `float()` accepts. It is stored unread until the reduction, so that recording a 0-d tensor
on an accelerator does not wait for the device. Tensors must be detached, and must not be written to afterwards: a
stored tensor keeps its autograd graph alive.

Reduction uses double precision, and does not depend on the order of the shares (except for `Last`, which is about the
order). A metric without measurements is absent: a `Mean` of weight zero, and a `Max` or `Min` of no values, reduce to
None and do not appear in a step. NaN and infinities are never dropped.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self, SupportsFloat, TypeVar

from etude.errors import DataError

T = TypeVar("T")

WireMetrics = dict[str, tuple[str, tuple[float, ...]]]
"""Metrics as plain data, for pickle, msgpack or JSON: name -> (kind, numbers)."""

RESERVED = frozenset({"step", "time", "nonfinite"})
"""Names of the other fields of a log line."""


class Metric(ABC):
    """One measurement with its reduction. It is frozen: merging returns a new metric."""

    __slots__ = ()
    kind: ClassVar[str]

    @abstractmethod
    def merge(self, other: Self) -> Self:
        """Merge with a later measurement of the same name."""

    @abstractmethod
    def value(self) -> float | None:
        """Return the number, or None without measurements. Only this method and `to_wire` read tensors."""

    @abstractmethod
    def to_wire(self) -> tuple[float, ...]:
        """Return a few plain numbers, from which `from_wire` makes an equivalent metric."""

    @classmethod
    @abstractmethod
    def from_wire(cls, numbers: Sequence[float]) -> Self:
        """Rebuild a metric from the numbers of `to_wire`."""


@dataclass(frozen=True, slots=True)
class Mean(Metric):
    """A weighted mean: the sum of its totals over the sum of its weights.

    Use `Mean.of(value, weight)` for a known mean, and `Mean.over(total, weight)` for a sum and a count. A loss that
    has summed over its tokens passes both, and never divides.
    """

    kind = "mean"

    shares: tuple[tuple[SupportsFloat, SupportsFloat, SupportsFloat], ...] = ()
    """(amount, times, weight) of each share; amount * times is its total. A share of weight 0 is ignored."""

    @classmethod
    def of(cls, value: SupportsFloat, weight: SupportsFloat = 1.0) -> Self:
        """Return the mean of `weight` items, from the mean."""
        return cls(((value, weight, weight),))

    @classmethod
    def over(cls, total: SupportsFloat, weight: SupportsFloat) -> Self:
        """Return the mean of `weight` items, from their total."""
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
    """A metric that stores its values until the reduction."""

    values: tuple[SupportsFloat, ...] = ()

    @classmethod
    def of(cls, value: SupportsFloat) -> Self:
        """Return the metric of one value."""
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
        return max(map(float, self.values), key=lambda value: (math.isnan(value), value), default=None)


class Min(_PooledMetric):
    """The smallest value seen; NaN if any was NaN; None if there was none."""

    __slots__ = ()
    kind = "min"

    def value(self) -> float | None:
        return min(map(float, self.values), key=lambda value: (not math.isnan(value), value), default=None)


@dataclass(frozen=True, slots=True)
class Last(Metric):
    """The most recent value, for quantities that are set and not measured: a learning rate, a policy version."""

    kind = "last"

    latest: SupportsFloat

    @classmethod
    def of(cls, value: SupportsFloat) -> Self:
        """Return the metric of the current value."""
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
    """An ordered mapping from names to metrics, filled during a step and reduced once.

    >>> metrics = Metrics({"loss": Mean.over(total=6.0, weight=4)})
    >>> metrics.add("loss", Mean.over(total=1.0, weight=1))
    >>> metrics.reduce()
    {'loss': 1.4}
    """

    def __init__(self, metrics: Mapping[str, Metric] | None = None) -> None:
        # The metrics added under each name. They are merged when the name is read, not at each addition.
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
        """Record one metric, and merge it with an earlier one of the same name."""
        if not name or name in RESERVED:
            raise DataError(
                f"A metric cannot be named {name!r}: a log line uses that name itself. Choose another name."
            )
        parts = self._parts.setdefault(name, [])
        if parts and type(parts[0]) is not type(metric):
            raise DataError(
                f"The metric {name!r} was recorded as a {parts[0].kind} and is now recorded as a {metric.kind}; "
                "the two cannot be merged. Record it as the same kind everywhere, or under two names."
            )
        parts.append(metric)

    def merge(self, other: Mapping[str, Metric]) -> None:
        """Record all metrics of `other`, in their order."""
        for name, metric in other.items():
            self.add(name, metric)

    def with_prefix(self, prefix: str) -> Metrics:
        """Return the same metrics under longer names: `metrics.with_prefix("actor/")`."""
        return Metrics({prefix + name: metric for name, metric in self.items()})

    def reduce(self) -> dict[str, float]:
        """Return the numbers in the order of recording, without metrics that have no measurements."""
        values = {name: _read(name, metric.value) for name, metric in self.items()}
        return {name: value for name, value in values.items() if value is not None}

    def to_wire(self) -> WireMetrics:
        """Return plain data for another process: read every tensor, and reduce every name to a few numbers."""
        return {name: (metric.kind, _read(name, metric.to_wire)) for name, metric in self.items()}

    @classmethod
    def from_wire(cls, wire: Mapping[str, tuple[str, Sequence[float]]]) -> Metrics:
        """Rebuild the metrics from the data of `to_wire`."""
        metrics = cls()
        for name, (kind, numbers) in wire.items():
            if kind not in KINDS:
                raise DataError(f"The metric {name!r} arrived as a {kind!r}, which is none of {', '.join(KINDS)}.")
            metrics.add(name, KINDS[kind].from_wire(numbers))
        return metrics


def _read(name: str, numbers: Callable[[], T]) -> T:
    """Read a metric's values, and raise a `DataError` if one of them is not a number."""
    try:
        return numbers()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise DataError(
            f"The metric {name!r} cannot be read as one number: {error}. Hand in a scalar, such as a sum or a mean."
        ) from error


def _exact_sum(values: Iterable[float]) -> float:
    """Return the correctly rounded sum, which does not depend on the order. Overflow and NaN are as in a plain sum."""
    numbers = list(values)
    try:
        return math.fsum(numbers)
    except (OverflowError, ValueError):
        return sum(numbers)
