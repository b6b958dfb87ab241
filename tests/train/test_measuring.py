"""Measurement without learning: an objective's metrics, and a teacher's log-probs."""

from __future__ import annotations

import pytest
import torch

from etude.algorithms.losses.distill import TopKDistillation
from etude.algorithms.losses.preference import DPO
from etude.algorithms.losses.supervised import SFT, ValueLoss
from etude.batch import Batch
from etude.data.pack import pack_prefix_tree
from etude.errors import ConfigError
from etude.models import Model, PackedAttention
from etude.recipes.workers.policy_worker import LossObjective
from etude.train import FrozenModel
from tests.packs import separate_rows
from tests.train.tasks import VOCABULARY, learner, model, rollouts, weights
from tests.train.test_scoring import pairs


def log_probs(policy: Model, batch: Batch, temperature: float = 1.0) -> torch.Tensor:
    """[T, V]: return the log-probs before each token, row by row."""
    pack = separate_rows(batch)
    with torch.no_grad():
        logits = policy.logits(policy.hidden(pack.ids, pack.positions, PackedAttention(pack))) / temperature
    logp = logits.log_softmax(1)
    return torch.where(pack.source[:, None] < 0, torch.nan, logp[pack.source])


@pytest.mark.parametrize("max_tokens_per_micro_batch", [1, 40, 10_000])
@pytest.mark.parametrize("among", [VOCABULARY, 20])
def test_a_teacher_computes_its_likeliest_tokens(max_tokens_per_micro_batch: int, among: int) -> None:
    batch, teacher = rollouts(), model(seed=1)
    ids, logp = FrozenModel(teacher, max_tokens_per_micro_batch, temperature=0.7).top_tokens(batch, 5, among)
    restricted = (log_probs(teacher, batch, 0.7)[:, :among]).log_softmax(1)
    expected = restricted[batch.action].topk(5)
    assert torch.equal(ids[batch.action], expected.indices)
    assert torch.allclose(logp[batch.action], expected.values, atol=1e-9)
    assert torch.isnan(logp[~batch.action]).all()


def test_a_teacher_computes_nothing_for_context() -> None:
    batch = rollouts()
    context = batch.replace(action=torch.zeros_like(batch.action))
    ids, logp = FrozenModel(model(), 10_000).top_tokens(context, 3, VOCABULARY)
    assert ids.shape == logp.shape == (batch.num_tokens, 3) and torch.isnan(logp).all()


@pytest.mark.parametrize("max_tokens_per_micro_batch", [1, 40, 10_000])
def test_measured_metrics_are_those_of_an_update(max_tokens_per_micro_batch: int) -> None:
    batch, objective = rollouts(), LossObjective(SFT())
    trainer = learner(max_tokens_per_micro_batch=max_tokens_per_micro_batch)
    before = weights(trainer)
    measured = trainer.measure(batch, objective).reduce()
    assert trainer.version == 0 and all(torch.equal(before[name], after) for name, after in weights(trainer).items())
    updated = learner(max_tokens_per_micro_batch=max_tokens_per_micro_batch).update(batch, objective).reduce()
    assert measured["loss"] == pytest.approx(updated["loss"], abs=1e-12) and measured["nll"] == updated["nll"]
    nll = -log_probs(trainer.model, batch).gather(1, batch.ids.long()[:, None])[:, 0][batch.action].mean()
    assert measured["loss"] == pytest.approx(float(nll), abs=1e-9)


def test_pairs_stay_together_and_are_annotated_per_micro_batch() -> None:
    batch, reference, group_counts = pairs(), FrozenModel(model(seed=1), 40), list[int]()

    def annotate(micro: Batch) -> Batch:
        group_counts.append(micro.num_groups)
        return micro.replace(ref_logp=reference.logp(micro))

    split = learner(max_tokens_per_micro_batch=1).measure(batch, LossObjective(DPO()), annotate).reduce()
    whole = learner().measure(annotate(batch), LossObjective(DPO())).reduce()
    assert group_counts[:-1] == [1] * 4 and split == pytest.approx(whole, abs=1e-9)


def test_distillation_from_the_same_model_has_no_loss() -> None:
    batch = rollouts()

    def annotate(micro: Batch) -> Batch:
        ids, logp = FrozenModel(model(), 10_000).top_tokens(micro, 4, VOCABULARY)
        return micro.replace(teacher_topk_ids=ids, teacher_topk_logp=logp)

    metrics = learner().measure(batch, LossObjective(TopKDistillation()), annotate).reduce()
    assert metrics["loss"] == pytest.approx(0, abs=1e-9) and 0 < metrics["teacher_tail"] < 1


def test_an_objective_without_its_outputs_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs the model's `value`"):
        learner().measure(rollouts(), LossObjective(ValueLoss()))


def test_packing_does_not_change_a_teachers_log_probs() -> None:
    """A prompt that rollouts share is computed once, with the same results."""
    batch = rollouts()
    tree, rows = (
        FrozenModel(model(seed=1), 10_000, pack=pack).top_tokens(batch, 3, VOCABULARY)[1]
        for pack in (pack_prefix_tree, separate_rows)
    )
    assert torch.allclose(tree, rows, atol=1e-9, equal_nan=True)
