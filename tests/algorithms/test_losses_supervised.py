"""Losses without an advantage, compared with their formulas in numpy and with finite differences."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch

from etude.algorithms.base import Loss
from etude.algorithms.logits import topk_logp_with_tail
from etude.algorithms.losses import SUPERVISED
from etude.algorithms.losses.distill import TopKDistillation, topk_kl
from etude.algorithms.losses.preference import DPO, RewardModelLoss
from etude.algorithms.losses.supervised import SFT, EchoLoss, ValueLoss
from etude.algorithms.reduce import Denominators
from etude.algorithms.view import Outputs, View
from etude.batch import Batch
from etude.errors import BatchError, ConfigError, MissingColumnError
from tests.algorithms.losses import (
    Array,
    finite_differences,
    loss_and_gradient,
    model_outputs,
    off_policy,
    preference_pairs,
    summed_over_parts,
)


def at_actions(batch: Batch, name: str) -> Array:
    values: Array = View(batch).column(name).numpy()
    return values


def check_formula(
    loss: Loss, batch: Batch, formula: object, outputs: dict[str, torch.Tensor], tokens: bool = True
) -> None:
    """Compare value and gradient with those of a formula over the action tokens (or rollouts)."""
    assert callable(formula)
    (name,) = loss.forward_outputs()
    at = (outputs[name][batch.action] if tokens else outputs[name]).numpy()
    value, gradient = loss_and_gradient(loss, batch, outputs)
    assert value == pytest.approx(formula(at), abs=1e-12)
    part_gradient = (gradient[batch.action] if tokens else gradient).numpy()
    expected = finite_differences(formula, at)
    assert np.abs(expected).max() > 1e-3
    np.testing.assert_allclose(part_gradient, expected, atol=1e-8)


def by_rollout(batch: Batch, values: Array) -> list[Array]:
    return np.split(values, np.cumsum(View(batch).rollouts.lengths.numpy())[:-1])


def test_sft() -> None:
    batch = off_policy(0)
    check_formula(SFT(), batch, lambda p: float(-p.mean()), model_outputs(batch))
    per_rollout = SFT(reduction="seq-mean-token-mean")
    check_formula(
        per_rollout,
        batch,
        lambda p: sum(-float(r.mean()) for r in by_rollout(batch, p) if len(r)) / batch.num_rollouts,
        model_outputs(batch),
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_dpo(smoothing: float) -> None:
    batch = preference_pairs(1)
    ref, reward, beta = at_actions(batch, "ref_logp"), batch.require("reward").numpy(), 0.3

    def formula(logp: Array) -> float:
        implied = [beta * float(r.sum()) for r in by_rollout(batch, logp - ref)]
        total = 0.0
        for g in range(batch.num_groups):
            a, b = (batch.group == g).nonzero()[:, 0].tolist()
            best, worst = (a, b) if reward[a] > reward[b] else (b, a)
            margin = implied[best] - implied[worst]
            total += (1 - smoothing) * np.log1p(np.exp(-margin)) + smoothing * np.log1p(np.exp(margin))
        return total / batch.num_groups

    check_formula(DPO(beta=beta, label_smoothing=smoothing), batch, formula, model_outputs(batch))


def test_the_rollouts_of_a_pair_need_not_be_adjacent() -> None:
    batch = preference_pairs(2)
    outputs = model_outputs(batch)
    value, _ = loss_and_gradient(DPO(), batch, outputs)
    order = [0, 2, 4, 6, 7, 5, 3, 1]
    moved = batch.select(order)
    tokens = torch.cat(
        [torch.arange(int(batch.rollout_token_offsets[u]), int(batch.rollout_token_offsets[u + 1])) for u in order]
    )
    assert loss_and_gradient(DPO(), moved, {"logp": outputs["logp"][tokens]})[0] == pytest.approx(value)


def test_reward_model() -> None:
    batch = preference_pairs(3)
    reward = batch.require("reward").numpy()

    def formula(score: Array) -> float:
        total = 0.0
        for g in range(batch.num_groups):
            a, b = (batch.group == g).nonzero()[:, 0].tolist()
            total += np.log1p(np.exp(-(score[a] - score[b]) * np.sign(reward[a] - reward[b])))
        return total / batch.num_groups

    check_formula(RewardModelLoss(), batch, formula, model_outputs(batch), tokens=False)


@pytest.mark.parametrize("clip", [None, 0.1])
def test_value(clip: float | None) -> None:
    batch = off_policy(4)
    old, returns = at_actions(batch, "value"), at_actions(batch, "returns")

    def formula(value: Array) -> float:
        clipped = value if clip is None else old + np.clip(value - old, -clip, clip)
        return float(0.5 * np.maximum((value - returns) ** 2, (clipped - returns) ** 2).mean())

    check_formula(ValueLoss(clip=clip), batch, formula, model_outputs(batch))


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_topk_distillation(direction: Direction) -> None:
    batch = off_policy(5)
    teacher = View(batch).column("teacher_topk_logp").numpy()

    def formula(student: Array) -> float:
        p, q = np.exp(teacher), np.exp(student)
        p = np.concatenate([p, 1 - p.sum(-1, keepdims=True)], -1)
        first, second = (p, q) if direction == "forward" else (q, p)
        return float((first * np.log(first / second)).sum(-1).mean())

    check_formula(TopKDistillation(direction=direction), batch, formula, model_outputs(batch))


def test_topk_distillation_weighs_the_loss_of_each_data_source() -> None:
    batch = off_policy(5)
    is_math = (View(batch).column("source") == batch.source_names.index("math")).numpy()
    assert 0 < is_math.sum() < len(is_math)
    teacher = View(batch).column("teacher_topk_logp").numpy()
    p = np.exp(np.concatenate([teacher, np.log(1 - np.exp(teacher).sum(-1, keepdims=True))], -1))

    def formula(student: Array) -> float:
        kl = (p * (np.log(p) - student)).sum(-1)
        return float(np.where(is_math, 0.25 * kl, kl).mean())

    check_formula(TopKDistillation(weights={"math": 0.25}), batch, formula, model_outputs(batch))


Direction = Literal["forward", "reverse"]


def with_tail(logp: torch.Tensor) -> torch.Tensor:
    """Return the log-probs of the listed tokens, and last that of all others together."""
    return torch.cat([logp, torch.log1p(-logp.exp().sum(-1, keepdim=True))], -1)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_a_tiny_bucket_has_its_gradient_in_single_precision(direction: Direction) -> None:
    """The student gives the unlisted tokens 1e-8, the teacher 0.2. In float32, 1 minus the sum would be 0."""
    ids, teacher = torch.tensor([[0, 1]]), torch.tensor([[0.5, 0.3]]).log()
    results = []
    for dtype in (torch.float32, torch.float64):
        logits = torch.tensor([[10.0, 9.0, -9.0, -9.5]], dtype=dtype, requires_grad=True)
        loss = topk_kl(topk_logp_with_tail(logits, ids), teacher.to(dtype), direction).sum()
        results.append((loss.detach().double(), torch.autograd.grad(loss, logits)[0].double()))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_topk_kl_is_never_negative_and_zero_for_equal_distributions(direction: Direction) -> None:
    rng = np.random.default_rng(0)
    teacher, student = (torch.from_numpy(np.log(rng.dirichlet(np.ones(9), 500)[:, :3])) for _ in range(2))
    assert bool((topk_kl(with_tail(student), teacher, direction) > 0).all())
    leaf = teacher.clone().requires_grad_()
    same = topk_kl(with_tail(leaf), teacher, direction)
    assert float(same.detach().abs().max()) < 1e-12
    (gradient,) = torch.autograd.grad(same.sum(), leaf)
    assert float(gradient.abs().max()) < 1e-12
    truncated = (teacher.exp() * (teacher - student)).sum(-1)
    assert bool((truncated < 0).any()), "without the bucket the divergence can be negative"


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_topk_kl_over_the_whole_vocabulary_has_no_bucket(direction: Direction, dtype: torch.dtype) -> None:
    """All tokens are listed, so the bucket is only rounding error, and must have no gradient."""
    rng = np.random.default_rng(1)
    logits = torch.from_numpy(rng.normal(size=(50, 5))).to(dtype).requires_grad_()
    teacher = torch.from_numpy(rng.normal(size=(50, 5))).to(dtype).log_softmax(-1)
    student = logits.log_softmax(-1)
    listed = topk_logp_with_tail(logits, torch.arange(5).repeat(50, 1))
    first, second = (teacher, student) if direction == "forward" else (student, teacher)
    full = (first.exp() * (first - second)).sum()
    (expected,) = torch.autograd.grad(full, logits, retain_graph=True)
    (gradient,) = torch.autograd.grad(topk_kl(listed, teacher, direction).sum(), logits)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-5 if dtype is torch.float32 else 1e-12)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_topk_kl_of_impossible_tokens_is_finite(direction: Direction) -> None:
    teacher = torch.tensor([[-1e-9, -50.0], [-1.0, -1.0], [-1e3, -1e3]]).double()
    student = torch.tensor([[-1e3, -1e3], [-1e-12, -1e3], [-1e-9, -60.0]]).double().requires_grad_()
    loss = topk_kl(with_tail(student), teacher, direction)
    (gradient,) = torch.autograd.grad(loss.sum(), student)
    assert bool(torch.isfinite(loss).all())
    assert bool(torch.isfinite(gradient).all())


def test_echo_learns_tool_output_and_nothing_else() -> None:
    batch = off_policy(6)
    observed = batch.require("observation") & ~batch.action
    logp = torch.where(observed, -torch.rand(batch.num_tokens).double() - 0.1, float("nan"))
    value, gradient = loss_and_gradient(EchoLoss(), batch, {"logp": logp})
    assert value == pytest.approx(float(-logp[observed].mean()))
    torch.testing.assert_close(gradient, torch.where(observed, -1 / int(observed.sum()), 0.0).double())
    total, parts = summed_over_parts(EchoLoss(), batch, {"logp": logp}, 4)
    assert total == pytest.approx(value)
    torch.testing.assert_close(parts, gradient)


def test_echo_ignores_observations_that_are_actions() -> None:
    batch = off_policy(6)
    both = batch.replace(observation=batch.action.clone())
    value, gradient = loss_and_gradient(EchoLoss(), both, model_outputs(batch))
    assert value == 0
    assert bool((gradient == 0).all())


@pytest.mark.parametrize("name", SUPERVISED)
def test_a_split_into_micro_batches_changes_nothing(name: str) -> None:
    batch = preference_pairs(7, groups=6)
    outputs = model_outputs(batch)
    loss = SUPERVISED[name]()
    value, gradient = loss_and_gradient(loss, batch, outputs)
    for parts in (2, 3, 6):
        total, part_gradient = summed_over_parts(loss, batch, outputs, parts)
        assert total == pytest.approx(value)
        torch.testing.assert_close(part_gradient, gradient, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("name", SUPERVISED)
def test_a_batch_without_actions_has_no_token_loss(name: str) -> None:
    batch = preference_pairs(8)
    without_actions = batch.replace(action=torch.zeros_like(batch.action))
    value, gradient = loss_and_gradient(SUPERVISED[name](), without_actions, model_outputs(batch))
    assert np.isfinite(value)
    if name != "reward_model":
        assert bool((gradient == 0).all())


@pytest.mark.parametrize("name", ["dpo", "reward_model"])
def test_log_ratios_of_a_thousand_are_finite(name: str) -> None:
    batch = preference_pairs(9)
    outputs = {"logp": batch.require("ref_logp") - 1e3, "score": torch.linspace(-1e3, 1e3, batch.num_rollouts).double()}
    value, gradient = loss_and_gradient(SUPERVISED[name](), batch, outputs)
    assert np.isfinite(value)
    assert bool(torch.isfinite(gradient).all())


@pytest.mark.parametrize("loss", [DPO(), RewardModelLoss()])
def test_groups_that_are_not_pairs_are_refused(loss: Loss) -> None:
    three = off_policy(0, (2, 3))
    named = ", ".join(str(int(u)) for u in three.require("rollout_id")[2:])
    with pytest.raises(BatchError, match=rf"Group 1 \(rollouts {named}\) has 3 rollouts, but a preference is between"):
        loss_and_gradient(loss, three.replace(reward=torch.arange(5.0).double()), model_outputs(three))
    equal_rewards = preference_pairs(0)
    with pytest.raises(BatchError, match=r"Group 0 \(rollouts \d+, \d+\) has two rewards of 2, which prefers neither"):
        loss_and_gradient(
            loss,
            equal_rewards.replace(reward=torch.full((equal_rewards.num_rollouts,), 2.0).double()),
            model_outputs(equal_rewards),
        )


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (DPO, {"beta": 0.5}),
        (DPO, {"label_smoothing": 0.2}),
        (ValueLoss, {"clip": 0.01}),
        (ValueLoss, {"clip": None}),
        (TopKDistillation, {"direction": "reverse"}),
        (SFT, {"reduction": "token-sum"}),
        (SFT, {"reduction": "seq-mean-token-mean", "unit": "turn"}),
    ],
    ids=str,
)
def test_every_knob_changes_the_gradient(loss: type[Loss], options: dict[str, object]) -> None:
    batch = preference_pairs(3)
    base = {"reduction": "seq-mean-token-mean"} if "unit" in options else {}
    _, first = loss_and_gradient(loss(**base), batch, model_outputs(batch))
    _, second = loss_and_gradient(loss(**options), batch, model_outputs(batch))
    assert float((first - second).abs().max()) > 1e-6


def test_missing_columns_of_supervised_losses_are_named() -> None:
    batch = preference_pairs(0)
    view = View(batch, Outputs())
    with pytest.raises(MissingColumnError, match="reward model's loss needs the model's `score`"):
        RewardModelLoss()(view, Denominators.from_view(view))
    with pytest.raises(MissingColumnError, match="The value loss needs the model's `value`"):
        ValueLoss()(view, Denominators.from_view(view))
    with pytest.raises(MissingColumnError, match="ECHO needs the column `observation`"):
        EchoLoss()(View(batch.replace(observation=None)), Denominators.from_view(view))
    with pytest.raises(ConfigError, match="label_smoothing"):
        DPO(label_smoothing=0.5)


@pytest.mark.parametrize(
    ("loss", "columns", "outputs"),
    [
        (SFT(), set(), {"logp"}),
        (SFT(unit="turn", reduction="seq-mean-token-mean"), {"turn"}, {"logp"}),
        (DPO(), {"reward", "ref_logp"}, {"logp"}),
        (RewardModelLoss(), {"reward"}, {"score"}),
        (ValueLoss(), {"returns", "value"}, {"value"}),
        (ValueLoss(clip=None), {"returns"}, {"value"}),
        (TopKDistillation(), {"teacher_topk_ids", "teacher_topk_logp"}, {"topk_logp"}),
        (EchoLoss(), {"observation"}, {"logp"}),
    ],
    ids=lambda x: type(x).__name__,
)
def test_each_supervised_loss_declares_columns_and_outputs(loss: Loss, columns: set[str], outputs: set[str]) -> None:
    assert set(loss.required_columns()) == columns
    assert set(loss.forward_outputs()) == outputs
    assert loss.split_unit == ("group" if isinstance(loss, DPO | RewardModelLoss) else "rollout")
