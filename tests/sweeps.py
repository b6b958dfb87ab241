"""One test for a property of many items: it tries them all, and names each that fails.

`@pytest.mark.parametrize` creates a test for each item. Every process collects it, and that costs more than a quick
property takes. Parametrization stays right for items that take long, or need a separate fixture: a sweep's items share
theirs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

Test = Callable[..., None]


class SweepError(ExceptionGroup[Exception], AssertionError):
    """Items that fail, each with its own error."""


def sweep(names: str | tuple[str, ...], values: Iterable[Any]) -> Callable[[Test], Test]:
    """Let a test try each of these values, given as `pytest.mark.parametrize` takes them."""
    keys = (names,) if isinstance(names, str) else names
    rows = [dict(zip(keys, (value,) if len(keys) == 1 else value, strict=True)) for value in values]

    def over(test: Test) -> Test:
        def swept(*args: Any, **kwargs: Any) -> None:
            if args or not kwargs.keys().isdisjoint(keys):  # a single item, chosen by the caller
                return test(*args, **kwargs)
            failed: dict[str, Exception] = {}
            for row in rows:
                try:
                    test(**row, **kwargs)
                except Exception as error:
                    error.add_note(f"This is of {_said(row)}.")
                    failed[_said(row)] = error
            if failed:
                raise SweepError(f"{len(failed)} of {len(rows)} fail: {'; '.join(failed)}", [*failed.values()])
            return None

        signature = inspect.signature(test)
        left = [parameter for name, parameter in signature.parameters.items() if name not in keys]
        swept.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        swept.swept = test  # type: ignore[attr-defined]
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            setattr(swept, name, getattr(test, name))
        return swept

    return over


def later(values: Iterable[Any], *, every: int = 4) -> list[Any]:
    """Return values for `pytest.mark.parametrize`: `make check` tries the first few, and `make test` all."""
    parameters = []
    for place, value in enumerate(values):
        given = value if isinstance(value, tuple) else (value,)
        parameters.append(value if place % every == 0 else pytest.param(*given, marks=pytest.mark.slow))
    return parameters


def inner(test: Test) -> Test:
    """Return the test of one item, of a sweep or of nested sweeps; return any other test itself."""
    while hasattr(test, "swept"):
        test = test.swept
    return test


def _said(row: dict[str, Any]) -> str:
    return ", ".join(f"{name}={getattr(value, '__name__', value)}" for name, value in row.items())
