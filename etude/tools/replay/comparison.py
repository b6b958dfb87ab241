"""The comparison of two algorithms on the rollouts of one step: numbers for a table, for JSON and for the viewer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.observe import Metrics
from etude.tools.replay.files import SIDES
from etude.tools.replay.observer import CLIPPED, LEVEL, MASKED, TRAINED, StepObserver

TIMES = ("seconds", "per_second", "peak_memory_gb", "memory_share", "mfu", "micro_batches")
"""Endings of metrics that describe the machine, and not the algorithm."""
MOVERS = 10
"""Number of tokens that are listed by the difference of their weights."""
ROUNDING = 1e-5
"""The largest difference of two weights, as a share of the larger one, that counts as rounding."""


@dataclass(frozen=True)
class Side:
    """A step under one algorithm."""

    observer: StepObserver
    metrics: Metrics
    change: Mapping[str, Tensor]
    """The difference that the step made to each trained weight."""


def describe_side(side: Side) -> dict[str, Any]:
    """Return the numbers of a step under one algorithm."""
    observer = side.observer
    weight = side.observer.weight
    state = side.observer.state
    values = {name: value for name, value in side.metrics.reduce().items() if not name.endswith(TIMES)}
    counts = torch.bincount(state.long(), minlength=4).tolist()
    masked = [int((part == MASKED).all()) for part in _by_rollout(observer, state) if len(part)]
    return {
        "updates": observer.updates,
        "gradient_norm": _norm(observer.gradient),
        "change_norm": _norm(side.change),
        "tokens": len(weight),
        "trained": counts[TRAINED],
        "clipped": counts[CLIPPED],
        "masked": counts[MASKED],
        "level": counts[LEVEL],
        "dropped_rollouts": sum(masked),
        "weight": float(weight.abs().sum()),
        "metrics": {name: value if math.isfinite(value) else None for name, value in values.items()},
    }


def compare(recorded: Side, changed: Side) -> dict[str, Any]:
    """Return the differences of two algorithms on the same rollouts."""
    before, after = recorded.observer.weight, changed.observer.weight
    first, second = recorded.observer.state, changed.observer.state
    return {
        "gradient": _compare_tensors(recorded.observer.gradient, changed.observer.gradient),
        "change": _compare_tensors(recorded.change, changed.change),
        "token_weights": {
            "cosine": _cosine(float(before @ after), float(before.norm()), float(after.norm())),
            "identical": torch.equal(before, after),
            "turned": int((before * after < 0).sum()),
        },
        "states": {
            name: {
                "left": int(((first == code) & (second != code)).sum()),
                "came": int(((first != code) & (second == code)).sum()),
            }
            for name, code in (("clipped", CLIPPED), ("masked", MASKED), ("level", LEVEL))
        },
        "movers": _movers(recorded.observer, before, after),
    }


def rollout_records(recorded: Side, changed: Side | None) -> list[dict[str, Any]]:
    """Return the numbers of each rollout of the step, under both algorithms."""
    batch = recorded.observer.batch
    assert batch.rollout_id is not None and batch.reward is not None, "rollouts of a run have both"
    records = [
        {"rollout": int(id), "group": int(group), "reward": float(reward), "tokens": len(weight)}
        for id, group, reward, weight in zip(
            batch.rollout_id,
            batch.group,
            batch.reward,
            _by_rollout(recorded.observer, recorded.observer.weight),
            strict=True,
        )
    ]
    for name, side in zip(SIDES, (recorded, changed), strict=True):
        if side is None:
            continue
        advantage = side.observer.batch.advantage
        assert advantage is not None, "the step was estimated"
        parts = (side.observer.weight, side.observer.state, advantage.cpu()[side.observer.action_index])
        columns = (_by_rollout(side.observer, column) for column in parts)
        for record, weight, state, gain in zip(records, *columns, strict=True):
            record[name] = {
                "advantage": float(gain.double().mean()) if len(gain) else None,
                "weight": float(weight.sum()),
                "clipped": int((state == CLIPPED).sum()),
                "masked": int((state == MASKED).sum()),
            }
    return records


def token_columns(recorded: Side, changed: Side | None) -> dict[str, NDArray[Any]]:
    """Return a row for each action token of the step, with the columns that `files` describes."""
    columns = _places(recorded.observer) | recorded.observer.start_signals()
    for name, side in zip(SIDES, (recorded, changed), strict=True):
        if side is not None:
            found = {"weight": side.observer.weight, "state": side.observer.state, **side.observer.signals()}
            columns |= {f"{column}_{name}": values for column, values in found.items()}
    return {name: column.numpy() for name, column in columns.items()}


def _places(observer: StepObserver) -> dict[str, Tensor]:
    """Return, for each action token, its rollout, its turn, its index within that turn's tokens, and its id."""
    batch, at = observer.batch, observer.action_index
    assert batch.rollout_id is not None and batch.turn is not None, "rollouts of a run have both"
    place = torch.searchsorted(batch.rollout_token_offsets.cpu(), at, right=True) - 1
    rollout, turn = batch.rollout_id.cpu()[place], batch.turn.cpu()[at]
    begins = torch.ones(len(at), dtype=torch.bool)
    begins[1:] = (rollout[1:] != rollout[:-1]) | (turn[1:] != turn[:-1])
    start = torch.where(begins, torch.arange(len(at)), 0).cummax(0).values if len(at) else at
    return {"rollout": rollout, "turn": turn, "index": torch.arange(len(at)) - start, "id": batch.ids.cpu()[at]}


def _by_rollout(observer: StepObserver, values: Tensor) -> list[Tensor]:
    """Split a column of action tokens by rollout."""
    batch, at = observer.batch, observer.action_index
    ends = torch.searchsorted(at, batch.rollout_token_offsets.cpu())
    return list(torch.split(values, torch.diff(ends).tolist()))


def _movers(observer: StepObserver, before: Tensor, after: Tensor) -> list[dict[str, Any]]:
    """Return the tokens whose weights differ most, and by more than rounding."""
    places, difference = _places(observer), after - before
    differs = difference.abs() > ROUNDING * torch.maximum(before.abs(), after.abs())
    order = difference.abs().argsort(descending=True, stable=True)[:MOVERS].tolist()
    return [
        {name: int(column[n]) for name, column in places.items()}
        | {"recorded": float(before[n]), "changed": float(after[n])}
        for n in order
        if differs[n]
    ]


def _compare_tensors(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the cosine of two sets of tensors, the ratio of their norms, and whether they are equal bit for bit."""
    shared = first.keys() & second.keys()
    product = sum(float((first[name].double() * second[name].double()).sum()) for name in sorted(shared))
    first_norm = _norm(first)
    second_norm = _norm(second)
    return {
        "cosine": _cosine(product, first_norm, second_norm),
        "norm_ratio": second_norm / first_norm if first_norm else None,
        "identical": first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in shared),
    }


def _norm(tensors: Mapping[str, Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors.values()))


def _cosine(product: float, first: float, second: float) -> float | None:
    """Return a cosine, within its bounds; None where a norm is 0."""
    return float(np.clip(product / (first * second), -1, 1)) if first and second else None
