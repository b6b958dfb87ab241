"""Random batches of every awkward shape: several rows a rollout, many turns, NaN in the context, rollouts without
actions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from etude.batch import Batch, Column, ColumnKind

NAN = float("nan")


def random_batch(
    seed: int,
    group_sizes: Sequence[int] = (3, 1, 4),
    *,
    longest: int = 9,
    idle: bool = True,
    drift: float = 0.3,
    dtype: torch.dtype = torch.float64,
) -> Batch:
    """Return a batch with every column filled at its action tokens and NaN elsewhere, off-policy by about `drift`.

    Rollouts have one to three turns. Each turn is context, then actions, and the turns are in one row or in several.
    With `idle`, about one turn in eight has no action, and sometimes a whole rollout.
    """
    rng = np.random.default_rng(seed)
    group = np.repeat(np.arange(len(group_sizes)), group_sizes)
    rows: list[tuple[int, list[tuple[bool, int]]]] = []  # (rollout, its tokens as (action, turn))
    for u in range(len(group)):
        row: list[tuple[bool, int]] = []
        for turn in range(int(rng.integers(1, 4))):
            acts = 0 if idle and rng.random() < 0.12 else int(rng.integers(1, longest))
            row += [(False, -1)] * int(rng.integers(1, 4)) + [(True, turn)] * acts
            if rng.random() < 0.4:
                rows.append((u, row))
                row = []
        rows.append((u, row))
    tokens = [token for _, row in rows for token in row]
    action = torch.tensor([act for act, _ in tokens], dtype=torch.bool)
    shape = (len(tokens),)

    def at_actions(values: np.ndarray) -> Tensor:
        """Return a column that is known at the action tokens only."""
        return torch.where(action, torch.from_numpy(values).to(dtype), NAN)

    behavior = -rng.gamma(1.5, 0.7, shape)
    old = np.minimum(behavior + drift * rng.normal(size=shape), -1e-3)
    wander = rng.random(len(tokens)) < 0.3
    return Batch(
        offsets=torch.tensor([0, *np.cumsum([len(row) for _, row in rows]).tolist()]),
        unit=torch.tensor([u for u, _ in rows]),
        group=torch.from_numpy(group),
        ids=torch.from_numpy(rng.integers(0, 50, shape).astype(np.int32)),
        action=action,
        observation=~action & torch.from_numpy(wander),
        turn=torch.tensor([turn for _, turn in tokens], dtype=torch.int32),
        version=torch.where(action, torch.from_numpy(rng.integers(3, 6, shape)), -1).int(),
        behavior_logp=at_actions(behavior),
        old_logp=at_actions(old),
        ref_logp=at_actions(np.minimum(behavior + drift * rng.normal(size=shape), -1e-3)),
        teacher_logp=at_actions(np.minimum(behavior + drift * rng.normal(size=shape), -1e-3)),
        entropy=at_actions(rng.gamma(2, 0.5, shape)),
        sum_pi_squared=at_actions(np.exp(2 * old) + (1 - np.exp(old)) ** 2 * rng.uniform(0.1, 0.9, shape)),
        value=at_actions(rng.normal(size=shape)),
        token_reward=torch.where(action, torch.from_numpy(rng.normal(size=shape) * (rng.random(shape) < 0.2)), NAN),
        advantage=at_actions(rng.normal(size=shape)),
        returns=at_actions(rng.normal(size=shape)),
        reward=torch.from_numpy(
            rng.integers(0, 5, len(group)) / 4.0 + rng.normal(size=len(group)) * (rng.random() < 0.5)
        ),
        metric=torch.from_numpy(rng.integers(0, 2, len(group)).astype(np.float64)),
        reward_parts=torch.from_numpy(rng.normal(size=(len(group), 2))),
        part_names=("correct", "format"),
        greedy_reward=torch.from_numpy(rng.normal(size=len(group))),
        truncated=torch.from_numpy(rng.random(len(group)) < 0.2),
        role=torch.from_numpy(rng.integers(0, 2, len(group))),
        rollout_id=torch.from_numpy(rng.permutation(1000)[: len(group)]),
        source=torch.from_numpy(rng.integers(0, 2, len(group))),
        source_names=("code", "math"),
    )


def with_extras(batch: Batch, seed: int = 0) -> Batch:
    """Return the batch with a plug-in's column of every kind."""
    rng = np.random.default_rng(seed)
    return batch.replace(
        teacher_topk_ids=torch.from_numpy(rng.integers(0, 50, (batch.num_tokens, 3))),
        teacher_topk_logp=torch.from_numpy(-rng.gamma(2, 1, (batch.num_tokens, 3))),
        extra={
            "half": Column(ColumnKind.TOKEN, torch.from_numpy(rng.normal(size=batch.num_tokens)).bfloat16()),
            "experts": Column(ColumnKind.TOKEN_K, torch.from_numpy(rng.integers(0, 50, (batch.num_tokens, 2)))),
            "hint": Column(ColumnKind.UNIT, torch.from_numpy(rng.integers(0, 3, batch.num_rollouts))),
        },
    )


batches = st.builds(
    random_batch,
    st.integers(0, 2**20),
    st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple),
    longest=st.sampled_from([2, 4, 9]),
)
"""A hypothesis strategy of batches; it shrinks towards few rollouts."""


def same(a: Batch, b: Batch) -> bool:
    """Return whether two batches hold the same rows and columns, bit for bit."""
    left, right = dict(a.columns()), dict(b.columns())
    if left.keys() != right.keys() or _names(a) != _names(b):
        return False
    layouts = zip((a.offsets, a.unit, a.group), (b.offsets, b.unit, b.group), strict=True)
    return all(torch.equal(x, y) for x, y in layouts) and all(_equal(left[name], right[name]) for name in left)


def _names(batch: Batch) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    return batch.model, batch.part_names, batch.source_names


def _equal(a: Column, b: Column) -> bool:
    x, y = a.tensor, b.tensor
    alike = a.kind is b.kind and x.dtype == y.dtype and x.shape == y.shape
    return alike and bool(((x == y) | ((x != x) & (y != y))).all())
