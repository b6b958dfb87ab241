"""What an agent says that it earned: a number, or named parts that are added up; anything else is told to be none."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

from etude.errors import AgentError
from etude.store.rollout_queue import Reward

__all__ = ["parse_reward"]


def parse_reward(value: Any, subject: str) -> Reward:
    """A reward, as the desk takes it; `what` is how a sentence about another value begins, such as `it returned`."""
    if not isinstance(value, Mapping):
        return _number(value, subject)
    if not value:
        raise AgentError(f"{subject} an empty mapping; give a number, or at least one named part.")
    for name in value:
        if not isinstance(name, str):
            raise AgentError(f"{subject} a part named {name!r}; the names of parts are text.")
    parts = {name: _number(part, f"{subject} the part `{name}`,") for name, part in value.items()}
    _number(sum(parts.values()), f"{subject} parts that add up to")
    return parts


def _number(value: Any, subject: str) -> float:
    scalar = value.item() if getattr(value, "shape", None) == () else value  # a scalar of numpy, torch or the like
    if not isinstance(scalar, numbers.Real):
        raise AgentError(
            f"{subject} {scalar!r} of type {type(value).__name__}; a reward is a number, or named numbers."
        )
    try:
        number = float(scalar)
    except OverflowError:  # a whole number beyond all that a float holds
        number = math.inf
    if not math.isfinite(number):
        raise AgentError(f"{subject} {number}; a reward is finite.")
    return number
