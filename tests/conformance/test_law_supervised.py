"""Laws 1, 4 and 5 for the supervised losses, with one sweep over all losses for each law."""

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
from tests.conformance.laws import LossAndGradient, fixture, observed
from tests.conformance.test_law_merge import split_rows

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
    """Return groups of two with different rewards, a teacher's likeliest tokens, and the columns of value losses."""
    batch = fixture(seed, PAIRS)
    teacher_logp = torch.from_numpy(np.random.default_rng(seed).normal(size=(batch.num_tokens, 5))).log_softmax(-1)[
        :, :3
    ]
    trained = batch.action[:, None]
    return batch.replace(
        reward=torch.arange(batch.num_rollouts, dtype=torch.float64),
        teacher_topk_ids=torch.arange(3).repeat(batch.num_tokens, 1),
        teacher_topk_logp=torch.where(trained, teacher_logp, torch.nan),
        extra=dict(batch.extra) | {"who": Column(ColumnKind.UNIT, torch.arange(batch.num_rollouts))},
    )


def model_outputs(batch: Batch, loss: Loss, context: float = torch.nan) -> dict[str, Tensor]:
    """Return random outputs of a model for the batch, with `context` at tokens that the loss does not train on."""
    rng = np.random.default_rng(7)
    trained = observed(batch) if isinstance(loss, EchoLoss) else batch.action
    student_logp = torch.from_numpy(rng.normal(size=(batch.num_tokens, 4))).log_softmax(-1)
    values = {"logp": -torch.from_numpy(rng.gamma(1.5, 0.5, batch.num_tokens)), "topk_logp": student_logp}
    values["value"] = torch.from_numpy(rng.normal(size=batch.num_tokens))
    outputs = {name: torch.where(trained.reshape(-1, *[1] * (x.ndim - 1)), x, context) for name, x in values.items()}
    return outputs | {"score": torch.from_numpy(rng.normal(size=batch.num_rollouts))}


def gradient(loss: Loss, batch: Batch, leaves: dict[str, Tensor], parts: Sequence[Batch] = ()) -> LossAndGradient:
    """Return the loss of an update batch, in these parts of it or in one, and its gradient by the model's outputs."""
    denominators = Denominators.from_view(View(batch))
    fresh_leaves = {name: leaf.clone().requires_grad_() for name, leaf in leaves.items()}
    total = torch.zeros((), dtype=torch.float64)
    for part in parts or [batch]:
        token_index, rollout_index = part.extra["where"].tensor, part.extra["who"].tensor
        part_outputs = {
            name: leaf[rollout_index if name == "score" else token_index] for name, leaf in fresh_leaves.items()
        }
        total = total + loss(View(part, Outputs(**part_outputs)), denominators).loss
    total.backward()  # type: ignore[no-untyped-call]
    return LossAndGradient(
        total.detach(), {n: torch.zeros_like(x) if x.grad is None else x.grad for n, x in fresh_leaves.items()}
    )


def test_supervised_losses_do_not_depend_on_micro_batches_or_their_order() -> None:
    for seed in SEEDS:
        batch = pairs(seed)
        for name, loss in LOSSES.items():
            order = np.random.default_rng(seed).permutation(
                batch.num_groups if loss.split_unit == "group" else batch.num_rollouts
            )
            units = [[2 * g, 2 * g + 1] for g in order] if loss.split_unit == "group" else [[u] for u in order]
            parts_of_order = [
                [u for unit_of_split in units_of_part for u in unit_of_split]
                for units_of_part in (units[:1], units[1:4], units[4:])
            ]
            leaves = model_outputs(batch, loss)
            parts = [batch.select(cut) for cut in parts_of_order]
            assert gradient(loss, batch, leaves, parts).close_to(gradient(loss, batch, leaves), 1e-10), name


def test_supervised_losses_train_on_their_tokens_and_ignore_all_others() -> None:
    for seed in SEEDS:
        batch = pairs(seed)
        for name, loss in LOSSES.items():
            original = gradient(loss, batch, model_outputs(batch, loss))
            trained = observed(batch) if isinstance(loss, EchoLoss) else batch.action
            assert bool(torch.isfinite(original.loss)) and any(bool((g != 0).any()) for g in original.grads.values()), (
                name
            )
            for output in loss.forward_outputs() - {"score"}:
                assert bool((original.grads[output][~trained] == 0).all()), name
            for value in (0.0, -1e9, torch.inf):
                other = gradient(loss, with_context_values(batch, value), model_outputs(batch, loss, value))
                assert torch.equal(other.loss, original.loss), name
                assert all(
                    torch.equal(other.grads[output_name], original.grads[output_name]) for output_name in original.grads
                ), name


def with_context_values(batch: Batch, value: float) -> Batch:
    """Return the batch with another number in every float column of the context tokens."""
    changes = {}
    for name, column in batch.columns():
        if COLUMNS.get(name) in (ColumnKind.TOKEN, ColumnKind.TOKEN_K) and column.tensor.dtype == torch.float64:
            trained = batch.action.reshape(-1, *[1] * (column.tensor.ndim - 1))
            changes[name] = torch.where(trained, column.tensor, value)
    return batch.replace(**changes | {"token_reward": batch.token_reward})


def test_supervised_losses_do_not_depend_on_the_split_of_turns_into_rows() -> None:
    for seed in SEEDS:
        batch = pairs(seed)
        rows, _ = split_rows(batch, np.random.default_rng(seed))
        assert rows.num_rows > batch.num_rows
        for name, loss in LOSSES.items():
            leaves = model_outputs(batch, loss)
            merged = gradient(loss, batch, leaves)
            denominators = gradient(loss, rows, leaves)
            assert denominators.close_to(merged, 1e-10), name
