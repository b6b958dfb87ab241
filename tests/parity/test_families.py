"""Families whose layers are transformers' own: a packed tree gives what transformers gives, row by row."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from etude.batch import Pack
from etude.checkpoint import export
from etude.models import Model, PackedAttention, load
from etude.models.loading import wrap_module
from etude.models.model import stored_buffers
from etude.records import SamplingParams
from etude.rollout.batch_invariance import find_shapes_of_layers
from tests.families import FAMILIES, by_transformers, family_model
from tests.models.packs import pack_of, paths
from tests.rollout.engines import engine_of, prompt_of, same

TREE = ((-1, 70), (0, 7), (0, 90), (0, 1), (-1, 6), (4, 3), (5, 2), (5, 65), (-1, 11))
"""Rows of 1 to 170 tokens in three levels, as (parent, length)."""
QUICK = ("gpt_oss", "qwen3_5_text")
CASES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]


def compare(model: Model, reference: PreTrainedModel) -> tuple[float, float]:
    """Return the largest difference of logits, and of a weight's gradient, over the largest value."""
    tree = pack_of(TREE, vocabulary=model.vocab_size)
    rows = paths(tree)
    generator = torch.Generator().manual_seed(3)
    factors = [torch.randn(len(row), model.vocab_size, generator=generator).to(model.dtype) for row in rows]
    logits = run(model, tree)
    wanted = [reference(tree.ids[row][None].long(), use_cache=False).logits[0] for row in rows]
    forward = max(_off(logits[row], other) for row, other in zip(rows, wanted, strict=True))
    torch.stack([(logits[row] * factor).sum() for row, factor in zip(rows, factors, strict=True)]).sum().backward()
    torch.stack([(other * factor).sum() for other, factor in zip(wanted, factors, strict=True)]).sum().backward()
    gradients = {name: weight.grad for name, weight in reference.named_parameters()}
    backward = 0.0
    for name, weight in model.module.named_parameters():
        if (gradient := gradients[name]) is not None:
            backward = max(backward, _off(weight.grad, gradient))
    return forward, backward


def _off(ours: Tensor | None, theirs: Tensor) -> float:
    if not theirs.any():
        return 0.0 if ours is None or not ours.any() else 1.0
    assert ours is not None, "the gradient is missing"
    return float((ours - theirs).detach().abs().max() / theirs.detach().abs().max())


@pytest.mark.parametrize("name", CASES)
def test_a_packed_tree_gives_the_logits_and_gradients_of_transformers(name: str) -> None:
    model = family_model(name)
    forward, backward = compare(model, by_transformers(model))
    assert forward < 1e-4
    assert backward < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", list(FAMILIES))
def test_in_float64_the_difference_is_rounding_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' casts to float32 are lifted."""
    torch.set_default_dtype(torch.float64)
    try:
        model = family_model(name, torch.float64)
        reference = by_transformers(model)
    finally:
        torch.set_default_dtype(torch.float32)
    for alias in ("float32", "float"):
        monkeypatch.setattr(torch, alias, torch.float64)
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    forward, backward = compare(model, reference)
    assert forward < 1e-12
    assert backward < 1e-11


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_exported_files_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """With the buffers that files store; Etude and transformers load them."""
    model, pack = family_model(name), pack_of([(-1, 20)], vocabulary=64)
    for _, buffer in stored_buffers(model.module).items():
        buffer.add_(torch.rand(buffer.shape, generator=torch.Generator().manual_seed(4)))
    export(model.with_buffers(model.merged_weights()), model.config_dict(), tmp_path)
    with torch.no_grad():
        wanted = run(model, pack)
        torch.testing.assert_close(run(load(tmp_path, dtype=torch.float32), pack), wanted, rtol=0, atol=0)
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
        torch.testing.assert_close(theirs(pack.ids[None].long()).logits[0], wanted, rtol=1e-4, atol=1e-4)
        shared = wrap_module(AutoModelForCausalLM.from_pretrained(tmp_path))
        torch.testing.assert_close(run(shared, pack), wanted, rtol=0, atol=0)


def run(model: Model, pack: Pack) -> Tensor:
    return model.logits(model.hidden(pack.ids, pack.positions, PackedAttention(pack)))


PROMPTS = [prompt_of(length, seed=length, vocabulary=64) for length in (150, 70, 64, 5, 200)]
REQUESTS = [*[PROMPTS[0]] * 3, *[PROMPTS[1]] * 2, *PROMPTS[2:], PROMPTS[3], np.concatenate([PROMPTS[0], PROMPTS[3]])]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, min_tokens=12)
MODES: dict[str, dict[str, Any]] = {
    "plain": {"deterministic": False},
    "chunks of 64": {"deterministic": False, "max_num_batched_tokens": 64},
    "few blocks": {"deterministic": False, "blocks": 40},
    "deterministic": {"deterministic": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_the_engine_answers_as_transformers_however_work_is_divided(name: str) -> None:
    """Twice each, so that the second time finds cached prefixes; its log-probs are the trainer's."""
    model = family_model(name)
    reference = by_transformers(model)
    answers: dict[bytes, tuple[list[int], np.ndarray]] = {}
    for mode, options in MODES.items():
        with engine_of(model, max_num_seqs=16, **options) as engine:
            for _ in range(2):
                completions = engine.generate_all(REQUESTS, [GREEDY] * len(REQUESTS))
                for prompt, completion in zip(REQUESTS, completions, strict=True):
                    if prompt.tobytes() not in answers:
                        ids = likeliest(reference, prompt, completion.ids)
                        answers[prompt.tobytes()] = ids, trainer_logp(model, prompt, completion.ids)
                    ids, logp = answers[prompt.tobytes()]
                    assert completion.ids.tolist() == ids, mode
                    assert completion.raw_logp is not None
                    assert np.abs(completion.raw_logp - logp).max() < 2e-5, mode


@torch.no_grad()
def likeliest(reference: PreTrainedModel, prompt: np.ndarray, answer: np.ndarray) -> list[int]:
    """Return the likeliest token at each place of an answer, after the tokens before, without a cache."""
    assert len(answer) == GREEDY.max_tokens
    ids = torch.from_numpy(np.concatenate([prompt, answer]).astype(np.int64))
    return reference(ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()


@torch.no_grad()
def trainer_logp(model: Model, prompt: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return the log-probs of an answer as the trainer computes them."""
    row = torch.from_numpy(np.concatenate([prompt, ids]))
    pack = pack_of([(-1, len(row))])
    logp = model.logits(model.hidden(row, pack.positions, PackedAttention(pack))).log_softmax(-1)
    return logp[len(prompt) - 1 : -1].gather(1, row[len(prompt) :, None].long())[:, 0].numpy()


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_checkpointed_layers_give_the_same_gradient_bits(name: str) -> None:
    """Also where the products of experts are kept."""
    model, tree = family_model(name), pack_of(TREE[:4], vocabulary=64)
    gradients: list[list[Tensor | None]] = []
    for model.activation_checkpointing in ("none", "full", "selective", "offload"):
        loss = model.hidden(tree.ids, tree.positions, PackedAttention(tree)).square().sum()
        gradients.append(list(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)))
    for others in gradients[1:]:
        for one, other in zip(gradients[0], others, strict=True):
            assert one is other or (one is not None and other is not None and torch.equal(one, other))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lfm2", "qwen3_5_text", "qwen3_5_text wide", "falcon_h1", "gpt_oss", "lfm2_moe"])
def test_an_engine_that_claims_exactness_gives_the_same_bits_in_every_batch(name: str) -> None:
    """Alone and in a batch, in chunks, from cached prefixes, and after preemptions."""
    wide: dict[str, Any] = {"linear_key_head_dim": 32, "linear_value_head_dim": 32} if name.endswith("wide") else {}
    model = family_model(name.split()[0], **wide)
    answers = {}
    for prompt in {prompt.tobytes(): prompt for prompt in REQUESTS}.values():
        with engine_of(model, max_num_seqs=16) as engine:
            (answers[prompt.tobytes()],) = engine.generate_all([prompt], [GREEDY])
    alone = [answers[prompt.tobytes()] for prompt in REQUESTS]
    for options in ({}, {"max_num_batched_tokens": 64}, {"blocks": 40}):
        with engine_of(model, max_num_seqs=16, **options) as engine:  # type: ignore[arg-type]
            for _ in range(2):
                together = engine.generate_all(REQUESTS, [GREEDY] * len(REQUESTS))
                assert not engine.exact or all(map(same, alone, together)), options
        if name == "lfm2":
            assert engine.exact or not find_shapes_of_layers([(64, 64)], [16]).batch_invariant


def test_the_guide_lists_the_families_that_are_compared() -> None:
    guide = (Path(__file__).parents[2] / "docs/guides/models.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in guide.splitlines() if line.startswith("| `")]
    listed = set(re.findall(r"`(\w+)`", " ".join(rows)))
    assert listed >= {name.split()[0] for name in FAMILIES}
