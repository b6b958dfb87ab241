"""What is told of tokens that nothing is learned from: by an objective, and by a teacher."""

from __future__ import annotations

import pytest
import torch

from etude.algorithms.losses.distill import TopKDistillation
from etude.algorithms.losses.preference import DPO
from etude.algorithms.losses.supervised import SFT, ValueLoss
from etude.batch import Batch, Pack
from etude.data.pack import pack_prefix_tree
from etude.errors import ConfigError
from etude.models import Model, PackedAttention
from etude.recipes.workers.policy_worker import LossObjective
from etude.train import FrozenModel
from tests.train.tasks import VOCABULARY, learner, model, rollouts, weights
from tests.train.test_scoring import pairs


def thoughts(of: Model, batch: Batch, temperature: float = 1.0) -> torch.Tensor:
    """[T, V]: the log-probs before each token, row by row."""
    pack = Pack.from_batch(batch)
    with torch.no_grad():
        logits = of.logits(of.hidden(pack.ids, pack.positions, PackedAttention(pack))) / temperature
    said = logits.log_softmax(1)
    return torch.where(pack.source[:, None] < 0, torch.nan, said[pack.source])


@pytest.mark.parametrize("max_tokens_per_micro_batch", [1, 40, 10_000])
@pytest.mark.parametrize("among", [VOCABULARY, 20])
def test_a_teacher_tells_its_likeliest_tokens(max_tokens_per_micro_batch: int, among: int) -> None:
    batch, teacher = rollouts(), model(seed=1)
    ids, logp = FrozenModel(teacher, max_tokens_per_micro_batch, temperature=0.7).top_tokens(batch, 5, among)
    cut = (thoughts(teacher, batch, 0.7)[:, :among]).log_softmax(1)
    wanted = cut[batch.action].topk(5)
    assert torch.equal(ids[batch.action], wanted.indices)
    assert torch.allclose(logp[batch.action], wanted.values, atol=1e-9)
    assert torch.isnan(logp[~batch.action]).all()


def test_a_teacher_has_nothing_to_tell_of_context() -> None:
    batch = rollouts()
    silent = batch.replace(action=torch.zeros_like(batch.action))
    ids, logp = FrozenModel(model(), 10_000).top_tokens(silent, 3, VOCABULARY)
    assert ids.shape == logp.shape == (batch.num_tokens, 3) and torch.isnan(logp).all()


@pytest.mark.parametrize("max_tokens_per_micro_batch", [1, 40, 10_000])
def test_what_is_measured_is_what_an_update_would_begin_with(max_tokens_per_micro_batch: int) -> None:
    batch, objective = rollouts(), LossObjective(SFT())
    by = learner(max_tokens_per_micro_batch=max_tokens_per_micro_batch)
    before = weights(by)
    found = by.measure(batch, objective).reduce()
    assert by.version == 0 and all(torch.equal(before[name], after) for name, after in weights(by).items())
    updated = learner(max_tokens_per_micro_batch=max_tokens_per_micro_batch).update(batch, objective).reduce()
    assert found["loss"] == pytest.approx(updated["loss"], abs=1e-12) and found["nll"] == updated["nll"]
    nll = -thoughts(by.model, batch).gather(1, batch.ids.long()[:, None])[:, 0][batch.action].mean()
    assert found["loss"] == pytest.approx(float(nll), abs=1e-9)


def test_pairs_stay_together_and_are_told_of_as_they_are_measured() -> None:
    batch, reference, seen = pairs(), FrozenModel(model(seed=1), 40), list[int]()

    def annotated(micro: Batch) -> Batch:
        seen.append(micro.num_groups)
        return micro.replace(ref_logp=reference.logp(micro))

    cut = learner(max_tokens_per_micro_batch=1).measure(batch, LossObjective(DPO()), annotated).reduce()
    whole = learner().measure(annotated(batch), LossObjective(DPO())).reduce()
    assert seen[:-1] == [1] * 4 and cut == pytest.approx(whole, abs=1e-9)


def test_the_teacher_itself_is_at_no_distance() -> None:
    batch = rollouts()

    def annotated(micro: Batch) -> Batch:
        ids, logp = FrozenModel(model(), 10_000).top_tokens(micro, 4, VOCABULARY)
        return micro.replace(teacher_topk_ids=ids, teacher_topk_logp=logp)

    found = learner().measure(batch, LossObjective(TopKDistillation()), annotated).reduce()
    assert found["loss"] == pytest.approx(0, abs=1e-9) and 0 < found["teacher_tail"] < 1


def test_what_a_model_cannot_tell_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs the model's `value`"):
        learner().measure(rollouts(), LossObjective(ValueLoss()))


def test_a_teacher_is_packed_as_everybody() -> None:
    """A prompt that rollouts share is read once, and changes nothing."""
    batch = rollouts()
    found = [
        FrozenModel(model(seed=1), 10_000, pack=pack).top_tokens(batch, 3, VOCABULARY)[1]
        for pack in (pack_prefix_tree, Pack.from_batch)
    ]
    assert torch.allclose(*found, atol=1e-9, equal_nan=True)
