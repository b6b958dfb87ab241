"""Critics, reward models and whole distributions: what a learner with another head, or with a reference, computes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from etude.algorithms import AlgorithmConfig
from etude.algorithms.advantages.token import GAE
from etude.algorithms.kl import KLS
from etude.algorithms.losses.preference import RewardModelLoss
from etude.algorithms.losses.supervised import ValueLoss
from etude.batch import Batch, Pack
from etude.data.pack import pack_prefix_tree
from etude.models import Model, PackedAttention, create, tiny_config
from etude.train import FrozenModel, Learner, TrainConfig
from tests.train.tasks import VOCABULARY, Imitate, Improve, gradient, model, ready, rollouts


def judge(seed: int = 0) -> Model:
    return create(tiny_config(VOCABULARY, layers=2, hidden=32), seed=seed, dtype=torch.float64, head="score")


def learner(of: Model | None = None, **options: object) -> Learner:
    given = {"learning_rate": 0.0, "max_grad_norm": None, "precision": "fp64", **options}
    pack = given.pop("pack", pack_prefix_tree)
    return Learner(of or judge(), TrainConfig(**given), pack=pack)  # type: ignore[arg-type]


def pairs() -> Batch:
    """Groups of two, of which one was preferred."""
    batch = rollouts(groups=4, size=3)
    kept = batch.select([0, 1, 4, 5, 6, 7, 9, 10])
    assert kept.reward is not None and torch.bincount(kept.group).tolist() == [2, 2, 2, 2]
    return kept


def by_hand(batch: Batch) -> tuple[Tensor, Tensor]:
    """The value before each action token, and of the state after each rollout's last token."""
    pack, critic = Pack.from_batch(batch), judge()
    with torch.no_grad():
        said = critic.logits(critic.hidden(pack.ids, pack.positions, PackedAttention(pack)))[:, 0]
    value = torch.where(batch.action, pack.unpack(said), torch.nan)
    after = [said[batch.offsets[rows[-1] + 1] - 1] if len(rows) else torch.tensor(torch.nan) for rows in _rows(batch)]
    return value, torch.stack([each.double() for each in after])


def _rows(batch: Batch) -> list[Tensor]:
    return [(batch.unit == rollout).nonzero()[:, 0] for rollout in range(batch.num_rollouts)]


@pytest.mark.parametrize(
    "options", [{}, {"max_tokens_per_micro_batch": 1}, {"pack": Pack.from_batch, "max_tokens_per_micro_batch": 40}]
)
def test_values_are_read_before_each_token_and_after_the_last(options: dict[str, object]) -> None:
    """However the batch is cut; a rollout without a row has none."""
    batch = rollouts()
    value, after = by_hand(batch)
    assert torch.isnan(after).sum() == 1, "one rollout of the batch has no row"
    found = learner(**options).annotate(batch, frozenset({"value", "final_value"}))
    assert torch.allclose(found.require("value"), value, rtol=0, atol=1e-9, equal_nan=True)
    assert torch.allclose(found.require("final_value"), after, rtol=0, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("loss", [ValueLoss(), ValueLoss(reduction="seq-mean-token-mean"), RewardModelLoss()])
def test_an_update_does_not_depend_on_how_it_is_cut(loss: ValueLoss | RewardModelLoss) -> None:
    """The micro-batch law, for heads that score."""
    batch = pairs()
    if isinstance(loss, ValueLoss):
        valued = learner().annotate(batch, frozenset({"value"}))
        earned = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        batch = valued.replace(returns=earned)
    found = []
    for options in (
        {},
        {"max_tokens_per_micro_batch": 1},
        {"pack": Pack.from_batch},
        {"activation_checkpointing": True},
    ):
        by = learner(**options)
        told = by.update(batch, Imitate(loss, loss.split_unit)).reduce()
        found.append((told["loss"], gradient(by)))
    assert max(float(value.abs().max()) for value in found[0][1].values()) > 1e-3
    for told, again in found[1:]:
        assert told == pytest.approx(found[0][0], abs=1e-9)
        assert all(torch.allclose(again[name], found[0][1][name], rtol=0, atol=1e-9) for name in again)


def test_a_reward_model_learns_which_of_two_was_preferred() -> None:
    batch, by = pairs(), learner(learning_rate=1e-2)
    told = [by.update(batch, Imitate(RewardModelLoss(), "group")).reduce() for _ in range(20)]
    assert told[-1]["loss"] < 0.2 * told[0]["loss"] and told[-1]["accuracy"] == 1.0


def test_a_critic_learns_what_will_be_earned() -> None:
    """And the advantages that it makes shrink with its error."""
    batch, by = rollouts(), learner(learning_rate=1e-2)
    algorithm, policy, sizes = AlgorithmConfig(advantage=GAE()), model_learner(), []
    for _ in range(30):
        valued = ready(policy, algorithm, by.annotate(batch, frozenset({"value"})))
        sizes.append(float(valued.require("advantage")[batch.action].abs().mean()))
        by.update(valued, Imitate(ValueLoss(clip=None)))
    assert sizes[-1] < 0.3 * sizes[0]


def model_learner() -> Learner:
    return Learner(model("fp64"), TrainConfig(precision="fp64"))


def test_the_full_kl_holds_a_policy_to_its_reference() -> None:
    """Its gradient in a run of the learner is that of the formula over all logits at once, however the batch is cut."""
    batch, reference = rollouts(), model("fp64", seed=7)
    algorithm = AlgorithmConfig(kl=KLS["full"](coefficient=1.0))
    found = []
    for options in ({}, {"max_tokens_per_micro_batch": 1}):
        by = Learner(
            model("fp64"),
            TrainConfig(precision="fp64", learning_rate=0.0, max_grad_norm=None, **options),
            reference=FrozenModel(reference, 10_000),
        )
        held = batch.replace(
            reward=torch.zeros(batch.num_rollouts, dtype=torch.float64),
            ref_logp=FrozenModel(reference, 10_000).logp(batch),
        )
        level = ready(by, algorithm, held)
        told = by.update(level, Improve(algorithm)).reduce()
        found.append((told["kl_loss"], gradient(by)))
    policy = model("fp64")
    pack = Pack.from_batch(batch)
    where = (pack.ids, pack.positions, PackedAttention(pack))
    at = pack.source[batch.action]
    logp, theirs = (each.logits(each.hidden(*where))[at].log_softmax(1) for each in (policy, reference))
    (logp.exp() * (logp - theirs.detach())).sum(1).mean().backward()  # type: ignore[no-untyped-call]
    for told, grown in found:
        assert told > 1e-3 and told == pytest.approx(found[0][0], abs=1e-9)
        for name, weight in policy.named_weights():
            assert weight.grad is not None and torch.allclose(grown[name], weight.grad, rtol=0, atol=1e-9)


def test_each_head_knows_its_own_columns() -> None:
    with pytest.raises(ValueError, match=r"cannot compute the column `old_logp`\. It computes value, final_value"):
        learner().annotate(rollouts(), frozenset({"old_logp"}))
    with pytest.raises(ValueError, match="needs the model's `value`"):
        model_learner().update(rollouts(), Imitate(ValueLoss(clip=None)))
