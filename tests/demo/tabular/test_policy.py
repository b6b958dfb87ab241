"""The tabular policy offers every column and output that an algorithm may require, and each is exact."""

from __future__ import annotations

import pytest
import torch

from etude.batch import Batch
from etude.demo.tabular.enumerated_mdp import EnumeratedMDP
from etude.demo.tabular.policy import TabularPolicy
from etude.errors import ConfigError

COLUMNS = frozenset(
    {
        "old_logp",
        "ref_logp",
        "teacher_logp",
        "teacher_topk_ids",
        "teacher_topk_logp",
        "entropy",
        "sum_pi_squared",
        "value",
        "greedy_reward",
    }
)


def sampled(seed: int = 0) -> tuple[TabularPolicy, Batch]:
    policy = TabularPolicy(EnumeratedMDP(), seed)
    prompts = torch.arange(12) % 2
    return policy, policy.sample(policy.logp().detach(), prompts, torch.Generator().manual_seed(seed))


def test_the_sampler_records_what_it_sampled_with() -> None:
    policy, batch = sampled()
    assert torch.equal(batch.require("role"), torch.arange(12) % 2)
    annotated = policy.annotate(batch, frozenset({"old_logp"}))
    assert torch.equal(annotated.require("old_logp"), batch.require("behavior_logp"))


def test_the_same_seed_samples_the_same() -> None:
    assert torch.equal(sampled(3)[1].ids, sampled(3)[1].ids)


def test_only_required_columns_are_filled() -> None:
    policy, batch = sampled()
    assert policy.annotate(batch, frozenset({"value"})).entropy is None


def test_every_column_agrees_with_the_table_token_by_token() -> None:
    policy, batch = sampled(1)
    batch = policy.annotate(batch, COLUMNS)
    for t in range(batch.num_tokens):
        state, token = int(batch.require("state")[t]), int(batch.ids[t])
        pi = policy.table.detach()[state].softmax(0)
        assert float(batch.require("old_logp")[t]) == pytest.approx(float(pi[token].log()))
        assert float(batch.require("entropy")[t]) == pytest.approx(-float((pi * pi.log()).sum()))
        assert float(batch.require("sum_pi_squared")[t]) == pytest.approx(float((pi * pi).sum()))
        assert float(batch.require("ref_logp")[t]) == pytest.approx(float(policy.reference[state, token]))
        assert float(batch.require("teacher_logp")[t]) == pytest.approx(float(policy.teacher[state, token]))
        top = int(batch.require("teacher_topk_ids")[t, 0])
        assert float(batch.require("teacher_topk_logp")[t, 0]) == pytest.approx(float(policy.teacher[state].max()))
        assert float(policy.teacher[state, top]) == pytest.approx(float(policy.teacher[state].max()))


def test_the_forward_pass_gives_the_requested_outputs_with_a_gradient() -> None:
    policy, batch = sampled(2)
    batch = policy.annotate(batch, COLUMNS)
    names = frozenset({"logp", "entropy", "full_kl", "topk_logp"})
    outputs = policy.forward(batch, names)
    assert outputs.logp is not None and outputs.full_kl is not None and outputs.topk_logp is not None
    assert torch.allclose(outputs.logp, batch.require("old_logp"))
    assert torch.allclose(outputs.full_kl, torch.zeros(batch.num_tokens, dtype=torch.float64), atol=1e-12)
    assert outputs.topk_logp.shape == (batch.num_tokens, 3)
    outputs.logp.sum().backward()
    assert policy.table.grad is not None
    assert outputs.value is None


def test_an_output_that_a_table_does_not_have_is_refused_in_a_sentence() -> None:
    policy, batch = sampled()
    with pytest.raises(ConfigError, match=r"needs the model's `score`, which a table of logits does not have"):
        policy.forward(batch, frozenset({"score"}))
