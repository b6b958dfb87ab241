"""Images at a real server of vLLM: its log-probs are those of the model that trains, with our pixels at our places."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import numpy as np
import pytest

from etude.chat import Tokenizer
from etude.errors import ConfigError, DataError
from etude.images import ImageSpan, PromptImages
from etude.records import SamplingParams
from etude.rollout import ServerPool, VllmConfig
from etude.rollout.launch import start_servers
from etude.rollout.server_client import HttpClient
from tests.components import require_environment
from tests.rollout import torchvision_on_cpu
from tests.rollout.shown import Shown, png
from tests.served import AT_START, OPTIONS
from tests.vlms import write_served_vlm

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

CLOSE = 1e-5
RED, BLUE, TALL, SMALL = png(0, 50, 40), png(3, 50, 40), png(1, 30, 90), png(2, 33, 47)


@pytest.fixture(
    scope="module",
    params=[
        "qwen3_vl",
        pytest.param("qwen2_5_vl", marks=pytest.mark.soak),
        pytest.param("qwen2_vl", marks=pytest.mark.soak),
    ],
)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Shown, ServerPool]]:
    """A model with a vision tower, and a server that samples from it."""
    directory = tmp_path_factory.mktemp("vllm-images")
    python = torchvision_on_cpu.python(require_environment("vllm"), require_environment("torchvision"), directory)
    model = directory / "model"
    write_served_vlm(request.param, model)
    config = VllmConfig(**OPTIONS, python=python)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in AT_START.items():
            patch.setenv(name, value)
        engine = start_servers(
            config, model, Tokenizer.load(model), dtype="float32", device="cpu", logs=directory / "logs"
        )
    with engine:
        yield Shown(model), engine


def sampling(**more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=8, seed=1, **more)


def test_log_probs_are_those_of_the_model_also_in_a_second_turn(served: tuple[Shown, ServerPool]) -> None:
    shown, engine = served
    prompts = [shown.prompt("user\nHow many red squares? ", image, "\n") for image in (RED, BLUE)]
    prompts += [shown.prompt("look ", TALL, " at two ", SMALL, "\n"), shown.prompt("user\nno picture\n")]

    async def scenario() -> None:
        firsts = await asyncio.gather(*(engine.generate(ids, sampling(), images=images) for ids, images in prompts))
        for (ids, images), first in zip(prompts, firsts, strict=True):
            assert first.raw_logp is not None
            assert np.abs(first.raw_logp - shown.logp(ids, images, first)).max() < CLOSE
            later, new = shown.prompt(ids, first.ids, " crop ", png(7, 40, 33), " go")
            old = images or PromptImages((), {})
            assert new is not None
            both = PromptImages((*old.spans, *new.spans), {**old.contents, **new.contents})
            second = await engine.generate(later, sampling(), images=both)
            assert second.raw_logp is not None
            assert np.abs(second.raw_logp - shown.logp(later, both, second)).max() < CLOSE

    asyncio.run(scenario())


def test_a_sampled_image_token_is_an_ordinary_token(served: tuple[Shown, ServerPool]) -> None:
    shown, engine = served
    ids, images = shown.prompt("user\nHow many? ", RED, "\n", np.array([shown.image_id], np.int32), " a")
    answer = asyncio.run(engine.generate(ids, sampling(), images=images))
    assert answer.raw_logp is not None
    assert np.abs(answer.raw_logp - shown.logp(ids, images, answer)).max() < CLOSE


def test_pixels_are_sent_once_and_again_to_a_server_that_has_dropped_them(
    served: tuple[Shown, ServerPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown, engine = served
    sent: list[list[bool]] = []
    send = HttpClient.stream_events

    async def watched(self: HttpClient, path: str, body: Any) -> AsyncGenerator[tuple[int, dict[str, Any]], None]:
        sent.append([item is not None for item in body["features"]["kwargs_data"]["image"]])
        async for event in send(self, path, body):
            yield event

    monkeypatch.setattr(HttpClient, "stream_events", watched)
    one, two = png(11, 40, 40), png(12, 40, 40)

    async def answer(content: bytes) -> None:
        ids, images = shown.prompt("look ", content, " now")
        given = await engine.generate(ids, sampling(), images=images)
        assert given.raw_logp is not None
        assert np.abs(given.raw_logp - shown.logp(ids, images, given)).max() < CLOSE

    asyncio.run(answer(one))
    asyncio.run(answer(one))
    assert sent == [[True], [False]]
    (server,) = engine.servers
    _, images = shown.prompt(two)
    assert images is not None
    server._sent_images.add(images.contents)  # as if the server had been sent it, and dropped it
    asyncio.run(answer(two))
    assert sent[2:] == [[False], [True]]


def test_what_the_server_would_take_wrongly_is_refused_before_it_is_sent(served: tuple[Shown, ServerPool]) -> None:
    shown, engine = served
    ids, images = shown.prompt("look ", RED, " now")
    assert images is not None
    (span,) = images.spans
    short = PromptImages((ImageSpan(span.digest, span.start, span.stop - 1),), images.contents)
    with pytest.raises(DataError, match="one token for each feature"):
        asyncio.run(engine.generate(ids, sampling(), images=short))
    with pytest.raises(DataError, match="bytes of image 1 of the prompt are missing"):
        asyncio.run(engine.generate(ids, sampling(), images=PromptImages(images.spans, {})))


def test_a_server_that_normalizes_pixels_itself_is_refused(served: tuple[Shown, ServerPool]) -> None:
    """The real server's report, with the other value."""
    _, engine = served
    (server,) = engine.servers

    class Other(HttpClient):
        async def get(self, path: str, *, timeout: float | None = None) -> str:
            return (
                (await server.get(path, timeout=timeout))
                .replace('"mm_device_do_normalize": false', '"mm_device_do_normalize": true')
                .replace('"mm_device_do_normalize":false', '"mm_device_do_normalize":true')
            )

    async def scenario() -> None:
        await server.backend.check_images(server)
        with pytest.raises(ConfigError, match="--no-mm-device-do-normalize"):
            await server.backend.check_images(Other(server.url))

    asyncio.run(engine._run(scenario()))
