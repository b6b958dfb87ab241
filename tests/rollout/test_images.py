"""Images in the embedded engine: its log-probs are the model's, however prompts are cut, shared or preempted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from PIL import Image

from etude.errors import ConfigError, DataError, ImageError
from etude.images import ImageSpan, PromptImages
from etude.images.pixels import PixelReader, ResizedImage
from etude.records import Completion, SamplingParams
from etude.rollout.image_reader import ImageReader
from etude.rollout.torch_engine import TorchEngine
from tests.rollout.engines import Ids, engine_of
from tests.rollout.shown import Shown, png, shown_to
from tests.vlms import QWEN, TILED, load_vlm

SEEING = (*QWEN, *TILED, "gemma3", "gemma4", "gemma4_large")
RED, BLUE, TALL, SMALL = png(0, 50, 40), png(3, 50, 40), png(1, 30, 90), png(2, 33, 47)
CLOSE = 1e-5

Prompt = tuple[Ids, PromptImages | None]


class Watched(PixelReader):
    """A reader that notes the threads on which it reads images."""

    threads: ClassVar[list[str]] = []

    def resize(self, image: Image.Image) -> ResizedImage:
        """Resize an image."""
        Watched.threads.append(threading.current_thread().name)
        return super().resize(image)


def prompts_of(shown: Shown) -> list[Prompt]:
    """Return two prompts with equal ids and other images, one with two images, and one of text."""
    prompts = [shown.prompt("user\nHow many red squares? ", image, "\nassistant\n") for image in (RED, BLUE)]
    assert np.array_equal(prompts[0][0], prompts[1][0])
    return [*prompts, shown.prompt("look ", TALL, " at two ", SMALL, "\n"), shown.prompt("user\nno picture\n")]


async def answer(
    engine: TorchEngine, prompts: Sequence[Prompt], tokens: int = 8, tries: int = 2, **sampling: object
) -> list[Completion]:
    """Sample answers to all prompts at once, several of each."""
    calls = [
        engine.generate(ids, SamplingParams(max_tokens=tokens, seed=seed, **sampling), images=images)  # type: ignore[arg-type]
        for ids, images in prompts
        for seed in range(tries)
    ]
    return list(await asyncio.gather(*calls))


async def answer_together(engine: TorchEngine, prompts: Sequence[Prompt], tokens: int) -> list[Completion]:
    """Sample answers that begin at once, however long the images of each take to read."""
    await engine.pause()
    answers = asyncio.create_task(answer(engine, prompts, tokens=tokens))
    async with asyncio.timeout(60):
        while engine.stats().reduce()["engine/waiting"] < 2 * len(prompts):
            await asyncio.sleep(0.01)
    await engine.resume()
    return await answers


def follow(shown: Shown, prompts: Sequence[Prompt], answers: Sequence[Completion]) -> None:
    """Check that the log-probs of answers, several of each prompt, are those of the model."""
    tries = len(answers) // len(prompts)
    for place, given in enumerate(answers):
        assert given.raw_logp is not None and len(given.ids)
        wanted = shown.logp(*prompts[place // tries], given)
        assert np.abs(given.raw_logp - wanted).max() < CLOSE


@pytest.mark.parametrize("family", SEEING)
def test_answers_and_later_turns_have_the_log_probs_of_the_model(family: str) -> None:
    """A second turn shows another image behind the cached ones; prompts in small parts give the same tokens."""
    shown = shown_to(family)
    drawn: list[list[Ids]] = []
    for budget in (512, 24):
        reader = ImageReader(shown.reader)
        with engine_of(shown.model, images=reader, block_size=8, max_num_batched_tokens=budget) as engine:
            prompts = prompts_of(shown)
            first = asyncio.run(answer(engine, prompts))
            follow(shown, prompts, first)
            later: list[Prompt] = []
            for place, given in enumerate(first):
                ids, images = prompts[place // 2]
                more, new = shown.prompt(ids, given.ids, " crop ", png(7, 40, 33), " go")
                old = () if images is None else images.spans
                assert new is not None
                contents = {**new.contents, **(images.contents if images is not None else {})}
                later.append((more, PromptImages((*old, *new.spans), contents)))
            second = asyncio.run(answer(engine, later, tries=1))
            follow(shown, later, second)
            assert engine._steps.features.encoded == 5
            assert engine.stats().reduce()["engine/cache_hit_rate"] > 0.05
        drawn.append([given.ids for given in (*first, *second)])
    assert all(np.array_equal(*pair) for pair in zip(*drawn, strict=True))
    assert any(not np.array_equal(drawn[0][n], drawn[0][2 + n]) for n in range(2)), "equal ids and another image"


@pytest.mark.parametrize("family", ["qwen3_vl", "smolvlm", "gemma3"])
def test_preempted_requests_and_dropped_features_change_nothing(family: str) -> None:
    shown = shown_to(family)
    prompts = [*prompts_of(shown), shown.prompt("look ", SMALL, " at two ", TALL, "\n")]
    longest = max(len(ids) for ids, _ in prompts)
    blocks = -(-(longest + 24) // 8) + 4
    reader = ImageReader(Watched(shown.reader.layout, shown.reader.processor))
    reader.pixels._resized.max_bytes = 1
    Watched.threads.clear()
    options = {"block_size": 8, "max_num_seqs": 8, "max_num_batched_tokens": 24}
    with engine_of(shown.model, images=reader, blocks=blocks, **options) as engine:
        engine._steps.features._max_features = 1
        assert engine._steps._pixels is not None
        engine._steps._pixels._max_bytes = 1
        crowded = asyncio.run(answer_together(engine, prompts, tokens=24))
        assert engine.stats().reduce()["engine/preemptions"] > 0
        assert engine._steps.features.encoded > 4
        assert not engine._steps._pixels._reads, "an idle engine holds no pixels"
        assert len(Watched.threads) > 4 and {name.partition("_")[0] for name in Watched.threads} == {"etude-images"}
    with engine_of(shown.model, images=reader) as engine:
        for place, given in enumerate(crowded):
            ids, images = prompts[place // 2]
            sampling = SamplingParams(max_tokens=24, seed=place % 2)
            alone = asyncio.run(engine.generate(ids, sampling, images=images))
            assert np.array_equal(alone.ids, given.ids)
    follow(shown, prompts, crowded)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "idefics3"])
def test_a_sampled_image_token_is_an_ordinary_token(family: str) -> None:
    shown = shown_to(family)
    prompts = prompts_of(shown)
    with engine_of(shown.model, images=ImageReader(shown.reader)) as engine:
        first = asyncio.run(answer(engine, prompts, tokens=3, tries=1, logit_bias={shown.image_id: 100.0}))
        assert all(set(given.ids.tolist()) == {shown.image_id} for given in first)
        follow(shown, prompts, first)
        later: list[Prompt] = [
            (np.concatenate([ids, given.ids]), images) for (ids, images), given in zip(prompts, first, strict=True)
        ]
        follow(shown, later, asyncio.run(answer(engine, later, tries=1)))


def test_new_weights_of_a_tower_clear_its_features_and_a_frozen_tower_keeps_them() -> None:
    shown = shown_to("qwen3_vl")
    prompts = prompts_of(shown)
    model = load_vlm(shown.directory)
    other = load_vlm(shown.directory)
    with torch.no_grad():
        for weight in other.tower_weights.values():
            weight.mul_(1.2)
    tower = set(model.tower_weights)
    text = [(name, weight.detach()) for name, weight in other.named_weights() if name not in tower]
    with engine_of(model, images=ImageReader(shown.reader)) as engine:
        asyncio.run(answer(engine, prompts))
        for weight in model.tower_weights.values():
            weight.requires_grad_(False)
        asyncio.run(engine.update_weights(text, 1))
        follow(shown, prompts, asyncio.run(answer(engine, prompts)))
        assert engine._steps.features.encoded == 4
        for weight in model.tower_weights.values():
            weight.requires_grad_(True)
        asyncio.run(engine.update_weights([(n, w.detach()) for n, w in other.named_weights()], 2))
        for place, given in enumerate(asyncio.run(answer(engine, prompts))):
            assert given.raw_logp is not None and set(given.version.tolist()) == {2}
            assert np.abs(given.raw_logp - shown.logp(*prompts[place // 2], given, other)).max() < CLOSE
        assert engine._steps.features.encoded == 8


def test_a_stream_of_a_prompt_with_an_image_is_its_answer() -> None:
    shown = shown_to("qwen2_vl")
    ids, images = prompts_of(shown)[0]
    sampling = SamplingParams(max_tokens=6, seed=3)

    async def scenario(engine: TorchEngine) -> bool:
        whole = await engine.generate(ids, sampling, images=images)
        pieces = [delta async for delta in engine.stream(ids, sampling, images=images)]
        return [token for delta in pieces for token in delta.ids.tolist()] == whole.ids.tolist()

    with engine_of(shown.model, images=ImageReader(shown.reader)) as engine:
        assert asyncio.run(scenario(engine))


def test_images_that_do_not_fit_a_prompt_are_refused_in_sentences() -> None:
    shown = shown_to("qwen3_vl")
    ids, images = prompts_of(shown)[2]
    assert images is not None
    one, two = images.spans
    wrong: list[tuple[PromptImages, type[Exception], str]] = [
        (replace(images, contents={**images.contents, one.digest: TALL[:99]}), ImageError, "Image 1 of the prompt"),
        (replace(images, spans=(one,), contents={}), DataError, "bytes of image 1 of the prompt are missing"),
        (replace(images, spans=(ImageSpan(one.digest, one.start, one.stop - 1), two)), DataError, "one token for each"),
        (replace(images, spans=(ImageSpan(one.digest, one.start, one.stop, 1), two)), DataError, "one token for each"),
        (replace(images, spans=(ImageSpan(two.digest, one.start, one.stop), two)), DataError, "one token for each"),
        (replace(images, spans=(one, two.shifted(len(ids)))), ValueError, "sorted, apart from each other, and inside"),
    ]
    with engine_of(shown.model, images=ImageReader(shown.reader)) as engine:
        for refused, kind, sentence in wrong:
            with pytest.raises(kind, match=sentence):
                asyncio.run(engine.generate(ids, SamplingParams(max_tokens=2), images=refused))
        long, many = shown.prompt(*[TALL] * 99)
        with pytest.raises(DataError, match="of them of images, and the model's context is 4,096"):
            asyncio.run(engine.generate(long, SamplingParams(max_tokens=2), images=many))
        assert len(asyncio.run(answer(engine, [(ids, images)]))) == 2, "refused images harm no other"
    with engine_of(shown.model) as engine, pytest.raises(ConfigError, match="without a reader of images"):
        asyncio.run(engine.generate(ids, SamplingParams(max_tokens=2), images=images))
