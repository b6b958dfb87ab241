"""Laws 1, 4 and 5 over the losses that learn from what is written down: one sweep over all of them for each law."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from etude.algorithms import Denominators, Loss, Outputs, View
from etude.algorithms.losses import SUPERVISED
from etude.algorithms.losses.supervised import EchoLoss
from etude.batch import COLUMNS, Batch, Column, ColumnKind
from tests.conformance.laws import Found, fixture, observed
from tests.conformance.test_law_merge import apart

SEEDS = range(2)
PAIRS = (2, 2, 2, 2, 2)
KINDS: dict[str, type[Loss]] = SUPERVISED | {"echo": EchoLoss}
LOSSES: dict[str, Loss] = {name: kind() for name, kind in KINDS.items()}
LOSSES |= {
    f"{name}, {how}, {unit}": SUPERVISED[name](reduction=how, unit=unit)
    for name in ("sft", "value", "distill_topk")
    for how in ("seq-mean-token-mean", "seq-mean-token-sum")
    for unit in ("rollout", "turn")
}


@cache
def pairs(seed: int) -> Batch:
    """Groups of two whose rewards differ, with a teacher's likeliest tokens and what an update is told of values."""
    batch = fixture(seed, PAIRS)
    draws = torch.from_numpy(np.random.default_rng(seed).normal(size=(batch.num_tokens, 5))).log_softmax(-1)[:, :3]
    known = batch.action[:, None]
    return batch.replace(
        reward=torch.arange(batch.num_rollouts, dtype=torch.float64),
        teacher_topk_ids=torch.arange(3).repeat(batch.num_tokens, 1),
        teacher_topk_logp=torch.where(known, draws, torch.nan),
        extra=dict(batch.extra) | {"who": Column(ColumnKind.UNIT, torch.arange(batch.num_rollouts))},
    )


def said(batch: Batch, loss: Loss, context: float = torch.nan) -> dict[str, Tensor]:
    """What a model might say of the batch; `context` wherever the loss has nothing to learn."""
    draw = np.random.default_rng(7)
    known = observed(batch) if isinstance(loss, EchoLoss) else batch.action
    four = torch.from_numpy(draw.normal(size=(batch.num_tokens, 4))).log_softmax(-1)
    values = {"logp": -torch.from_numpy(draw.gamma(1.5, 0.5, batch.num_tokens)), "topk_logp": four}
    values["value"] = torch.from_numpy(draw.normal(size=batch.num_tokens))
    found = {name: torch.where(known.reshape(-1, *[1] * (x.ndim - 1)), x, context) for name, x in values.items()}
    return found | {"score": torch.from_numpy(draw.normal(size=batch.num_rollouts))}


def gradient(loss: Loss, batch: Batch, leaves: dict[str, Tensor], parts: Sequence[Batch] = ()) -> Found:
    """The loss of an update batch, in these parts of it or in one, and its gradient by what the model said."""
    whole = Denominators.from_view(View(batch))
    fresh = {name: leaf.clone().requires_grad_() for name, leaf in leaves.items()}
    total = torch.zeros((), dtype=torch.float64)
    for part in parts or [batch]:
        where, who = part.extra["where"].tensor, part.extra["who"].tensor
        shown = {name: leaf[who if name == "score" else where] for name, leaf in fresh.items()}
        total = total + loss(View(part, Outputs(**shown)), whole).loss
    total.backward()  # type: ignore[no-untyped-call]
    return Found(total.detach(), {n: torch.zeros_like(x) if x.grad is None else x.grad for n, x in fresh.items()})


def test_supervised_losses_do_not_depend_on_micro_batches_or_their_order() -> None:
    for seed in SEEDS:
        batch = pairs(seed)
        for name, loss in LOSSES.items():
            order = np.random.default_rng(seed).permutation(
                batch.num_groups if loss.split_unit == "group" else batch.num_rollouts
            )
            places = [[2 * g, 2 * g + 1] for g in order] if loss.split_unit == "group" else [[u] for u in order]
            cuts = [[u for place in some for u in place] for some in (places[:1], places[1:4], places[4:])]
            leaves = said(batch, loss)
            parts = [batch.select(cut) for cut in cuts]
            assert gradient(loss, batch, leaves, parts).close_to(gradient(loss, batch, leaves), 1e-10), name


def test_supervised_losses_learn_from_their_own_tokens_and_look_at_no_others() -> None:
    for seed in SEEDS:
        batch = pairs(seed)
        for name, loss in LOSSES.items():
            clean = gradient(loss, batch, said(batch, loss))
            known = observed(batch) if isinstance(loss, EchoLoss) else batch.action
            assert bool(torch.isfinite(clean.loss)) and any(bool((g != 0).any()) for g in clean.grads.values()), name
            for output in loss.forward_outputs() - {"score"}:
                assert bool((clean.grads[output][~known] == 0).all()), name
            for scribble in (0.0, -1e9, torch.inf):
                other = gradient(loss, scribbled(batch, scribble), said(batch, loss, scribble))
                assert torch.equal(other.loss, clean.loss), name
                assert all(torch.equal(other.grads[each], clean.grads[each]) for each in clean.grads), name


def scribbled(batch: Batch, scribble: float) -> Batch:
    """The batch with something else in every number that is said of a context token."""
    changes = {}
    for name, column in batch.columns():
        if COLUMNS.get(name) in (ColumnKind.TOKEN, ColumnKind.TOKEN_K) and column.tensor.dtype == torch.float64:
            known = batch.action.reshape(-1, *[1] * (column.tensor.ndim - 1))
            changes[name] = torch.where(known, column.tensor, scribble)
    return batch.replace(**changes | {"token_reward": batch.token_reward})


def test_supervised_losses_do_not_depend_on_how_turns_became_rows() -> None:
    for seed in SEEDS:
        batch = pairs(seed)
        rows, _ = apart(batch, np.random.default_rng(seed))
        assert rows.num_rows > batch.num_rows
        for name, loss in LOSSES.items():
            leaves = said(batch, loss)
            merged = gradient(loss, batch, leaves)
            whole = gradient(loss, rows, leaves)
            assert whole.close_to(merged, 1e-10), name
