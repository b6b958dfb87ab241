"""Images at a real server of SGLang: its log-probs are those of the model that trains, and its counts are compared."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from etude.chat import Tokenizer
from etude.errors import ConfigError, DataError, EngineError
from etude.images import PromptImages
from etude.records import SamplingParams
from etude.rollout import ServerPool, SglangConfig
from etude.rollout.launch import start_servers
from tests.components import require_environment
from tests.rollout import sglang_on_cpu
from tests.rollout.shown import Shown, png
from tests.served import AT_START, OPTIONS
from tests.vlms import write_served_vlm

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

CLOSE = 1e-5
RED, BLUE, TALL, SMALL = png(0, 150, 120), png(3, 150, 120), png(1, 90, 200), png(2, 99, 140)
BEFORE, AFTER = "<|vision_start|>", "<|vision_end|>"
"""The words that templates write around an image. SGLang finds no image without it."""
SAMPLING = SamplingParams(max_tokens=8)


@pytest.fixture(scope="module", params=["qwen2_5_vl", pytest.param("qwen3_vl", marks=pytest.mark.soak)])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Shown, ServerPool]]:
    """A model with a vision tower, and a server that samples from it."""
    directory = tmp_path_factory.mktemp("sglang-images")
    model = directory / "model"
    write_served_vlm(request.param, model, patch=14 if request.param == "qwen2_5_vl" else 4)
    config = SglangConfig(**OPTIONS, python=sglang_on_cpu.python(require_environment("sglang"), directory))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in AT_START.items():
            patch.setenv(name, value)
        engine = start_servers(
            config, model, Tokenizer.load(model), dtype="float32", device="cpu", logs=directory / "logs"
        )
    with engine:
        yield Shown(model), engine


def test_log_probs_are_those_of_the_model_also_in_a_second_turn(served: tuple[Shown, ServerPool]) -> None:
    shown, engine = served
    prompts = [shown.prompt(f"user\nHow many red squares? {BEFORE}", image, f"{AFTER}\n") for image in (RED, BLUE)]
    prompts.append(shown.prompt(f"look {BEFORE}", TALL, f"{AFTER} at two {BEFORE}", SMALL, f"{AFTER}\n"))
    prompts.append(shown.prompt("user\nno picture\n"))

    async def scenario() -> None:
        firsts = await asyncio.gather(*(engine.generate(ids, SAMPLING, images=images) for ids, images in prompts))
        for (ids, images), first in zip(prompts, firsts, strict=True):
            assert first.raw_logp is not None
            assert np.abs(first.raw_logp - shown.logp(ids, images, first)).max() < CLOSE
            later, new = shown.prompt(ids, first.ids, f" crop {BEFORE}", png(7, 120, 99), f"{AFTER} go")
            old = images or PromptImages((), {})
            assert new is not None
            both = PromptImages((*old.spans, *new.spans), {**old.contents, **new.contents})
            second = await engine.generate(later, SAMPLING, images=both)
            assert second.raw_logp is not None
            assert np.abs(second.raw_logp - shown.logp(later, both, second)).max() < CLOSE

    asyncio.run(scenario())


def test_what_the_server_would_take_wrongly_is_refused(served: tuple[Shown, ServerPool]) -> None:
    """A sampled placeholder before sending; a prompt of another length when the answer begins."""
    shown, engine = served
    ids, images = shown.prompt("How many? ", RED, "\n", np.array([shown.image_id], np.int32), " a")
    with pytest.raises(DataError, match="the policy has sampled it"):
        asyncio.run(engine.generate(ids, SAMPLING, images=images))
    bare, images = shown.prompt("How many? ", RED)  # without what templates write around an image
    with pytest.raises(EngineError, match=f"a prompt of 5 tokens, and {len(bare)} were meant"):
        asyncio.run(engine.generate(bare, SAMPLING, images=images))
    ids, images = shown.prompt("How many? ", RED)
    backend = engine.servers[0].backend
    assert backend.images is not None
    support = backend.images
    backend.images = replace(support, options=replace(support.options, trains_tower=True))
    try:
        with pytest.raises(ConfigError, match="keeps them by their pixels alone"):
            asyncio.run(
                engine.generate(
                    *shown.prompt("How many? ", RED)[:1], SAMPLING, images=shown.prompt("How many? ", RED)[1]
                )
            )
    finally:
        backend.images = support
