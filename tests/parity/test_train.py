"""The trainer compared with transformers: the same log-probs, the same gradient, however rows are packed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from etude.algorithms.losses.supervised import SFT
from etude.batch import Batch
from etude.models import load, save
from etude.train import Learner, TrainConfig
from tests.train.tasks import Imitate, gradient, model, rollouts

FAMILIES = ("qwen3", "qwen2", "llama", "mistral", "gemma2", "gpt2")


FIRST = ["qwen3", *(pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES if family != "qwen3")]
"""The families; the quick tests use one."""


@pytest.fixture(scope="module", params=FIRST)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Learner, PreTrainedModel]:
    """Return a learner, and the same model run by transformers: eager attention, one row at a time."""
    directory = tmp_path_factory.mktemp("model")
    save(model("fp32", request.param, heads=4, kv_heads=2), directory)
    theirs = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float64).eval()
    config = TrainConfig(precision="fp64", learning_rate=0.0, max_grad_norm=None, max_tokens_per_micro_batch=60)
    return Learner(load(directory, dtype=torch.float64), config, temperature=0.8), theirs


def rows(batch: Batch, theirs: PreTrainedModel) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Return for each row its tokens from the second on, a mask of actions, and the log-probs [t, V]."""
    for start, end in zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True):
        logits = theirs(batch.ids[None, start:end].long()).logits[0, :-1]
        yield batch.ids[start + 1 : end].long(), batch.action[start + 1 : end], (logits / 0.8).log_softmax(-1)


def test_log_probs_and_entropies_are_those_of_transformers(pair: tuple[Learner, PreTrainedModel]) -> None:
    ours, theirs = pair
    batch = rollouts(longest=20)
    annotated = ours.annotate(batch, frozenset({"old_logp", "entropy"}))
    with torch.no_grad():
        judged = list(rows(batch, theirs))
    logp = torch.cat([scores.gather(1, ids[:, None])[:, 0][acts] for ids, acts, scores in judged])
    entropy = torch.cat([-(scores.exp() * scores).sum(1)[acts] for _, acts, scores in judged])
    # Their norms and rotary angles are float32 for any dtype of the weights.
    assert torch.allclose(annotated.require("old_logp")[batch.action], logp, rtol=0, atol=1e-5)
    assert torch.allclose(annotated.require("entropy")[batch.action], entropy, rtol=0, atol=1e-5)


def test_the_gradient_is_that_of_transformers(pair: tuple[Learner, PreTrainedModel]) -> None:
    ours, theirs = pair
    batch = rollouts(longest=20)
    metrics = ours.update(batch, Imitate(SFT())).reduce()
    assert metrics["micro_batches"] > 1
    total = torch.zeros(())
    for ids, acts, logp in rows(batch, theirs):
        total = total - logp.gather(1, ids[:, None])[:, 0][acts].sum()
    loss = total / int(batch.action.sum())
    loss.backward()
    assert metrics["loss"] == pytest.approx(float(loss.detach()), abs=1e-5)
    ours_gradient = gradient(ours)
    for name, parameter in theirs.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(ours_gradient[name], parameter.grad, rtol=0, atol=2e-6), name
        assert float(parameter.grad.abs().max()) > 2e-5, name
