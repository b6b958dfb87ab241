"""Publishing within one process: no bytes where memory is shared, all or nothing where it is not."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from etude.errors import ConfigError, EngineError
from etude.models import Model, create, tiny_config
from etude.models.published_names import expert_name
from etude.records import SamplingParams
from etude.rollout import TorchEngineConfig
from etude.rollout.engine_thread import WeightCopy
from etude.rollout.torch_engine import TorchEngine
from etude.sync import publish_to_engine

CONFIG = tiny_config(50, layers=2, hidden=32, context=128)
ENGINE = TorchEngineConfig(kv_gib=0.001)
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
PROMPT = np.arange(5, dtype=np.int32)


def named(model: Model) -> dict[str, Tensor]:
    return {name: weight.detach() for name, weight in model.named_weights()}


def publish(engine: TorchEngine, weights: Iterable[tuple[str, Tensor]], version: int) -> dict[str, float]:
    return asyncio.run(publish_to_engine(engine, weights, version)).reduce()


def generate(engine: TorchEngine) -> tuple[list[int], list[float], set[int]]:
    """Return a greedy answer, its log-probs, and the versions of its tokens."""
    (completion,) = engine.generate_all([PROMPT], [GREEDY])
    assert completion.raw_logp is not None
    return completion.ids.tolist(), completion.raw_logp.tolist(), set(completion.version.tolist())


def test_publishing_shared_weights_copies_no_byte() -> None:
    trained, other = create(CONFIG, seed=0), create(CONFIG, seed=1)
    with TorchEngine(trained, None, ENGINE) as engine, TorchEngine(other, None, ENGINE) as wanted:
        before = generate(engine)
        with torch.no_grad():
            for name, weight in trained.named_weights():
                weight.copy_(named(other)[name])
        metrics = publish(engine, named(trained).items(), 3)
        assert metrics["publish_bytes"] == 0 and metrics["publish_ms"] > 0
        assert engine.version == 3
        ids, logp, versions = generate(engine)
        assert (ids, logp) == generate(wanted)[:2] != before[:2]
        assert versions == {3}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_is_refreshed_in_place(dtype: torch.dtype) -> None:
    trained, held = create(CONFIG, seed=0), create(CONFIG, seed=1, dtype=dtype)
    places = {name: weight.data_ptr() for name, weight in held.named_weights()}
    with TorchEngine(held, None, ENGINE) as engine, TorchEngine(trained.copy(dtype=dtype), None, ENGINE) as wanted:
        before = generate(engine)
        metrics = publish(engine, named(trained).items(), 1)
        assert metrics["publish_bytes"] == sum(weight.nbytes for weight in named(held).values())
        assert generate(engine)[:2] == generate(wanted)[:2] != before[:2]
        assert engine.version == 1
    assert {name: weight.data_ptr() for name, weight in held.named_weights()} == places
    assert all(torch.equal(weight, named(trained)[name].to(dtype)) for name, weight in named(held).items())


def test_generated_weights_are_freed_one_by_one() -> None:
    trained, held = create(CONFIG, seed=0), create(CONFIG, seed=1)
    made: list[weakref.ref[Tensor]] = []
    most = 0

    def brought() -> Iterator[tuple[str, Tensor]]:
        nonlocal most
        for name, weight in named(trained).items():
            whole = weight.clone()
            made.append(weakref.ref(whole))
            most = max(most, sum(weak() is not None for weak in made))
            yield name, whole

    with TorchEngine(held, None, ENGINE) as engine:
        shapes = {name: weight.shape for name, weight in trained.named_weights()}
        metrics = asyncio.run(publish_to_engine(engine, brought(), 1, shapes)).reduce()
        assert metrics["publish_bytes"] == sum(weight.nbytes for weight in named(held).values())
    assert len(made) > 9 and most <= 2
    assert all(torch.equal(weight, named(trained)[name]) for name, weight in named(held).items())


def test_experts_may_come_one_by_one() -> None:
    trained, held = (create(tiny_config(50, family="qwen3_moe"), seed=seed) for seed in (0, 1))

    def parts() -> Iterator[tuple[str, Tensor]]:
        for name, weight in named(trained).items():
            if weight.ndim == 3:
                yield from ((expert_name(name, expert), part) for expert, part in enumerate(weight))
            else:
                yield name, weight

    copy = WeightCopy(held)
    copy.run(parts())
    assert copy.is_whole
    assert all(torch.equal(weight, named(trained)[name]) for name, weight in named(held).items())
    with pytest.raises(EngineError, match=r"1 weights were not sent, model[.]layers[.]0[.]mlp[.]experts[.]down_proj"):
        WeightCopy(held).run(part for part in parts() if part[0] != "model.layers.0.mlp.experts.down_proj[2]")
    with pytest.raises(EngineError, match=r"down_proj\[2\] .* got it before"):
        WeightCopy(held).run(2 * [part for part in parts() if part[0].endswith("down_proj[2]")])


def test_weights_that_do_not_fit_are_refused_before_any_is_written() -> None:
    held = create(CONFIG, seed=1)
    before = {name: weight.clone() for name, weight in named(held).items()}
    with TorchEngine(held, None, ENGINE) as engine:
        for config, complaint in (
            (tiny_config(50, layers=3, hidden=32), "the trainer has `model.layers.2.* and the engine has not"),
            (tiny_config(50, layers=1, hidden=32), "the engine has `model.layers.1.* and the trainer has not"),
            (
                tiny_config(50, layers=2, hidden=64),
                r"`model.embed_tokens.weight` is \[50, 64\] in the trainer and \[50, 32\]",
            ),
        ):
            with pytest.raises(ConfigError, match=complaint):
                publish(engine, named(create(config, seed=0)).items(), 1)
            assert engine.version == 0 and generate(engine)[2] == {0}
    assert all(torch.equal(weight, before[name]) for name, weight in named(held).items())


def test_a_failure_in_the_middle_takes_the_engine_out_of_service_until_the_next_publish() -> None:
    trained, held = create(CONFIG, seed=0), create(CONFIG, seed=1)
    torn = named(trained)
    torn["model.norm.weight"] = torn["model.norm.weight"].to("meta")  # it has a shape and no numbers
    with TorchEngine(held, None, ENGINE) as engine, TorchEngine(trained, None, ENGINE) as wanted:
        with pytest.raises(NotImplementedError):
            publish(engine, torn.items(), 1)
        assert engine.version == 0
        with pytest.raises(EngineError, match="half-way"):
            generate(engine)
        publish(engine, named(trained).items(), 2)
        assert generate(engine)[:2] == generate(wanted)[:2]
        assert engine.version == 2
