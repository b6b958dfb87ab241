"""Splitting a batch into parts: never through a rollout, and with about as many tokens in each."""

from __future__ import annotations

import torch
from torch import Tensor

from etude.errors import BatchError


def split_rollouts(unit_tokens: Tensor, group: Tensor, parts: int, by: str) -> list[Tensor]:
    """Return the rollouts of each part: whole rollouts (or whole groups), in order.

    unit_tokens, group: [U + 1] token offsets and [U] groups, as a batch has them.
    """
    if parts < 1 or by not in ("rollout", "group"):
        raise BatchError(f"A batch is split into 1 or more parts by `rollout` or `group`; not {parts} by `{by}`.")
    rollouts = torch.arange(len(group), device=group.device)
    unit = rollouts if by == "rollout" else torch.unique(group, return_inverse=True)[1]
    tokens = (unit_tokens[1:] - unit_tokens[:-1]).to(torch.float64) + 1e-3
    weight = torch.bincount(unit, tokens)
    part = _assign_evenly(weight, parts)[unit]
    order = torch.argsort(unit, stable=True)
    return [order[part[order] == p] for p in range(min(parts, len(weight)))]


def _assign_evenly(weight: Tensor, parts: int) -> Tensor:
    """[n] → [n]: the part that each unit goes to. Parts are ranges of consecutive units, at least one in each.

    A unit that is heavier than a fair share counts as one share; the others share the rest equally. A unit then goes to
    the part that its midpoint falls into on the cumulative weights.
    """
    count = len(weight)
    part = torch.arange(min(parts, count), device=weight.device)
    falling = weight.sort(descending=True).values
    # The fair share of the rest, if each heavier unit has one part.
    shares = falling.flip(0).cumsum(0).flip(0)[: len(part)] / (len(part) - part)
    weight = weight.clamp(max=shares[falling[: len(part)] <= shares][:1])
    middle = weight.cumsum(0) - weight / 2
    first = torch.searchsorted(middle * len(part), weight.sum() * part)
    # Rounding may put two midpoints on a border into one part; this leaves no part empty.
    begin = part + (first - part).cummax(0).values.clamp(0, count - len(part))
    return torch.searchsorted(begin, torch.arange(count, device=weight.device), right=True) - 1
