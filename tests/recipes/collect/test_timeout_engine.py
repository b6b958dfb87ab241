"""An answer's time begins with its turn; what waits, waits as long as the engine does anything at all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from etude.models import create, tiny_config
from etude.protocols import Ids
from etude.recipes.collect.timeout_engine import TimeoutEngine
from etude.records import Completion, SamplingParams
from etude.rollout import TorchEngine, TorchEngineConfig
from etude.rollout.kv_cache import block_bytes

PROMPT = np.ones(3, np.int32)


class OneByOne:
    """An engine that answers one request at a time, each in so many seconds as its number of tokens says."""

    def __init__(self) -> None:
        self.line = asyncio.Lock()

    async def generate(
        self, prompt: Ids, sampling: SamplingParams, *, on_start: Callable[[], None] | None = None
    ) -> Completion:
        async with self.line:
            assert on_start is not None
            on_start()
            await asyncio.sleep(sampling.max_tokens / 100)
        return Completion(np.ones(1, np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32), "stop", "4")


async def request_all(engine: OneByOne, seconds: float, *hundredths: int) -> list[bool]:
    """Whether each request was answered."""
    patience = TimeoutEngine(engine, seconds)
    calls = (patience.generate(PROMPT, SamplingParams(max_tokens=tokens)) for tokens in hundredths)
    result = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(each, Completion | TimeoutError) for each in result) and not patience._waiting
    return [isinstance(each, Completion) for each in result]


def test_waiting_for_others_costs_an_answer_nothing() -> None:
    async def act() -> None:
        assert await request_all(OneByOne(), 0.3, *[10] * 8) == [True] * 8

    asyncio.run(act())


def test_who_takes_too_long_is_ended_and_the_others_go_on() -> None:
    async def act() -> None:
        assert await request_all(OneByOne(), 0.3, 5, 500, 5, 5) == [True, False, True, True]

    asyncio.run(act())


def test_an_engine_that_has_stopped_is_not_waited_for() -> None:
    async def act() -> None:
        engine = OneByOne()
        await engine.line.acquire()
        began = time.monotonic()
        assert await request_all(engine, 0.2, 1, 1, 1) == [False] * 3
        assert time.monotonic() - began < 2

    asyncio.run(act())


def test_many_that_wait_share_one_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sets its own once, when it begins: what all of them set grows with their number and not with its square."""
    calls = 0

    async def act() -> None:
        loop = asyncio.get_running_loop()
        at = loop.call_at

        def counted(*arguments: Any, **named: Any) -> asyncio.TimerHandle:
            nonlocal calls
            calls += 1
            return at(*arguments, **named)

        monkeypatch.setattr(loop, "call_at", counted)
        assert await request_all(OneByOne(), 30.0, *[1] * 50) == [True] * 50

    asyncio.run(act())
    assert calls < 250


def test_the_engine_says_when_it_begins_once_for_each_request() -> None:
    """Also where its memory holds few, and some are put back and begin again."""
    model = create(tiny_config(32, layers=1, hidden=16, heads=2, kv_heads=1, context=64), seed=0)
    config = TorchEngineConfig(kv_gib=5 * block_bytes(model, 4) / 2**30, block_size=4, max_num_seqs=8)
    results: list[float] = []
    sampling = SamplingParams(max_tokens=12)

    async def act(engine: TorchEngine) -> None:
        calls = (
            engine.generate(PROMPT + n, sampling, on_start=lambda: results.append(time.monotonic())) for n in range(8)
        )
        await asyncio.gather(*calls)

    with TorchEngine(model, None, config) as engine:
        asyncio.run(act(engine))
        assert engine.stats().reduce()["engine/preemptions"] > 0
    assert len(results) == 8
