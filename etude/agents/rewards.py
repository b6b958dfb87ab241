"""The rewards that an agent may give: a number, or named parts that are added up. Other values are refused."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

from etude.errors import AgentError
from etude.store.rollout_queue import Reward


def parse_reward(value: Any, subject: str) -> Reward:
    """Return a reward in the form that the rollout queue takes. `subject` begins the sentence of an error, such as `it
    returned`."""
    if not isinstance(value, Mapping):
        return _number(value, subject)
    if not value:
        raise AgentError(f"{subject} an empty mapping. Give a number, or at least one named part.")
    for name in value:
        if not isinstance(name, str):
            raise AgentError(f"{subject} a part named {name!r}; the name of a part is a string.")
    parts = {name: _number(part, f"{subject} the part `{name}`,") for name, part in value.items()}
    _number(sum(parts.values()), f"{subject} parts that add up to")
    return parts


def _number(value: Any, subject: str) -> float:
    scalar = value.item() if getattr(value, "shape", None) == () else value  # a scalar of numpy or torch
    if not isinstance(scalar, numbers.Real):
        raise AgentError(
            f"{subject} {scalar!r} of type {type(value).__name__}; a reward is a number, or named numbers."
        )
    try:
        number = float(scalar)
    except OverflowError:  # an integer that is too large for a float
        number = math.inf
    if not math.isfinite(number):
        raise AgentError(f"{subject} {number}; a reward is finite.")
    return number
