"""The engine's claim of batch invariance holds with this CPU's kernels, and with others that MKL offers."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from etude.errors import EngineError
from etude.models import LoraAdapterConfig, Model, adapt
from etude.models.states import Recurrence, Rows, SlotMemory, StateTree
from etude.observe import configure_logging
from etude.records import SamplingParams
from etude.rollout import batch_invariance, engine_steps
from etude.rollout.batch_invariance import (
    ATTENTION_PADDINGS,
    ROW_PADDINGS,
    UNPADDED_SHAPES,
    USUAL_SHAPES,
    ProductShapes,
    find_batch_invariant_shapes,
    find_shapes_of_layers,
)
from tests.families import family_model
from tests.rollout.engines import assert_follows, engine_of, model_of, prompt_of
from tests.rollout.invariance_check import batches_match

OTHER_SHAPES = [ProductShapes(ROW_PADDINGS[0], keys, batch_invariant=True) for keys in ATTENTION_PADDINGS[1:]]
OTHER_SHAPES += [ProductShapes(rows, ATTENTION_PADDINGS[-1], batch_invariant=True) for rows in ROW_PADDINGS[1:]]


def mix_rows(_module: object, _inputs: object, output: Tensor) -> Tensor:
    return output + output.mean(-2, keepdim=True)


def row_mixing_model() -> Model:
    """Return a model whose tokens depend a little on the rest of their batch."""
    model = model_of("gpt2", vocabulary=301)  # a shape that no other test has
    model.module.transformer.ln_f.register_forward_hook(mix_rows)
    return model


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch multiplies without MKL")
def test_other_kernels_are_batch_invariant_too() -> None:
    """In an engine, with adapters and without. Shapes are found for each kind of kernel."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.rollout.invariance_check", "AVX2", "COMPATIBLE"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    reports: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [report["kernels"] for report in reports] == ["AVX2", "COMPATIBLE"]
    for report in reports:
        assert report["plain"] is True
        assert len(report["engines"]) >= 2 and all(one == {"same": True, "exact": True} for one in report["engines"])
    assert not reports[1]["usual"], "these kernels need other shapes, and were really used"


def test_the_claim_holds_with_the_kernels_of_this_processor() -> None:
    with engine_of(model_of()) as engine:
        assert not engine.exact, "nothing is claimed before the trial"
        assert "engine/exact" not in engine.stats()
        assert batches_match(engine) or not engine.exact
        assert engine.exact or not find_shapes_of_layers([(64, 64)], [16]).batch_invariant, "as exact as its products"
        assert engine.stats().reduce()["engine/exact"] == engine.exact


@pytest.mark.slow
@pytest.mark.parametrize("heads", [1, 2])
def test_the_claim_holds_on_two_threads_where_attention_is_one_product(two_threads: None, heads: int) -> None:
    """A single product is divided among threads by its rows, and several are not."""
    with engine_of(model_of(heads=heads, kv_heads=1, head_dim=16)) as engine:
        assert batches_match(engine, (3, 5, 6, 9, 11, 133)) or not engine.exact
        assert engine.exact or not find_shapes_of_layers([(64, 64)], [16]).batch_invariant


@pytest.mark.parametrize(
    "shapes",
    OTHER_SHAPES,
    ids=lambda shapes: f"{shapes.rows.multiple}-{shapes.attention.query_multiple}-{shapes.attention.fixed}",
)
@pytest.mark.parametrize("block_size", [16, 24])
def test_shapes_for_other_processors_compute_the_same(
    shapes: ProductShapes, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They hold here too, and are as near to the model; blocks need not divide their sizes."""
    monkeypatch.setattr(engine_steps, "find_batch_invariant_shapes", lambda _: shapes)
    model = model_of()
    with engine_of(model, block_size=block_size, max_num_seqs=5) as engine:
        assert batches_match(engine) or find_batch_invariant_shapes(model) != USUAL_SHAPES
        prompt, sampling = prompt_of(150), SamplingParams(max_tokens=6, temperature=0)
        assert_follows(model, prompt, engine.generate_all([prompt], [sampling])[0], sampling)


def test_nothing_is_claimed_where_no_shapes_are_batch_invariant(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info")
    with engine_of(row_mixing_model()) as engine:
        assert not batches_match(engine) and not engine.exact
        assert engine.stats().reduce()["engine/exact"] == 0
    log = capsys.readouterr().err
    assert log.count("the last bits of an answer depend on what shares its batch") == 1, "one line"
    assert "linear layers" in log and "not bit for bit" in log
    assert (
        find_batch_invariant_shapes(model_of("gpt2")).batch_invariant
        or not find_shapes_of_layers([(64, 64)], [16]).batch_invariant
    )


@pytest.mark.parametrize("value", [0.0, torch.nan])
def test_an_inconclusive_trial_is_repeated_after_the_weights_change(value: float) -> None:
    model = model_of(vocabulary=304 if value else 302)  # shapes that no other test has
    weights = [weight.detach().clone() for weight in model.parameters()]
    with engine_of(model) as engine, torch.no_grad():
        for weight in model.parameters():
            weight.fill_(value)
        shapes = find_batch_invariant_shapes(model)
        assert not shapes.batch_invariant and not shapes.tested
        with pytest.raises(EngineError, match="not numbers") if value else nullcontext():
            batches_match(engine)
        assert not engine.exact and engine.stats().reduce()["engine/exact"] == 0
        for weight, before in zip(model.parameters(), weights, strict=True):
            weight.copy_(before)
        asyncio.run(engine.update_weights((), 1))
        assert batches_match(engine) or not engine.exact
        assert engine.exact or not find_shapes_of_layers([(64, 64)], [16]).batch_invariant


@pytest.mark.skipif(not find_spec("peft"), reason="adapters are peft's")
def test_adapters_that_are_still_zero_are_tested() -> None:
    """Their second factors are zero at the start of a run, and hide the result of the first ones."""
    model = adapt(model_of("gpt2", vocabulary=303), LoraAdapterConfig(rank=3), seed=0)
    before = [weight.clone() for weight in model.parameters()]
    for name, module in model.module.named_modules():
        if name.endswith("lora_A.default"):
            module.register_forward_hook(mix_rows)
    assert not find_batch_invariant_shapes(model).batch_invariant
    assert all(map(torch.equal, before, model.parameters())), "no weight is touched"
    plain = adapt(model_of("qwen3", vocabulary=303), LoraAdapterConfig(rank=3), seed=0)
    assert (
        find_batch_invariant_shapes(plain).batch_invariant
        or not find_shapes_of_layers([(64, 64), (9, 64), (64, 3)], [16]).batch_invariant
    )


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_a_mixture_of_experts_gives_the_same_bits_in_every_batch(name: str) -> None:
    """An expert may have one row alone and many in a batch: its rows are padded as those of a linear layer are."""
    model = family_model(name, vocab_size=300)
    with engine_of(model) as engine:
        matches = batches_match(engine)
        assert matches if engine.exact else not find_shapes_of_layers([(32, 32)], [8]).batch_invariant


@pytest.mark.slow
def test_a_recurrence_that_depends_on_its_batch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scan whose first state decays with the number of rows, which no pass of single tokens shows."""
    model = family_model("qwen3_5_text", linear_key_head_dim=32, linear_value_head_dim=32, vocab_size=65)
    claimed = find_batch_invariant_shapes(model).batch_invariant
    assert claimed or not find_shapes_of_layers([(64, 64)], [16]).batch_invariant
    scan = StateTree.scan

    def shaken(tree: StateTree, recurrence: Recurrence, inputs: Rows, memory: SlotMemory | None = None) -> Tensor:
        return scan(tree, recurrence, inputs, memory) * (1 + 1e-6 * (len(inputs[0]) > 256))

    monkeypatch.setattr(StateTree, "scan", shaken)
    other = family_model("qwen3_5_text", linear_key_head_dim=32, linear_value_head_dim=32, vocab_size=66)
    assert not find_batch_invariant_shapes(other).batch_invariant


def test_a_matrix_of_each_shape_of_a_large_model_is_tested_with_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole model has few, and would not show what a kernel does only with many."""

    def multiply(x: Tensor, weight: Tensor) -> Tensor:
        row_counts.append(len(x))
        return linear(x, weight) + (len(x) if len(x) > 300 and len(weight) == differs else 0)

    monkeypatch.setattr(batch_invariance, "MAX_TRIAL_PRODUCTS", 1)  # any model is large
    monkeypatch.setattr(batch_invariance, "prepacked_linear", multiply)
    for vocabulary, differs in ((305, None), (306, 64)):  # shapes that no other test has
        row_counts: list[int] = []
        rows = find_batch_invariant_shapes(model_of(vocabulary=vocabulary)).rows
        assert rows.fixed == (differs is not None) or find_shapes_of_layers([(64, 64)], [16]).rows != ROW_PADDINGS[0]
        assert max(row_counts, default=400) == 400


def test_nothing_is_claimed_unless_a_float32_engine_is_deterministic() -> None:
    for model, deterministic in ((model_of(), False), (model_of().copy(dtype=torch.bfloat16), True)):
        with engine_of(model, deterministic=deterministic) as engine:
            batches_match(engine)
            assert engine._steps._shapes == UNPADDED_SHAPES and not engine.exact
