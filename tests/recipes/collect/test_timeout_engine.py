"""The time limit of an answer starts when the engine starts it. Requests wait as long as the engine is active."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from etude.images import PromptImages
from etude.models import create, tiny_config
from etude.protocols import Ids
from etude.recipes.collect.player import TimeoutEngine
from etude.records import Completion, SamplingParams
from etude.rollout import TorchEngine, TorchEngineConfig
from etude.rollout.kv_cache import block_bytes
from tests.waits import run_at_once

PROMPT = np.ones(3, np.int32)


class OneByOne:
    """An engine that answers one request at a time. Each takes a hundredth of a second per token."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()

    async def generate(
        self,
        prompt: Ids,
        sampling: SamplingParams,
        *,
        images: PromptImages | None = None,
        on_start: Callable[[], None] | None = None,
    ) -> Completion:
        async with self.lock:
            assert on_start is not None
            on_start()
            await asyncio.sleep(sampling.max_tokens / 100)
        return Completion(np.ones(1, np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32), "stop", "4")


async def request_all(engine: OneByOne, seconds: float, *hundredths: int) -> list[bool]:
    """Return for each request whether it was answered."""
    timeout_engine = TimeoutEngine(engine, seconds)
    calls = (timeout_engine.generate(PROMPT, SamplingParams(max_tokens=tokens)) for tokens in hundredths)
    result = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(answer, Completion | TimeoutError) for answer in result) and not timeout_engine._waiting
    return [isinstance(answer, Completion) for answer in result]


def test_the_time_limit_of_an_answer_excludes_waiting() -> None:
    async def run_requests() -> None:
        assert await request_all(OneByOne(), 0.3, *[10] * 8) == [True] * 8

    run_at_once(run_requests())


def test_a_slow_answer_is_cancelled_and_the_others_continue() -> None:
    async def run_requests() -> None:
        assert await request_all(OneByOne(), 0.3, 5, 500, 5, 5) == [True, False, True, True]

    run_at_once(run_requests())


def test_requests_to_an_inactive_engine_end() -> None:
    async def run_requests() -> None:
        engine = OneByOne()
        await engine.lock.acquire()
        async with asyncio.timeout(2):
            assert await request_all(engine, 0.2, 1, 1, 1) == [False] * 3

    run_at_once(run_requests())


def test_waiting_requests_share_one_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request sets its timer once, when it starts. So the number of timers grows linearly with the requests."""
    calls = 0

    async def run_requests() -> None:
        loop = asyncio.get_running_loop()
        at = loop.call_at

        def count_call(*arguments: Any, **keywords: Any) -> asyncio.TimerHandle:
            nonlocal calls
            calls += 1
            return at(*arguments, **keywords)

        monkeypatch.setattr(loop, "call_at", count_call)
        assert await request_all(OneByOne(), 30.0, *[1] * 50) == [True] * 50

    run_at_once(run_requests())
    assert calls < 250


def test_the_engine_reports_the_start_of_each_request_once() -> None:
    """This holds also if memory is short, and requests are preempted and start again."""
    model = create(tiny_config(32, layers=1, hidden=16, heads=2, kv_heads=1, context=64), seed=0)
    config = TorchEngineConfig(kv_gib=5 * block_bytes(model, 4) / 2**30, block_size=4, max_num_seqs=8)
    started: list[int] = []
    sampling = SamplingParams(max_tokens=12)

    async def run_requests(engine: TorchEngine) -> None:
        await engine.pause()
        calls = (engine.generate(PROMPT + n, sampling, on_start=lambda n=n: started.append(n)) for n in range(8))
        answers = asyncio.gather(*calls)
        await asyncio.sleep(0)  # all are queued, and begin together
        await engine.resume()
        await answers

    with TorchEngine(model, None, config) as engine:
        asyncio.run(run_requests(engine))
        assert engine.stats().reduce()["engine/preemptions"] > 0
    assert sorted(started) == list(range(8))
