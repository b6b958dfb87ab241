"""Checks of several options raise one error, with a sentence for each problem."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import ParamSpec

from etude.config.validation_errors import merge_errors
from etude.errors import ConfigError

P = ParamSpec("P")


def told_together(find_problems: Callable[P, Iterator[ConfigError]]) -> Callable[P, None]:
    """Make a check of a function that yields problems: it raises one error for all of them.

    A problem that is raised instead is the last one, because what comes after it depends on it.
    """

    @wraps(find_problems)
    def check(*arguments: P.args, **options: P.kwargs) -> None:
        problems: list[ConfigError] = []
        try:
            problems.extend(find_problems(*arguments, **options))
        except ConfigError as error:
            problems.extend(error.problems or (error,))
        if problems:
            raise merge_errors(problems)

    return check


def problems_of(check: Callable[P, object], *arguments: P.args, **options: P.kwargs) -> Iterator[ConfigError]:
    """Yield the problems that a check raises."""
    try:
        check(*arguments, **options)
    except ConfigError as error:
        yield from error.problems or (error,)
