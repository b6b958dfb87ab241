"""The engine's claim of exactness holds with this processor's kernels, and with others that MKL offers."""

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
from etude.observe import configure_logging
from etude.records import SamplingParams
from etude.rollout import steady, torch_engine
from etude.rollout.steady import KEY_FORMS, LOOSE, ROW_FORMS, STEADY, Form, plain_forms, steady_form
from tests.rollout.company import alike
from tests.rollout.engines import assert_follows, engine_of, model_of, prompt_of

OTHERS = [Form(ROW_FORMS[0], keys, exact=True) for keys in KEY_FORMS[1:]]
OTHERS += [Form(rows, KEY_FORMS[-1], exact=True) for rows in ROW_FORMS[1:]]


def mingle(_module: object, _given: object, output: Tensor) -> Tensor:
    return output + output.mean(-2, keepdim=True)


def mingling() -> Model:
    """A model whose tokens depend a little on the rest of their batch."""
    model = model_of("gpt2", vocabulary=301)  # a shape that no other test has
    model.module.transformer.ln_f.register_forward_hook(mingle)
    return model


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch multiplies without MKL")
def test_it_holds_by_other_kernels() -> None:
    """In an engine, with adapters and without. A form is found for each kind of kernel."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.rollout.company", "AVX2", "COMPATIBLE"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    told: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [each["kernels"] for each in told] == ["AVX2", "COMPATIBLE"]
    for each in told:
        assert each["plain"] is True
        assert len(each["engines"]) >= 2 and all(one == {"same": True, "exact": True} for one in each["engines"])
    assert not told[1]["usual"], "these kernels need another form, and were really used"


def test_it_holds_by_those_of_this_processor() -> None:
    with engine_of(model_of()) as engine:
        assert not engine.exact, "nothing is claimed before it was tried"
        assert "engine/exact" not in engine.stats()
        assert alike(engine) or not engine.exact
        assert engine.exact or not plain_forms([(64, 64)], [16]).exact, "as exact as its products"
        assert engine.stats().reduce()["engine/exact"] == engine.exact


@pytest.mark.slow
@pytest.mark.parametrize("heads", [1, 2])
def test_it_holds_on_two_threads_where_attention_is_one_product(two_threads: None, heads: int) -> None:
    """A single product is divided among threads by its rows, and several are not."""
    with engine_of(model_of(heads=heads, kv_heads=1, head_dim=16)) as engine:
        assert alike(engine, (3, 5, 6, 9, 11, 133)) or not engine.exact
        assert engine.exact or not plain_forms([(64, 64)], [16]).exact


@pytest.mark.parametrize(
    "form", OTHERS, ids=lambda form: f"{form.rows.multiple}-{form.keys.multiple}-{form.keys.fixed}"
)
@pytest.mark.parametrize("block_size", [16, 24])
def test_the_forms_of_other_processors_compute_the_same(
    form: Form, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They hold here too, and are as near to the model; blocks need not divide their sizes."""
    monkeypatch.setattr(torch_engine, "steady_form", lambda _: form)
    model = model_of()
    with engine_of(model, block_size=block_size, max_running=5) as engine:
        assert alike(engine) or steady_form(model) != STEADY
        prompt, sampling = prompt_of(150), SamplingParams(max_tokens=6, temperature=0)
        assert_follows(model, prompt, engine.generate_all([prompt], [sampling])[0], sampling)


def test_where_no_form_holds_nothing_is_claimed(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info")
    with engine_of(mingling()) as engine:
        assert not alike(engine) and not engine.exact
        assert engine.stats().reduce()["engine/exact"] == 0
    told = capsys.readouterr().err
    assert told.count("the last bits of an answer depend on what shares its batch") == 1, "one line"
    assert "linear layers" in told and "not bit for bit" in told
    assert steady_form(model_of("gpt2")).exact or not plain_forms([(64, 64)], [16]).exact


@pytest.mark.parametrize("value", [0.0, torch.nan])
def test_weights_that_tell_nothing_are_tried_again_once_they_are_others(value: float) -> None:
    model = model_of(vocabulary=304 if value else 302)  # shapes that no other test has
    weights = [weight.detach().clone() for weight in model.parameters()]
    with engine_of(model) as engine, torch.no_grad():
        for weight in model.parameters():
            weight.fill_(value)
        form = steady_form(model)
        assert not form.exact and not form.tried
        with pytest.raises(EngineError, match="not numbers") if value else nullcontext():
            alike(engine)
        assert not engine.exact and engine.stats().reduce()["engine/exact"] == 0
        for weight, kept in zip(model.parameters(), weights, strict=True):
            weight.copy_(kept)
        asyncio.run(engine.update_weights((), 1))
        assert alike(engine) or not engine.exact
        assert engine.exact or not plain_forms([(64, 64)], [16]).exact


@pytest.mark.skipif(not find_spec("peft"), reason="adapters are peft's")
def test_adapters_are_tried_though_they_change_nothing_yet() -> None:
    """Their second factors are zero at the start of a run, and hide the result of the first ones."""
    model = adapt(model_of("gpt2", vocabulary=303), LoraAdapterConfig(rank=3), seed=0)
    before = [weight.clone() for weight in model.parameters()]
    for name, part in model.module.named_modules():
        if name.endswith("lora_A.default"):
            part.register_forward_hook(mingle)
    assert not steady_form(model).exact
    assert all(map(torch.equal, before, model.parameters())), "no weight is touched"
    plain = adapt(model_of("qwen3", vocabulary=303), LoraAdapterConfig(rank=3), seed=0)
    assert steady_form(plain).exact or not plain_forms([(64, 64), (9, 64), (64, 3)], [16]).exact


def test_of_a_large_model_a_matrix_of_each_shape_has_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole model has few, and would not show what a kernel does only with many."""

    def of_many(x: Tensor, weight: Tensor) -> Tensor:
        tried.append(len(x))
        return linear(x, weight) + (len(x) if len(x) > 300 and len(weight) == differs else 0)

    monkeypatch.setattr(steady, "BUDGET", 1)  # any model is large
    monkeypatch.setattr(steady, "prepacked_linear", of_many)
    for vocabulary, differs in ((305, None), (306, 64)):  # shapes that no other test has
        tried: list[int] = []
        rows = steady_form(model_of(vocabulary=vocabulary)).rows
        assert rows.fixed == (differs is not None) or plain_forms([(64, 64)], [16]).rows != ROW_FORMS[0]
        assert max(tried, default=400) == 400


def test_nothing_is_claimed_where_nothing_is_asked_for() -> None:
    for model, asked in ((model_of(), False), (model_of().copy(dtype=torch.bfloat16), True)):
        with engine_of(model, deterministic=asked) as engine:
            alike(engine)
            assert engine._form == LOOSE and not engine.exact
