"""Critics, reward models and whole distributions: the outputs of a learner with another head, or with a reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from etude.algorithms import AlgorithmConfig
from etude.algorithms.advantages.token import GAE
from etude.algorithms.kl import KLS
from etude.algorithms.losses.preference import RewardModelLoss
from etude.algorithms.losses.supervised import ValueLoss
from etude.batch import Batch
from etude.data.pack import pack_prefix_tree
from etude.models import Model, PackedAttention, create, tiny_config
from etude.train import FrozenModel, Learner, TrainConfig
from tests.packs import separate_rows, unpack
from tests.train.tasks import VOCABULARY, Imitate, Improve, gradient, model, ready, rollouts


def judge(seed: int = 0) -> Model:
    return create(tiny_config(VOCABULARY, layers=2, hidden=32), seed=seed, dtype=torch.float64, head="score")


def learner(policy: Model | None = None, **options: object) -> Learner:
    settings = {"learning_rate": 0.0, "max_grad_norm": None, "precision": "fp64", **options}
    pack = settings.pop("pack", pack_prefix_tree)
    return Learner(policy or judge(), TrainConfig(**settings), pack=pack)  # type: ignore[arg-type]


def pairs() -> Batch:
    """Return groups of two rollouts, of which one was preferred."""
    batch = rollouts(groups=4, size=3)
    selected = batch.select([0, 1, 4, 5, 6, 7, 9, 10])
    assert selected.reward is not None and torch.bincount(selected.group).tolist() == [2, 2, 2, 2]
    return selected


def expected_values(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the value before each action token, and that of the state after each rollout's last token."""
    pack, critic = separate_rows(batch), judge()
    with torch.no_grad():
        values = critic.logits(critic.hidden(pack.ids, pack.positions, PackedAttention(pack)))[:, 0]
    value = torch.where(batch.action, unpack(pack, values), torch.nan)
    finals = [
        values[batch.offsets[rows[-1] + 1] - 1] if len(rows) else torch.tensor(torch.nan) for rows in _rows(batch)
    ]
    return value, torch.stack([final.double() for final in finals])


def _rows(batch: Batch) -> list[Tensor]:
    return [(batch.unit == rollout).nonzero()[:, 0] for rollout in range(batch.num_rollouts)]


@pytest.mark.parametrize(
    "options", [{}, {"max_tokens_per_micro_batch": 1}, {"pack": separate_rows, "max_tokens_per_micro_batch": 40}]
)
def test_values_are_read_before_each_token_and_after_the_last(options: dict[str, Any]) -> None:
    """The micro-batches do not matter; a rollout without a row has no value."""
    batch = rollouts()
    value, final = expected_values(batch)
    assert torch.isnan(final).sum() == 1, "one rollout of the batch has no row"
    annotated = learner(**options).annotate(batch, frozenset({"value", "final_value"}))
    assert torch.allclose(annotated.require("value"), value, rtol=0, atol=1e-9, equal_nan=True)
    assert torch.allclose(annotated.require("final_value"), final, rtol=0, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("loss", [ValueLoss(), ValueLoss(reduction="seq-mean-token-mean"), RewardModelLoss()])
def test_an_update_does_not_depend_on_micro_batches_or_packs(loss: ValueLoss | RewardModelLoss) -> None:
    """The micro-batch law, for heads that score."""
    batch = pairs()
    if isinstance(loss, ValueLoss):
        annotated = learner().annotate(batch, frozenset({"value"}))
        returns = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        batch = annotated.replace(returns=returns)
    results = []
    for options in (
        {},
        {"max_tokens_per_micro_batch": 1},
        {"pack": separate_rows},
        {"activation_checkpointing": "full"},
    ):
        trainer = learner(**options)
        metrics = trainer.update(batch, Imitate(loss, loss.split_unit)).reduce()
        results.append((metrics["loss"], gradient(trainer)))
    assert max(float(value.abs().max()) for value in results[0][1].values()) > 1e-3
    for other_loss, gradients in results[1:]:
        assert other_loss == pytest.approx(results[0][0], abs=1e-9)
        assert all(torch.allclose(gradients[name], results[0][1][name], rtol=0, atol=1e-9) for name in gradients)


def test_a_reward_model_learns_preferences() -> None:
    batch, trainer = pairs(), learner(learning_rate=1e-2)
    metrics = [trainer.update(batch, Imitate(RewardModelLoss(), "group")).reduce() for _ in range(20)]
    assert metrics[-1]["loss"] < 0.2 * metrics[0]["loss"] and metrics[-1]["accuracy"] == 1.0


def test_a_critic_learns_returns() -> None:
    """The advantages that it gives shrink with its error."""
    batch, trainer = rollouts(), learner(learning_rate=1e-2)
    algorithm, policy, sizes = AlgorithmConfig(advantage=GAE()), model_learner(), []
    for _ in range(30):
        annotated = ready(policy, algorithm, trainer.annotate(batch, frozenset({"value"})))
        sizes.append(float(annotated.require("advantage")[batch.action].abs().mean()))
        trainer.update(annotated, Imitate(ValueLoss(clip=None)))
    assert sizes[-1] < 0.3 * sizes[0]


def model_learner() -> Learner:
    return Learner(model("fp64"), TrainConfig(precision="fp64"))


def test_the_gradient_of_the_full_kl_is_that_of_its_formula() -> None:
    """The learner's gradient is that of the formula over all logits at once, for any micro-batches."""
    batch, reference = rollouts(), model("fp64", seed=7)
    algorithm = AlgorithmConfig(kl=KLS["full"](coefficient=1.0))
    results = []
    for options in ({}, {"max_tokens_per_micro_batch": 1}):
        trainer = Learner(
            model("fp64"),
            TrainConfig(precision="fp64", learning_rate=0.0, max_grad_norm=None, **options),
            reference=FrozenModel(reference, 10_000),
        )
        annotated = batch.replace(
            reward=torch.zeros(batch.num_rollouts, dtype=torch.float64),
            ref_logp=FrozenModel(reference, 10_000).logp(batch),
        )
        estimated = ready(trainer, algorithm, annotated)
        metrics = trainer.update(estimated, Improve(algorithm)).reduce()
        results.append((metrics["kl_loss"], gradient(trainer)))
    policy = model("fp64")
    pack = separate_rows(batch)
    inputs = (pack.ids, pack.positions, PackedAttention(pack))
    at = pack.source[batch.action]
    logp, reference_logp = (net.logits(net.hidden(*inputs))[at].log_softmax(1) for net in (policy, reference))
    (logp.exp() * (logp - reference_logp.detach())).sum(1).mean().backward()  # type: ignore[no-untyped-call]
    for kl_loss, gradients in results:
        assert kl_loss > 1e-3 and kl_loss == pytest.approx(results[0][0], abs=1e-9)
        for name, weight in policy.named_weights():
            assert weight.grad is not None and torch.allclose(gradients[name], weight.grad, rtol=0, atol=1e-9)


def test_columns_of_another_head_are_refused() -> None:
    with pytest.raises(ValueError, match=r"cannot compute the column `old_logp`\. It computes value, final_value"):
        learner().annotate(rollouts(), frozenset({"old_logp"}))
    with pytest.raises(ValueError, match="needs the model's `value`"):
        model_learner().update(rollouts(), Imitate(ValueLoss(clip=None)))
