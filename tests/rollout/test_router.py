"""Several engines as one: groups stay together, the work is divided, and answers are the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from etude.errors import DataError
from etude.images import ImageSpan, PromptImages, image_digest
from etude.protocols import Ids
from etude.records import Completion, SamplingParams
from etude.rollout.router import MAX_IDLE_PREFIXES, Router
from tests.rollout.engines import engine_of, model_of, prompt_of


class Slow:
    """An engine that answers when the test lets it, with its own name as the version."""

    def __init__(self, name: int) -> None:
        self.name = name
        self.gate = asyncio.Event()
        self.seen: list[Ids] = []
        self.images: list[PromptImages] = []

    async def generate(
        self,
        prompt: Ids,
        sampling: SamplingParams,
        *,
        images: PromptImages | None = None,
        on_start: Callable[[], None] | None = None,
    ) -> Completion:
        """Return an empty completion, after a while."""
        self.seen.append(prompt)
        if images is not None:
            self.images.append(images)
        await self.gate.wait()
        drawn, logp = ids(0), np.zeros(1, np.float32)
        return Completion(ids=drawn, logp=logp, raw_logp=logp, version=ids(self.name), finish_reason="stop", text="")


def ids(*tokens: int) -> Ids:
    return np.array(tokens, np.int32)


async def send(router: Router, *prompts: Ids) -> list[asyncio.Task[Completion]]:
    """Start requests in this order."""
    made = []
    for prompt in prompts:
        made.append(asyncio.create_task(router.generate(prompt, SamplingParams())))
        await asyncio.sleep(0)
    return made


def test_groups_stay_together_and_go_to_the_least_loaded_engine() -> None:
    async def scenario() -> None:
        engines = [Slow(i) for i in range(3)]
        router = Router(engines)
        waiting = await send(router, *[ids(1, 2)] * 4, *[ids(3)] * 2, *[ids(4)] * 3, *[ids(5)] * 2, ids(1, 2))
        assert [[int(prompt[0]) for prompt in engine.seen] for engine in engines] == [[1] * 5, [3, 3, 5, 5], [4] * 3]
        for engine in engines:
            engine.gate.set()
        engines_used = [int(completion.version[0]) for completion in await asyncio.gather(*waiting)]
        assert engines_used == [0] * 4 + [1] * 2 + [2] * 3 + [1] * 2 + [0]

    asyncio.run(scenario())


def test_a_conversation_continues_on_its_engine() -> None:
    """Unless that engine has far more work than another."""

    async def scenario() -> None:
        engines = [Slow(i) for i in range(2)]
        router = Router(engines)
        opened = await send(router, ids(1), ids(2), ids(3), ids(4))
        for engine in engines:
            engine.gate.set()
        await asyncio.gather(*opened)
        await asyncio.gather(*await send(router, ids(2, 7, 8), ids(1, 9), ids(2, 7, 8, 4, 4), ids(4, 3)))
        assert [len(engine.seen) for engine in engines] == [3, 5]
        engines[1].gate.clear()
        busy = await send(router, *[ids(2, 5, i) for i in range(6)])
        assert [len(engine.seen) for engine in engines] == [3, 11], "what is under way keeps it there"
        await asyncio.gather(*await send(router, ids(4, 3, 3), ids(4, 4)))
        assert [len(engine.seen) for engine in engines] == [5, 11]
        engines[1].gate.set()
        await asyncio.gather(*busy)

    asyncio.run(scenario())


def test_prompts_with_equal_ids_and_other_images_go_to_different_engines() -> None:
    async def scenario() -> None:
        engines = [Slow(0), Slow(1)]
        router = Router(engines)
        contents = [b"a", b"b"]
        shown = [
            PromptImages((ImageSpan(image_digest(content), 1, 3),), {image_digest(content): content})
            for content in contents
        ]
        calls = [router.generate(ids(1, 9, 9, 2), SamplingParams(), images=images) for images in (*shown, *shown)]
        tasks = [asyncio.create_task(call) for call in calls]
        await asyncio.sleep(0)
        assert [[contents.index(*images.contents.values()) for images in engine.images] for engine in engines] == [
            [0, 0],
            [1, 1],
        ]
        for engine in engines:
            engine.gate.set()
        await asyncio.gather(*tasks)

    asyncio.run(scenario())


def test_old_prefixes_are_forgotten() -> None:
    async def scenario() -> None:
        engine = Slow(0)
        engine.gate.set()
        router = Router([engine])
        for number in range(3 * MAX_IDLE_PREFIXES):
            await router.generate(ids(*[7] * (number % 5), number), SamplingParams())
        assert len(router._affinities) == MAX_IDLE_PREFIXES == sum(router._prefix_lengths.values())

    asyncio.run(scenario())


def test_a_failed_request_raises_and_counts_as_no_load() -> None:
    async def scenario() -> None:
        with engine_of() as one, engine_of() as two:
            router = Router([one, two])
            with pytest.raises(DataError, match="prompt is empty"):
                await router.generate(ids(), SamplingParams())
            assert router._load == [0, 0]

    asyncio.run(scenario())


def test_answers_do_not_depend_on_how_many_engines_there_are() -> None:
    model = model_of()
    prompts = [prompt_of(12, seed=i // 4) for i in range(24)]
    samplings = [SamplingParams(max_tokens=8, seed=i) for i in range(24)]

    async def through(router: Router) -> list[Completion]:
        pairs = zip(prompts, samplings, strict=True)
        return list(await asyncio.gather(*(router.generate(prompt, sampling) for prompt, sampling in pairs)))

    with engine_of(model) as one, engine_of(model) as two, engine_of(model) as three:
        alone = asyncio.run(through(Router([one])))
        one.stats()
        many = asyncio.run(through(Router([one, two, three])))
        finished = [engine.stats()["engine/finished"].value() for engine in (one, two, three)]
    assert finished == [8, 8, 8]
    for a, b in zip(alone, many, strict=True):
        assert np.array_equal(a.ids, b.ids) and np.array_equal(a.logp, b.logp)
